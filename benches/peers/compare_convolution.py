#!/usr/bin/env python3
"""Convolutions side by side: the bench `convolution` of lockstep-tensor and PyTorch (oneDNN) on the same shapes.

The engines run by turns, each round in processes of their own, and each round begins with the other engine. In a round the
fastest time of each shape counts; the table has the median, minimum and maximum of the rounds, and of their ratios. PyTorch
gets channels_last tensors, Lockstep NHWC. PyTorch computes the two gradients by separate calls of `convolution_backward`, and
writes that of the weight in the operands' type; Lockstep accumulates it in f32.

If PyTorch would run below the processor's AVX-512, nothing is compared and the exit code is 2: see `kernels.py`.

    cargo bench -p lockstep-tensor --bench convolution --no-run
    /tmp/peers/bin/python benches/peers/compare_convolution.py --precision f32 --rounds 5
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kernels import add_arguments, prepared
from machine import by_turns, cpu_name, spread

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENGINES = ["Lockstep", "PyTorch"]
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


def torch_ms(row: dict, precision: str) -> float:
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[precision]
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


def peer(precision: str, threads: int) -> None:
    """Prints the rows of standard input with PyTorch's times in place of theirs."""
    import torch

    torch.set_num_threads(threads)
    with torch.no_grad():
        print(json.dumps([{**row, "ms": torch_ms(row, precision)} for row in json.load(sys.stdin)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    precision, threads = arguments.precision, arguments.threads
    if arguments.peer:
        return peer(precision, threads)
    torch = prepared(arguments, ["convolution"])
    theirs = [sys.executable, __file__, "--peer", "--precision", precision, "--threads", str(threads)]
    shapes = lockstep_rows(precision, threads)
    table = [{**shape, **{engine: [] for engine in ENGINES}} for shape in shapes]
    for number in range(arguments.rounds):
        for engine in by_turns(number, ENGINES):
            if engine == "Lockstep":
                found = lockstep_rows(precision, threads)
            else:
                document = json.dumps(shapes).encode()
                done = subprocess.run(theirs, input=document, stdout=subprocess.PIPE, check=True, env=torch.environment)
                found = json.loads(done.stdout)
            for row, one in zip(table, found, strict=True):
                row[engine].append(one["ms"])
    print("| convolution | pass | Lockstep ms | PyTorch ms | Lockstep / PyTorch speed: median | min | max |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in table:
        ours, peers = (row[engine] for engine in ENGINES)
        ratios = [b / a for a, b in zip(ours, peers, strict=True)]
        speeds = " | ".join(f"{pick(ratios):.2f}" for pick in (statistics.median, min, max))
        mark = torch.mark("convolution")
        print(f"| {row['name']} | {row['pass']} | {spread(ours, 2)} | {spread(peers, 2)}{mark} | {speeds} |")
    print(
        f"\n{datetime.date.today().isoformat()}, {precision}, {cpu_name()}, {threads} of {os.cpu_count()} CPUs, PyTorch "
        f"{torch.kernels.torch}, {arguments.rounds} rounds by turns.\n{torch.sentence(shapes[0].get('level', 'of the highest level'))}"
    )


if __name__ == "__main__":
    main()
