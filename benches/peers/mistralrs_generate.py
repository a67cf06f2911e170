#!/usr/bin/env python3
"""Times a prompt and the tokens after it on mistral.rs, one stream; `lockstep bench generate` is its counterpart.

    /tmp/peers/bin/pip install mistralrs==0.9.5
    /tmp/peers/bin/python benches/peers/random_model.py --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    cp tokenizer.json /tmp/qwen3-0.6b/
    /tmp/peers/bin/python benches/peers/mistralrs_generate.py --model /tmp/qwen3-0.6b [--dtype f32] [--isq Q8_0]
    /tmp/peers/bin/python benches/peers/mistralrs_generate.py --model FILE.gguf

mistral.rs takes text, so the model needs a tokenizer. Prompts are random letters, another one in each run, without a prefix
cache; `prompt_tokens` is the number that mistral.rs counted. Generation is greedy and goes on past an end of text.
mistral.rs tells the two times: the first new token belongs to the prompt, and `new_tokens` come after it. (Its own rate counts
the first one with those.) The best of `--runs` runs is printed as one line of JSON, after one to warm up; logs go to standard error.

`--dtype` is that of activations, and of weights that are not quantized. `auto` leaves it to mistral.rs, whose log tells what it
took: f32 for files of bf16 and of quantized weights alike on a Zen 4, where bf16 is two to five times slower.
"""

import argparse
import importlib.metadata
import json
import os
import random
import string
import sys
import tempfile
from pathlib import Path

from machine import peak_rss_bytes

DTYPES = {"auto": "Auto", "bf16": "BF16", "f16": "F16", "f32": "F32"}


def completed(model: Path, into: Path) -> Path:
    """The model's directory, or one of links to its files whose config.json has what mistral.rs asks of Qwen3 as well."""
    config = json.loads((model / "config.json").read_text())
    if config.get("model_type") not in ("qwen3", "qwen3_moe") or "max_window_layers" in config:
        return model
    for file in model.iterdir():
        if file.name != "config.json":
            (into / file.name).symlink_to(file.resolve())
    config |= {"max_window_layers": config["num_hidden_layers"], "use_sliding_window": False, "sliding_window": None}
    (into / "config.json").write_text(json.dumps(config))
    return into


def prompt_of(runner, tokens: int, seed: int) -> str:
    """Random letters of about so many tokens: exactly so many where the cut text has the same tokens as before."""
    letters = random.Random(seed).choices(string.ascii_letters, k=6 * tokens)
    ids = runner.tokenize_text("".join(letters), False, None)
    return runner.detokenize_text(ids[:tokens], False)


def times(arguments: argparse.Namespace) -> dict:
    # Pools take their sizes from the environment when the library starts.
    os.environ["RAYON_NUM_THREADS"] = os.environ["CANDLE_NUM_THREADS"] = str(arguments.threads)
    import mistralrs

    dtype = getattr(mistralrs.ModelDType, DTYPES[arguments.dtype])
    with tempfile.TemporaryDirectory() as links:
        if arguments.model.is_dir():
            which = mistralrs.Which.Plain(model_id=str(completed(arguments.model, Path(links))), dtype=dtype)
            weights = f"{arguments.isq} of {arguments.model.name}" if arguments.isq else arguments.model.name
        else:
            file = arguments.model.resolve()
            which = mistralrs.Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name, dtype=dtype)
            weights = f"{arguments.isq} of {file.name}" if arguments.isq else file.name
        runner = mistralrs.Runner(
            which=which, in_situ_quant=arguments.isq, max_seqs=1, prefix_cache_n=0, no_paged_attn=True, token_source="none",
        )
    prompt_tokens, prompt_rates, decode_rates = [], [], []
    for number in range(arguments.runs + 1):
        request = mistralrs.CompletionRequest(
            prompt=prompt_of(runner, arguments.prompt_tokens, number), model="default", max_tokens=arguments.new_tokens + 1,
            temperature=0.0, ignore_eos=True,
        )
        usage = runner.send_completion_request(request).usage
        if usage.completion_tokens != arguments.new_tokens + 1:
            sys.exit(f"mistral.rs made {usage.completion_tokens} tokens instead of {arguments.new_tokens + 1}")
        if number > 0:
            prompt_tokens.append(usage.prompt_tokens)
            prompt_rates.append(usage.prompt_tokens / usage.total_prompt_time_sec)
            decode_rates.append(arguments.new_tokens / usage.total_completion_time_sec)
    return {
        "peer": "mistral.rs",
        "version": importlib.metadata.version("mistralrs"),
        "weights": weights,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "prompt_tokens": max(prompt_tokens),
        "new_tokens": arguments.new_tokens,
        "prompt_tokens_per_s": max(prompt_rates),
        "decode_tokens_per_s": max(decode_rates),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory with a tokenizer.json, or a GGUF file")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of activations (default: auto)")
    parser.add_argument("--isq", help="quantization while the model is loaded, as mistral.rs names it: Q8_0, Q4K, ...")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    # The library logs to the standard output, which is for the document alone.
    document_output = os.dup(1)
    os.dup2(2, 1)
    document = json.dumps(times(arguments))
    os.dup2(document_output, 1)
    print(document, flush=True)


if __name__ == "__main__":
    main()
