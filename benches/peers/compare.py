#!/usr/bin/env python3
"""Lockstep against PyTorch, side by side: tokens per second of training steps on the same machine.

The engines run by turns, and each round begins with another one, so that a machine that speeds up or slows down does so for
all. A run that others disturb is made again. Ratios are taken round by round; each figure has its median, minimum and maximum. At bf16 PyTorch runs in both of its modes and the faster one counts. A case is written
MODEL:PRECISION:BATCHxSEQ_LEN. With `--ranks N` both run on N processes of `--threads` threads with the batch on each:
PyTorch as DistributedDataParallel over Gloo, at bf16 with autocast.

The kernels of both sides are printed with the table. If PyTorch would run below the processor's AVX-512, nothing is compared and
the exit code is 2: `--mkl-as-on-intel` remedies it on AMD's processors, and with `--allow-slow-peer` the table says so.

    cargo build --release
    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r benches/peers/requirements.txt
    /tmp/peers/bin/python benches/peers/compare.py --rounds 5          # on AMD's processors with --mkl-as-on-intel
    /tmp/peers/bin/python benches/peers/compare.py --case baby-gpt:f32:8x256 --markdown >> benches/RESULTS.md
    /tmp/peers/bin/python benches/peers/compare.py --ranks 2 --threads 1
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernels import Peer, add_arguments, lockstep_kernels, prepared
from machine import by_turns, cpu_name, spread, undisturbed

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
DEFAULT_CASES = [
    f"{model}:{precision}:{shape}"
    for precision in ("f32", "bf16")
    for model, shape in [("baby-gpt", "8x256"), ("gpt2-124m", "2x512"), ("llama-110m", "2x512")]
]


@dataclass(frozen=True)
class Case:
    model: str
    precision: str
    batch: int
    seq_len: int

    @staticmethod
    def parse(text: str) -> "Case":
        try:
            model, precision, shape = text.split(":")
            batch, seq_len = shape.split("x")
            case = Case(model, precision, int(batch), int(seq_len))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not MODEL:PRECISION:BATCHxSEQ_LEN") from None
        if precision not in ("f32", "bf16"):
            raise argparse.ArgumentTypeError(f"precision {precision!r} is neither f32 nor bf16")
        return case

    def __str__(self) -> str:
        return f"{self.model} {self.precision} {self.batch}x{self.seq_len}"

    def flags(self, threads: int, steps: int) -> list[str]:
        """The arguments that both engines understand."""
        return [
            *("--model", self.model, "--precision", self.precision),
            *("--batch", str(self.batch), "--seq-len", str(self.seq_len)),
            *("--threads", str(threads), "--steps", str(steps), "--json"),
        ]


@dataclass(frozen=True)
class Row:
    """One case's outcome. Ratios are Lockstep / PyTorch in the same round; above 1, Lockstep is faster."""

    case: Case
    lockstep: dict
    pytorch: dict
    pytorch_mode: str
    ratios: list[float]


LOCKSTEP = "Lockstep"


class Failed(Exception):
    """An engine that did not run, or whose answer cannot be trusted."""


def run(command: list[str], steps: int, environment: Mapping[str, str] | None = None) -> dict:
    """The engine's JSON document, checked: a fast step that computes nonsense is no result."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise Failed(f"cannot start {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}\nexited with {done.returncode}:\n{done.stderr.strip()}")
    try:
        result = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise Failed(f"{' '.join(command)}\ndid not print one JSON document: {error}") from error
    missing = {"tokens_per_s", "step_ms", "peak_rss_bytes", "loss"} - result.keys()
    if missing:
        raise Failed(f"{' '.join(command)}\nleft out {', '.join(sorted(missing))}")
    if len(result["loss"]) != steps or not all(map(math.isfinite, result["loss"])):
        raise Failed(f"{' '.join(command)}\nshould have reported {steps} finite losses: {result['loss']}")
    return result


def measure(case: Case, arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Row:
    """The rounds of one case; `environment` is that of PyTorch's processes."""
    flags = case.flags(arguments.threads, arguments.steps)
    lockstep_command = [str(arguments.lockstep), "bench", "step", *flags]
    peer = [sys.executable, str(HERE / "pytorch_step.py"), *flags]
    modes = {"f32": [], "autocast": ["--bf16-mode", "autocast"], "pure": ["--bf16-mode", "pure"]}
    modes = {name: more for name, more in modes.items() if (name == "f32") == (case.precision == "f32")}
    if arguments.ranks > 1:
        lockstep_command += ["--nproc-per-node", str(arguments.ranks)]
        peer = [sys.executable, str(HERE / "ddp_step.py"), *flags, "--ranks", str(arguments.ranks)]
        modes = {"DDP" if case.precision == "f32" else "DDP, autocast": []}
    commands = {LOCKSTEP: lockstep_command, **{mode: [*peer, *mode_flags] for mode, mode_flags in modes.items()}}
    runs: dict[str, list[dict]] = {engine: [] for engine in commands}
    for number in range(arguments.rounds):
        for engine in by_turns(number, list(commands)):
            of_engine = None if engine == LOCKSTEP else environment
            runs[engine].append(undisturbed(lambda: run(commands[engine], arguments.steps, of_engine)))
        speeds = {engine: f"{engine} {rounds[-1]['tokens_per_s']:.0f}" for engine, rounds in runs.items()}
        own = speeds.pop(LOCKSTEP)
        print(f"{case}, round {number + 1} of {arguments.rounds}: {own}, PyTorch {', '.join(speeds.values())} tokens/s", file=sys.stderr)
    mode = max(modes, key=lambda m: median_run(runs[m])["tokens_per_s"])
    return Row(
        case,
        median_run(runs[LOCKSTEP]),
        median_run(runs[mode]),
        mode,
        [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs[LOCKSTEP], runs[mode], strict=True)],
    )


