#!/usr/bin/env python3
"""Times a prompt and the tokens after it on ONNX Runtime's generate API, one stream; `lockstep bench generate` is its counterpart.

    /tmp/peers/bin/pip install onnxruntime-genai==0.18.0 onnx onnx-ir torch transformers
    /tmp/peers/bin/python benches/peers/random_model.py --shape qwen3-0.6b --out /tmp/qwen3-0.6b
    cp tokenizer.json /tmp/qwen3-0.6b/
    /tmp/peers/bin/python benches/peers/onnxruntime_generate.py --model /tmp/qwen3-0.6b --export /tmp/q06-onnx-int4 \
        --precision int4 --extra-options prune_lm_head=true

The model is exported once by the package's builder, which asks for a tokenizer, and found in `--export` afterwards. Processors take
fp32, int8 and int4. `prune_lm_head=true` has a prompt compute the logits of its last token alone, as Lockstep does; without it the
builder's graph computes those of all tokens. `block_size` is 32 unless it is given; `nodes_to_exclude=/lm_head/MatMul` leaves the output
layer in f32. `weights` says what is in the exported graph: accuracy level 4 rounds activations to int8.

Prompts are random ids. The first new token belongs to the prompt, `new_tokens` come after it, greedily, past an end of text.
The best of `--runs` runs is printed as one line of JSON, after one to warm up; the builder's output goes to standard error.
(The script does not have the name of the package, which it would hide.)
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path

from machine import peak_rss_bytes


def export(arguments: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(arguments.model.resolve())]
    command += ["-o", str(arguments.export.resolve()), "-p", arguments.precision, "-e", "cpu"]
    command += ["-c", str(arguments.export.resolve() / "cache")]
    if arguments.extra_options:
        command += ["--extra_options", *arguments.extra_options]
    arguments.export.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=arguments.export)


def settings(directory: Path, threads: int) -> dict:
    """What replaces parts of genai_config.json: threads, and one end of text (the builder may name one outside the vocabulary)."""
    model = json.loads((directory / "genai_config.json").read_text())["model"]
    ends = model["eos_token_id"]
    end = min(ends) if isinstance(ends, list) else ends
    sessions = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    return {"model": {"eos_token_id": end, "pad_token_id": end, "decoder": {"session_options": sessions}}}


def weights(directory: Path) -> str:
    """What the exported graph multiplies by: `197 x 4 bits in blocks of 32, accuracy level 4`."""
    import collections

    import onnx

    graph = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    kinds = collections.Counter()
    for node in graph.node:
        values = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "MatMulNBits":
            level = values.get("accuracy_level", 0)
            kinds[f"{values['bits']} bits in blocks of {values['block_size']}, accuracy level {level}"] += 1
        elif node.op_type in ("MatMul", "Gemm") and node.input[1] in constants:
            kinds["f32"] += 1
    return "; ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items()))


def times(arguments: argparse.Namespace) -> dict:
    import numpy
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(arguments.export))
    config.overlay(json.dumps(settings(arguments.export, arguments.threads)))
    model = onnxruntime_genai.Model(config)
    vocabulary = json.loads((arguments.export / "genai_config.json").read_text())["model"]["vocab_size"]
    length = arguments.prompt_tokens + 1 + arguments.new_tokens
    random = numpy.random.default_rng(0)
    prompt_rates, decode_rates = [], []
    for number in range(arguments.runs + 1):
        ids = random.integers(0, vocabulary, arguments.prompt_tokens).astype(numpy.int32)
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        begin = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(arguments.new_tokens):
            generator.generate_next_token()
        end = time.perf_counter()
        if generator.token_count() != length:
            sys.exit(f"ONNX Runtime made {generator.token_count() - arguments.prompt_tokens} tokens instead of {arguments.new_tokens + 1}")
        if number > 0:
            prompt_rates.append(arguments.prompt_tokens / (middle - begin))
            decode_rates.append(arguments.new_tokens / (end - middle))
        del generator
    peak = peak_rss_bytes()
    return {
        "peer": "onnxruntime-genai",
        "version": importlib.metadata.version("onnxruntime-genai"),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "weights": weights(arguments.export),
        "threads": arguments.threads,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "prompt_tokens_per_s": max(prompt_rates),
        "decode_tokens_per_s": max(decode_rates),
        "peak_rss_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory, to be exported if --export has no model yet")
    parser.add_argument("--export", type=Path, required=True, help="directory of the exported model")
    parser.add_argument("--precision", choices=["fp32", "int8", "int4"], default="int4")
    parser.add_argument("--extra-options", nargs="+", metavar="KEY=VALUE", help="options of the builder")
    parser.add_argument("--export-only", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if not (arguments.export / "genai_config.json").exists():
        if arguments.model is None:
            parser.error(f"{arguments.export} has no model, and --model names none to export")
        export(arguments)
    if not arguments.export_only:
        print(json.dumps(times(arguments)))


if __name__ == "__main__":
    main()
