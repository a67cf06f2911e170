#!/usr/bin/env python3
"""Matrix products side by side: `lockstep bench gemm` and torch.matmul (oneDNN, MKL) on the same shapes.

The engines run by turns; of each, the fastest time of all rounds counts. NT is a linear layer's forward, NN the
gradient of its input, TN that of its weight, which both engines write in f32 (PyTorch: in the operands' type).

    /tmp/peers/bin/python benches/peers/compare_gemm.py --precision bf16 --rounds 3
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
RUNS = 5


def lockstep_rows(binary: Path, precision: str, threads: int) -> list[dict]:
    command = [str(binary), "bench", "gemm", "--precision", precision, "--threads", str(threads), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def torch_gflops(row: dict, dtype: torch.dtype) -> float:
    """The fastest of a few products of the row's shape, with operands laid out as Lockstep has them."""
    m, n, k = row["m"], row["n"], row["k"]
    a = torch.rand(k, m).sub_(0.5).to(dtype).t() if row["layout"] == "TN" else torch.rand(m, k).sub_(0.5).to(dtype)
    b = torch.rand(n, k).sub_(0.5).to(dtype).t() if row["layout"] == "NT" else torch.rand(k, n).sub_(0.5).to(dtype)
    out = torch.empty(m, n, dtype=dtype)
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        torch.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - started)
    return 2 * m * n * k / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lockstep", type=Path, default=REPOSITORY / "target/release/lockstep")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[arguments.precision]

    best: dict[tuple, dict] = {}
    for _ in range(arguments.rounds):
        for row in lockstep_rows(arguments.lockstep, arguments.precision, arguments.threads):
            entry = best.setdefault((row["name"], row["layout"]), {**row, "gflops": 0.0, "torch": 0.0})
            entry["gflops"] = max(entry["gflops"], row["gflops"])
            entry["torch"] = max(entry["torch"], torch_gflops(row, dtype))
    print(f"{arguments.precision}, {cpu_name()}, {arguments.threads} of {os.cpu_count()} CPUs, PyTorch {torch.__version__}\n")
    print("| layer | product | m x n x k | Lockstep GFLOP/s | PyTorch GFLOP/s | ratio |")
    print("|---|---|---|---:|---:|---:|")
    for row in best.values():
        shape = f"{row['m']} x {row['n']} x {row['k']}"
        ratio = row["gflops"] / row["torch"]
        print(f"| {row['name']} | {row['layout']} | {shape} | {row['gflops']:.0f} | {row['torch']:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
