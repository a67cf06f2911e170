#!/usr/bin/env python3
"""Times training steps of PyTorch on the CPU: the yardstick for `lockstep bench step`.

A step is forward, backward, clipping at 1.0 and AdamW (betas 0.9/0.95, decay 0.1 on matrices), in eager mode, on
random tokens drawn before the clock starts. With `--json` it prints what `lockstep bench step --json` prints:
{"tokens_per_s", "step_ms" (median), "peak_rss_bytes", "loss": [...]}.

bf16 comes in two modes, and a fair comparison takes the faster: `autocast` keeps weights and optimizer in f32 and
casts inside the operations; `pure` holds everything in bf16, which is less work but trains worse.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r benches/peers/requirements.txt
    /tmp/peers/bin/python benches/peers/pytorch_step.py --model baby-gpt --precision f32 --batch 8 --seq-len 256
"""

import argparse
import json
import statistics
import time

import torch

from common import adamw, environment, train_step, use_threads
from machine import peak_rss_bytes
from models import PRESETS, build

LEARNING_RATE = 3e-4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="baby-gpt")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--bf16-mode", choices=["autocast", "pure"], default="autocast")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="steps timed")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = parser.parse_args()
    if arguments.seq_len > PRESETS[arguments.model].positions:
        parser.error(f"--seq-len {arguments.seq_len} exceeds the model's {PRESETS[arguments.model].positions} positions")
    return arguments


def measure(arguments: argparse.Namespace) -> dict:
    use_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    model = build(arguments.model)
    if arguments.precision == "bf16" and arguments.bf16_mode == "pure":
        model = model.to(torch.bfloat16)
    autocast = arguments.precision == "bf16" and arguments.bf16_mode == "autocast"
    optimizer = adamw(model, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)

    shape = (arguments.warmup + arguments.steps, arguments.batch, arguments.seq_len + 1)
    batches = torch.randint(model.config.vocab, shape)
    losses, step_ms = [], []
    for tokens in batches:
        started = time.perf_counter()
        loss, _ = train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], autocast)
        step_ms.append((time.perf_counter() - started) * 1e3)
        losses.append(loss)

    median_ms = statistics.median(step_ms[arguments.warmup :])
    return {
        "tokens_per_s": arguments.batch * arguments.seq_len / median_ms * 1e3,
        "step_ms": median_ms,
        "peak_rss_bytes": peak_rss_bytes(),
        "loss": losses[arguments.warmup :],
        "environment": environment(),
    }


def main() -> None:
    arguments = parse_arguments()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    mode = f" ({arguments.bf16_mode})" if arguments.precision == "bf16" else ""
    print(f"{arguments.model} {arguments.precision}{mode} {arguments.batch}x{arguments.seq_len}, {arguments.threads} threads")
    print(f"{result['tokens_per_s']:.0f} tokens/s, {result['step_ms']:.1f} ms a step (median of {arguments.steps}),")
    print(f"{result['peak_rss_bytes'] / 2**20:.0f} MiB at peak, loss {result['loss'][0]:.4f} -> {result['loss'][-1]:.4f}")


if __name__ == "__main__":
    main()
