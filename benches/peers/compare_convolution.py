#!/usr/bin/env python3
"""Convolutions side by side: the bench `convolution` of lockstep-tensor and PyTorch (oneDNN) on the same shapes.

The engines run by turns; of each, the fastest time of all rounds counts. PyTorch gets channels_last tensors, Lockstep
NHWC. PyTorch computes the two gradients by separate calls of `convolution_backward`, and writes that of the weight in
the operands' type; Lockstep accumulates it in f32.

    cargo bench -p lockstep-tensor --bench convolution --no-run
    /tmp/peers/bin/python benches/peers/compare_convolution.py --precision f32 --rounds 3
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

import torch

from machine import cpu_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PASSES = ["forward", "dx", "dw"]
SECONDS, RUNS = 0.3, 5


def lockstep_rows(precision: str, threads: int) -> list[dict]:
    command = ["cargo", "bench", "--quiet", "-p", "lockstep-tensor", "--bench", "convolution", "--"]
    command += ["--dtype", precision, "--threads", str(threads)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=REPOSITORY).stdout
    return [json.loads(line) for line in output.splitlines()]


def fastest_ms(run) -> float:
    run()
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs < RUNS or time.perf_counter() - started < SECONDS:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        runs += 1
    return 1e3 * best


def torch_ms(row: dict, dtype: torch.dtype) -> float:
    batch, height, width, inputs = row["input"]
    kernel, stride, padding = ([row[name]] * 2 for name in ("kernel", "stride", "padding"))
    last = dict(memory_format=torch.channels_last)
    x = torch.rand(batch, inputs, height, width).sub_(0.5).to(dtype).contiguous(**last)
    weight = torch.rand(row["outputs"], inputs, *kernel).sub_(0.5).to(dtype).contiguous(**last)
    forward = lambda: torch.conv2d(x, weight, None, stride, padding)
    if row["pass"] == "forward":
        return fastest_ms(forward)
    dy = forward().contiguous(**last)
    mask = [row["pass"] == "dx", row["pass"] == "dw", False]
    backward = torch.ops.aten.convolution_backward
    return fastest_ms(lambda: backward(dy, x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, mask))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]

    best: dict[tuple, dict] = {}
    for _ in range(arguments.rounds):
        for row in lockstep_rows(arguments.precision, arguments.threads):
            entry = best.setdefault((row["name"], row["pass"]), {**row, "torch": float("inf")})
            entry["ms"] = min(entry["ms"], row["ms"])
            entry["gflops"] = max(entry["gflops"], row["gflops"])
            entry["torch"] = min(entry["torch"], torch_ms(row, dtype))
    print(f"{arguments.precision}, {cpu_name()}, {arguments.threads} of {os.cpu_count()} CPUs, PyTorch {torch.__version__}\n")
    print("| convolution | pass | Lockstep ms | GFLOP/s | PyTorch ms | Lockstep / PyTorch speed |")
    print("|---|---|---:|---:|---:|---:|")
    for row in best.values():
        times = f"{row['ms']:.2f} | {row['gflops']:.0f} | {row['torch']:.2f} | {row['torch'] / row['ms']:.2f}"
        print(f"| {row['name']} | {row['pass']} | {times} |")


if __name__ == "__main__":
    main()
