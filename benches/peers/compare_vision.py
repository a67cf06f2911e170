#!/usr/bin/env python3
"""Training steps of image models side by side: Lockstep's example `vision_step` and PyTorch, on the same shapes.

The engines run by turns, and each round begins with the other one; the table has the median, minimum and maximum of the
rounds, and of their ratios. PyTorch runs eager, channels_last, f32. With `--ranks 2` both run on two processes of one thread:
PyTorch as DistributedDataParallel over Gloo.

If PyTorch would run below the processor's AVX-512, nothing is compared and the exit code is 2: see `kernels.py`.

    cargo build --release -p lockstep --bin lockstep --example vision_step
    /tmp/peers/bin/pip install torchvision
    /tmp/peers/bin/python benches/peers/compare_vision.py --rounds 3
    /tmp/peers/bin/python benches/peers/compare_vision.py --ranks 2 --threads 1
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kernels import add_arguments, lockstep_kernels, prepared
from machine import by_turns, cpu_name, spread

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
WARM_UP = 3


def model_of(name: str):
    import torchvision
    from torch import nn

    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10),
        )
    model = getattr(torchvision.models, name)(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model


def pytorch(name: str, batch: int, steps: int, threads: int) -> None:
    """Times steps in this process and prints their median; a rank of several if RANK is set."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = model_of(name).to(memory_format=torch.channels_last)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    pixels = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.arange(batch) * 7 % 10
    loss_of = torch.nn.CrossEntropyLoss()
    times = []
    for step in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(pixels), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        if step >= WARM_UP:
            times.append((time.perf_counter() - begin) * 1e3)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"step_ms": statistics.median(times)}), flush=True)
    if "RANK" in os.environ:
        dist.destroy_process_group()


def run(command: list[str], environment: Mapping[str, str] | None = None) -> float:
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])["step_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="cnn,resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pytorch", help=argparse.SUPPRESS)
    add_arguments(parser)
    given = parser.parse_args()
    if given.pytorch:
        return pytorch(given.pytorch, given.batch, given.steps, given.threads)
    torch = prepared(given, ["f32", "convolution"])
    print("| model | Lockstep ms | PyTorch ms | ratio of speed: median | min | max |\n|---|---:|---:|---:|---:|---:|")
    shape = ["--batch", str(given.batch), "--steps", str(given.steps), "--threads", str(given.threads)]
    for name in given.models.split(","):
        ours = [str(TARGET / "release/examples/vision_step"), "--model", name, *shape]
        ours += [f"--nproc_per_node={given.ranks}"]
        theirs = [sys.executable]
        if given.ranks > 1:
            theirs += ["-m", "torch.distributed.run", f"--nproc_per_node={given.ranks}", "--standalone"]
        theirs += [__file__, "--pytorch", name, *shape]
        commands = {"Lockstep": (ours, None), "PyTorch": (theirs, torch.environment)}
        times: dict[str, list[float]] = {engine: [] for engine in commands}
        for number in range(given.rounds):
            for engine in by_turns(number, list(commands)):
                times[engine].append(run(*commands[engine]))
        lockstep, peer = times["Lockstep"], times["PyTorch"]
        ratios = [b / a for a, b in zip(lockstep, peer, strict=True)]
        ratio = " | ".join(f"{pick(ratios):.2f}" for pick in (statistics.median, min, max))
        mark = torch.mark("f32", "convolution")
        print(f"| {name} | {spread(lockstep, 1)} | {spread(peer, 1)}{mark} | {ratio} |", flush=True)
    print(
        f"\n{datetime.date.today().isoformat()}, {cpu_name()}, {given.ranks} ranks of {given.threads} threads, batch {given.batch} on each, "
        f"PyTorch {torch.kernels.torch}, {given.rounds} rounds by turns.\n{torch.sentence(lockstep_kernels(TARGET / 'release/lockstep'))}"
    )


if __name__ == "__main__":
    main()
