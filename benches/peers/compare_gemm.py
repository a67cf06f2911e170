#!/usr/bin/env python3
"""Matrix products side by side: `lockstep bench gemm` and torch.matmul (oneDNN, MKL) on the same shapes.

The engines run by turns, each round in processes of their own, and each round begins with the other engine. In a round the
fastest product of a tenth of a second (and of at least five) counts; the table has the median, minimum and maximum of the
rounds, and of their ratios. NT is a linear layer's forward, NN the gradient of its input, TN that of its weight, which Lockstep
writes in f32 and PyTorch in the operands' type.

If PyTorch would run below the processor's AVX-512, nothing is compared and the exit code is 2: see `kernels.py`.

With `--program` another engine takes PyTorch's place: a program that reads the JSON of `lockstep bench gemm` from standard input and
prints it with its own rates.

    /tmp/peers/bin/python benches/peers/compare_gemm.py --precision bf16 --rounds 5
    /tmp/peers/bin/python benches/peers/compare_gemm.py --mkl-as-on-intel      # f32 on AMD's processors
    cargo build --release --manifest-path benches/peers/gemm_crate/Cargo.toml
    benches/peers/compare_gemm.py --program benches/peers/gemm_crate/target/release/gemm-crate
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kernels import add_arguments, lockstep_kernels, prepared
from machine import by_turns, cpu_name, spread

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# As `lockstep bench gemm`.
RUNS = 5
SECONDS = 0.1


def torch_gflops(row: dict, precision: str) -> float:
    """The rate of the fastest product of the row's shape, with operands laid out as Lockstep has them."""
    import torch

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[precision]
    m, n, k = row["m"], row["n"], row["k"]
    a = torch.rand(k, m).sub_(0.5).to(dtype).t() if row["layout"] == "TN" else torch.rand(m, k).sub_(0.5).to(dtype)
    b = torch.rand(n, k).sub_(0.5).to(dtype).t() if row["layout"] == "NT" else torch.rand(k, n).sub_(0.5).to(dtype)
    out = torch.empty(m, n, dtype=dtype)
    best, runs, begin = float("inf"), 0, time.perf_counter()
    while runs < RUNS or time.perf_counter() - begin < SECONDS:
        started = time.perf_counter()
        torch.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - started)
        runs += 1
    return 2 * m * n * k / best / 1e9


def peer(precision: str, threads: int) -> None:
    """Prints the rows of standard input with PyTorch's rates in place of theirs."""
    import torch

    torch.set_num_threads(threads)
    rows = json.load(sys.stdin)
    print(json.dumps([{**row, "gflops": torch_gflops(row, precision)} for row in rows]))


def rounds_of(
    run: Callable[[str, list[dict]], list[dict]], shapes: list[dict], rounds: int, engines: list[str]
) -> list[dict]:
    """The shapes, each with the rates of both engines in all rounds."""
    table = [{**shape, **{engine: [] for engine in engines}} for shape in shapes]
    for number in range(rounds):
        for engine in by_turns(number, engines):
            for row, found in zip(table, run(engine, shapes), strict=True):
                if (row["name"], row["layout"]) != (found["name"], found["layout"]):
                    raise ValueError(f"{engine} has timed {found['name']} {found['layout']}, not {row['name']} {row['layout']}")
                row[engine].append(found["gflops"])
    return table


def cells(row: dict, engines: list[str], mark: str) -> list[str]:
    ours, theirs = (row[engine] for engine in engines)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        row["name"],
        row["layout"],
        f"{row['m']} x {row['n']} x {row['k']}",
        spread(ours),
        spread(theirs) + mark,
        *(f"{pick(ratios):.2f}" for pick in (statistics.median, min, max)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lockstep", type=Path, default=REPOSITORY / "target/release/lockstep")
    parser.add_argument("--program", type=Path, help="time this program in place of PyTorch")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.program and not os.access(arguments.program, os.X_OK):
        parser.error(f"--program {arguments.program}: no program that can be run")
    precision, threads = arguments.precision, str(arguments.threads)
    if arguments.peer:
        return peer(precision, arguments.threads)
    torch = None if arguments.program else prepared(arguments, [precision])
    name = arguments.program.stem if arguments.program else "PyTorch"
    shape = ["--precision", precision, "--threads", threads]
    ours = [str(arguments.lockstep), "bench", "gemm", *shape, "--json"]
    theirs = [str(arguments.program), *shape] if arguments.program else [sys.executable, __file__, "--peer", *shape]
    environment = torch.environment if torch else None

    def run(engine: str, shapes: list[dict]) -> list[dict]:
        if engine == "Lockstep":
            return json.loads(subprocess.run(ours, stdout=subprocess.PIPE, check=True).stdout)
        document = json.dumps(shapes).encode()
        return json.loads(subprocess.run(theirs, input=document, stdout=subprocess.PIPE, check=True, env=environment).stdout)

    load = os.getloadavg()[0]
    engines = ["Lockstep", name]
    table = rounds_of(run, run("Lockstep", []), arguments.rounds, engines)
    print(f"| layer | product | m x n x k | Lockstep GFLOP/s | {name} GFLOP/s | ratio: median | min | max |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    for row in table:
        print(f"| {' | '.join(cells(row, engines, torch.mark(precision) if torch else ''))} |")
    peer_name = f"PyTorch {torch.kernels.torch}" if torch else name
    print(
        f"\n{datetime.date.today().isoformat()}, {precision}, {cpu_name()}, {threads} of {os.cpu_count()} CPUs, load average "
        f"{load:.1f} at the start, {peer_name}, {arguments.rounds} rounds by turns."
    )
    kernels = lockstep_kernels(arguments.lockstep)
    print(torch.sentence(kernels) if torch else f"Kernels: Lockstep {kernels}.")


if __name__ == "__main__":
    main()
