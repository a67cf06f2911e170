#!/usr/bin/env python3
"""Times a prompt and the tokens after it: `lockstep bench generate` and transformers by turns, one stream, random token ids.

    cargo build --release
    /tmp/peers/bin/pip install transformers
    /tmp/peers/bin/python benches/peers/random_model.py --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    /tmp/peers/bin/python benches/peers/compare_generate.py --model /tmp/qwen3-0.6b --rounds 3

Both run the model in the type of its files, with one sequence. A process of each runs in every round; it reads the prompt
three times, and its fastest time counts. Ratios are taken round by round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import by_turns, cpu_name, peak_rss_bytes, spread, undisturbed

HERE = Path(__file__).resolve().parent
LIMIT_S = 1200
COLUMNS = [("prefill_tokens_per_s", "prompt, tokens/s", 0), ("decode_tokens_per_s", "then, tokens/s", 1)]


def transformers_times(arguments: argparse.Namespace) -> dict:
    """Times transformers in this process."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto").eval()
    load_ms = (time.perf_counter() - begin) * 1e3
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, [1, arguments.prompt_tokens + arguments.new_tokens], generator=random)
    prompt, rest = ids[:, : arguments.prompt_tokens], ids[:, arguments.prompt_tokens :]
    prefill, decode = [], []
    with torch.inference_mode():
        for _ in range(3):
            begin = time.perf_counter()
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            prefill.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            for at in range(arguments.new_tokens):
                cache = model(rest[:, at : at + 1], past_key_values=cache, use_cache=True).past_key_values
            decode.append(time.perf_counter() - begin)
    return {
        "load_ms": load_ms,
        "prefill_tokens_per_s": arguments.prompt_tokens / min(prefill),
        "decode_tokens_per_s": arguments.new_tokens / min(decode),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def document(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lockstep", type=Path, default=HERE.parents[1] / "target/release/lockstep")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(transformers_times(arguments)))
        return
    common = ["--model", arguments.model, "--threads", str(arguments.threads)]
    common += ["--prompt-tokens", str(arguments.prompt_tokens), "--new-tokens", str(arguments.new_tokens)]
    commands = {
        "Lockstep": [str(arguments.lockstep), "bench", "generate", "--json", *common],
        "transformers": [sys.executable, __file__, "--peer", *common],
    }
    rounds = []
    for number in range(arguments.rounds):
        results = {
            name: undisturbed(lambda name=name: document(commands[name])) for name in by_turns(number, list(commands))
        }
        rounds.append(results)
        print(f"round {number + 1}: " + "; ".join(
            f"{name} {result['prefill_tokens_per_s']:.0f} and {result['decode_tokens_per_s']:.1f} tokens/s"
            for name, result in results.items()
        ), file=sys.stderr)
    print("| | Lockstep | transformers | ratio |\n| --- | ---: | ---: | ---: |")
    for key, title, digits in COLUMNS:
        ours, theirs = ([results[name][key] for results in rounds] for name in commands)
        ratios = [a / b for a, b in zip(ours, theirs)]
        print(f"| {title} | {spread(ours, digits)} | {spread(theirs, digits)} | {spread(ratios, 2)} |")
    for key, title, unit in [("load_ms", "opened in, ms", 1), ("peak_rss_bytes", "peak of resident memory, MiB", 2**20)]:
        ours, theirs = (statistics.median(results[name][key] / unit for results in rounds) for name in commands)
        print(f"| {title} | {ours:.0f} | {theirs:.0f} | |")
    others = max(result["others"] for results in rounds for result in results.values())
    print(f"\n{cpu_name()}, {arguments.threads} threads; others had {100 * others:.0f}% of the processors at most.")


if __name__ == "__main__":
    main()
