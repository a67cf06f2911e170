#!/usr/bin/env python3
"""Memory of DDP and FSDP side by side: Lockstep's example `fsdp_memory` and PyTorch (`fsdp_memory.py`) on the same GPT-2 with 24
layers, in MB, the maximum over ranks.

Lockstep's categories are those of its ledger. PyTorch's *saved* tensors stand beside the activations, and what its process
took beyond the counted tensors, buckets and temporary buffers, beside communication and workspace. The processes of PyTorch
hold about 300 MB of libraries as well.

    cargo build --release -p lockstep --bin lockstep --example fsdp_memory
    /tmp/peers/bin/python benches/peers/compare_memory.py --ranks 2
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from kernels import lockstep_kernels
from machine import cpu_name

HERE = Path(__file__).resolve().parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parent.parent / "target"))


def document(command: list[str]) -> dict | list:
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=128)
    arguments = parser.parse_args()
    shape = [str(arguments.hidden), str(arguments.seq_len)]
    example = [str(TARGET / "release/examples/fsdp_memory"), f"--nproc_per_node={arguments.ranks}", "--json"]
    lockstep = document([*example, "--hidden", shape[0], "--seq_len", shape[1]])
    peer = [sys.executable, str(HERE / "fsdp_memory.py"), "--ranks", str(arguments.ranks), "--hidden", shape[0], "--seq-len", shape[1]]
    pytorch = {layout: document([*peer, "--layout", layout]) for layout in ("DDP", "FSDP")}
    print(f"{cpu_name()}; Lockstep's kernels: {lockstep_kernels(TARGET / 'release/lockstep')}. Memory only: no speed is compared.\n")
    print(f"| {arguments.ranks} ranks, MB | parameters | gradients | optimizer | activations | communication, workspace | all |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in lockstep:
        rest = row["communication"] + row["workspace"]
        held = [row["parameters"], row["gradients"], row["optimizer"], row["activations"], rest, row["all"]]
        print(f"| Lockstep, {row['layout']} | " + " | ".join(f"{value:.0f}" for value in held) + " |")
    for name, row in pytorch.items():
        counted = [row["parameters"], row["gradients"], row["optimizer"], row["saved"]]
        held = [*counted, row["process"] - sum(counted), row["process"]]
        print(f"| PyTorch, {name} | " + " | ".join(f"{value:.0f}" for value in held) + " |")


if __name__ == "__main__":
    main()