def median_run(runs: list[dict]) -> dict:
    """Speeds of the rounds and their median, the most that others had of the processors, the peak of memory, and the versions."""
    return {
        "speeds": [run["tokens_per_s"] for run in runs],
        "others": max(run["others"] for run in runs),
        "tokens_per_s": statistics.median(run["tokens_per_s"] for run in runs),
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "environment": runs[0].get("environment", {}),
    }


HEADER = ["case", "Lockstep tokens/s", "PyTorch tokens/s", "ratio: median", "min", "max", "Lockstep MiB", "PyTorch MiB"]


def cells(row: Row, mark: str = "") -> list[str]:
    """A line of the table; speeds are the median and the range of rounds. `mark` follows the figure of a slow peer."""
    mode = "" if row.pytorch_mode == "f32" else f" ({row.pytorch_mode})"
    return [
        str(row.case),
        spread(row.lockstep["speeds"]),
        f"{spread(row.pytorch['speeds'])}{mode}{mark}",
        f"{statistics.median(row.ratios):.2f}",
        f"{min(row.ratios):.2f}",
        f"{max(row.ratios):.2f}",
        f"{row.lockstep['peak_rss_bytes'] / 2**20:.0f}",
        f"{row.pytorch['peak_rss_bytes'] / 2**20:.0f}",
    ]


def plain_table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown_table(rows: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(rows[0]) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def circumstances(arguments: argparse.Namespace, load: float, pytorch_version: str, peer: Peer, others: float) -> str:
    return (
        f"{datetime.date.today().isoformat()}, {cpu_name()}, {os.cpu_count()} logical CPUs, "
        f"{f'{arguments.ranks} ranks of ' if arguments.ranks > 1 else ''}{arguments.threads} threads, "
        f"load average {load:.1f} at the start. {lockstep_version(arguments.lockstep)} against PyTorch {pytorch_version}, "
        f"eager. {arguments.rounds} rounds by turns, {arguments.steps} steps each; others had {others:.0%} of the "
        f"processors at most.\n{peer.sentence(lockstep_kernels(arguments.lockstep))}"
    )


def lockstep_version(binary: Path) -> str:
    """What the binary calls itself, and the commit of the tree that it (presumably) was built from."""
    version = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    name = version.stdout.strip() if version.returncode == 0 else "lockstep"
    return f"{name} ({commit.stdout.strip()})" if commit.returncode == 0 else name


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case",
        type=Case.parse,
        action="append",
        metavar="MODEL:PRECISION:BxS",
        help=f"may be repeated; default: {' '.join(DEFAULT_CASES)}",
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=10, help="steps timed in each run")
    parser.add_argument("--ranks", type=positive, default=1)
    parser.add_argument("--threads", type=positive, default=2, help="of each rank")
    parser.add_argument("--lockstep", type=Path, default=REPOSITORY / "target" / "release" / "lockstep")
    parser.add_argument("--markdown", action="store_true", help="print the table for benches/RESULTS.md")
    add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    load = os.getloadavg()[0]
    cases = arguments.case or [Case.parse(text) for text in DEFAULT_CASES]
    peer = prepared(arguments, {case.precision for case in cases})
    try:
        rows = [measure(case, arguments, peer.environment) for case in cases]
    except Failed as failure:
        sys.exit(f"compare.py: {failure}")
    table = [HEADER, *(cells(row, peer.mark(row.case.precision)) for row in rows)]
    version = rows[0].pytorch["environment"].get("torch", "unknown")
    print(markdown_table(table) if arguments.markdown else plain_table(table))
    print("\n" + circumstances(arguments, load, version, peer, max(engine["others"] for row in rows for engine in (row.lockstep, row.pytorch))))


if __name__ == "__main__":
    main()
