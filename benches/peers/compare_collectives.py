#!/usr/bin/env python3
"""Times collectives between local ranks: Lockstep, Gloo (torch.distributed) and OpenMPI by turns, in one run.

    apt-get install openmpi-bin libopenmpi-dev
    cargo build --release
    /tmp/peers/bin/python benches/peers/compare_collectives.py --ranks 2

Each library runs in every round, and each round begins with another one; the table has the median of its rounds, with the
minimum and maximum, and ratios that are taken round by round. Gloo and OpenMPI add with their own code, in which no library
chooses kernels. Buffers are f32. Lockstep is
timed twice: with buffers in the ranks' shared arena, where gradients lie, and with ordinary ones. Gloo's ranks are not
pinned, since it has threads of its own; OpenMPI's are if there is a core for each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels import lockstep_kernels
from machine import by_turns, cpu_name, spread

HERE = Path(__file__).resolve().parent
LIBRARIES = ["Lockstep, shared", "Lockstep, ordinary", "Gloo", "OpenMPI"]
LIMIT_S = 300


def rows(command: list[str]) -> list[dict]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def compile_mpi(folder: str) -> str:
    program = f"{folder}/collectives_mpi"
    subprocess.run(["mpicc", "-O2", "-o", program, str(HERE / "collectives_mpi.c")], check=True)
    return program


def commands(arguments: argparse.Namespace, mpi: str) -> dict[str, list[str]]:
    sizes = [str(size) for size in arguments.sizes]
    seconds = str(arguments.seconds)
    ours = [str(arguments.lockstep), "bench", "collectives", "--json", "--op", arguments.op, "--seconds", seconds]
    ours += ["--nproc-per-node", str(arguments.ranks), "--sizes", ",".join(sizes), "--memory"]
    gloo = [sys.executable, str(HERE / "collectives_gloo.py"), "--op", arguments.op, "--ranks", str(arguments.ranks)]
    has_cores = arguments.ranks <= len(os.sched_getaffinity(0))
    bind = ["--bind-to", "core"] if has_cores else ["--oversubscribe", "--bind-to", "none"]
    mpirun = ["mpirun", "--allow-run-as-root", "-n", str(arguments.ranks), *bind]
    return {
        "Lockstep, shared": ours + ["shared"],
        "Lockstep, ordinary": ours + ["private"],
        "Gloo": gloo + ["--seconds", seconds] + sizes,
        "OpenMPI": mpirun + [mpi, arguments.op, seconds] + sizes,
    }


def of_rounds(size: int, times: list[float]) -> str:
    """Rate and time of the median round, and the range of times."""
    middle = statistics.median(times)
    return f"{size / middle / 1e3:.2f} ({middle:.1f}; {min(times):.1f} to {max(times):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["all_reduce", "reduce_scatter", "all_gather", "all_to_all"], default="all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20])
    parser.add_argument("--lockstep", type=Path, default=HERE.parents[1] / "target/release/lockstep")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    # Microseconds of each library by round and size.
    times: dict[str, list[list[float]]] = {library: [] for library in LIBRARIES}
    with tempfile.TemporaryDirectory() as folder:
        of_library = commands(arguments, compile_mpi(folder))
        for number in range(arguments.rounds):
            for library in by_turns(number, LIBRARIES):
                times[library].append([row["median_us"] for row in rows(of_library[library])])
    print(
        f"{arguments.op}, {arguments.ranks} ranks, f32, {cpu_name()}, {os.cpu_count()} CPUs, load {load:.1f} at the start, {arguments.rounds} "
        f"rounds by turns; Lockstep's kernels: {lockstep_kernels(arguments.lockstep)}\n"
    )
    print("| bytes | " + " | ".join(f"{library} GB/s (us)" for library in LIBRARIES) + " | shared / Gloo | shared / OpenMPI |")
    print("|---" * (len(LIBRARIES) + 3) + "|")
    for index, size in enumerate(arguments.sizes):
        by_round = {library: [of_round[index] for of_round in times[library]] for library in LIBRARIES}
        cells = [of_rounds(size, by_round[library]) for library in LIBRARIES]
        shared = by_round[LIBRARIES[0]]
        ratios = [[b / a for a, b in zip(shared, by_round[other], strict=True)] for other in ("Gloo", "OpenMPI")]
        print(f"| {size} | {' | '.join(cells)} | {' | '.join(spread(ratio, 1) for ratio in ratios)} |")


if __name__ == "__main__":
    main()
