#!/usr/bin/env python3
"""Shared-out state side by side: copies and ZeRO 1, 2 and 3 of Lockstep, and FSDP2 of PyTorch both ways.

All six run the same model and batch, one after the other in each round, and each round begins with another one, so that a
machine that speeds up or slows down does so for all. A run that others disturb is made again. Ratios are taken round by round. ZeRO 1 and 2 keep a block's weights,
as FSDP2 does with `--reshard no`; ZeRO 3 and `--reshard yes` gather them again for the backward. A case is written
MODEL:PRECISION:BATCHxSEQ_LEN, the batch that of each rank.

Memory is of the processes of all ranks, pages that they share counted once (PSS): after the last step, and at the peak.

glibc hands large blocks back to the kernel, and PyTorch asks for them again in each step. With these in the environment they
are kept, which makes PyTorch faster and takes more memory; Lockstep allocates nothing in a step:

    MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184

Such variables are printed with the table, and so are the kernels of both sides. If PyTorch would run below the processor's
AVX-512, nothing is compared and the exit code is 2: see `kernels.py`, and `--mkl-as-on-intel` for AMD's processors.

With `--out FILE` the rounds are added to those in FILE, if it has the same case, machine and versions, and the table is that
of all of them; so a long comparison can be made in pieces.

    cargo build --release
    /tmp/peers/bin/python benches/peers/compare_sharded.py --rounds 3 --markdown
"""

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from compare import HERE, REPOSITORY, Case, Failed, lockstep_version, markdown_table, plain_table, positive, run
from kernels import Peer, add_arguments, lockstep_kernels, prepared
from machine import by_turns, cpu_name, spread, undisturbed

DEFAULT_CASE = "gpt2-124m:f32:1x512"
COPIES, KEPT, FREED = "copies (data parallel)", "FSDP2, weights kept", "FSDP2, weights freed"


def commands(case: Case, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Each way to train on several ranks, and the command that times it."""
    flags = case.flags(arguments.threads, arguments.steps)
    ranks = arguments.ranks
    lockstep = [str(arguments.lockstep), "bench", "step", *flags, "--nproc-per-node", str(ranks)]
    peer = [sys.executable, str(HERE / "fsdp2_step.py"), *flags, "--ranks", str(ranks), "--warmup", "1"]
    shards = ["--set", f"parallel.data_parallel_shard={ranks}"]
    zero = {
        f"ZeRO {stage}": [*lockstep, *shards, "--set", f"parallel.zero_stage={stage}", *arguments.zero_settings]
        for stage in (1, 2, 3)
    }
    return {
        COPIES: [*lockstep, "--set", f"parallel.data_parallel_replicate={ranks}"],
        **zero,
        KEPT: [*peer, "--reshard", "no"],
        FREED: [*peer, "--reshard", "yes"],
    }


def short(result: dict) -> dict:
    """What of an engine's document is kept. Lockstep has the memory after the last step for each rank."""
    if "memory_by_rank" in result:
        pss = sum(memory["process_pss"] for memory in result["memory_by_rank"])
    else:
        pss = result["pss_bytes"]
    comm = {"comm": result["comm"]} if "comm" in result else {}
    kept = {key: result[key] for key in ("tokens_per_s", "step_ms", "peak_rss_bytes", "loss")}
    return {**kept, "pss_bytes": pss, "others": result["others"], **comm}


def measure(commands: dict[str, list[str]], steps: int, first: int, execute: Callable[[list[str], int], dict] = run) -> dict:
    """One round, which begins with the command number `first`."""
    results = {}
    for name in by_turns(first, list(commands)):
        result = undisturbed(lambda: execute(commands[name], steps))
        if "environment" in result:
            results["torch"] = result["environment"]["torch"]
        results[name] = short(result)
        print(f"{name}: {result['tokens_per_s']:.0f} tokens/s, others had {result['others']:.0%}", file=sys.stderr)
    return results


HEADER = ["", "tokens/s", "to copies", "min", "max", "to FSDP2 kept", "to FSDP2 freed", "MiB after a step", "MiB at peak"]


def table(rounds: list[dict], mark: str = "") -> list[list[str]]:
    """Medians over the rounds; ratios of speed are taken round by round, above 1 the row is faster. `mark` follows the figure of
    a slow peer."""

    def of(name: str, key: str) -> list[float]:
        return [one[name][key] for one in rounds]

    def ratios(name: str, to: str) -> list[float]:
        return [a / b for a, b in zip(of(name, "tokens_per_s"), of(to, "tokens_per_s"), strict=True)]

    def row(name: str) -> list[str]:
        to_copies = ratios(name, COPIES)
        return [
            name,
            spread(of(name, "tokens_per_s")) + (mark if name in (KEPT, FREED) else ""),
            *(f"{pick(to_copies):.2f}" for pick in (statistics.median, min, max)),
            *(f"{statistics.median(ratios(name, to)):.2f}" for to in (KEPT, FREED)),
            *(f"{statistics.median(of(name, key)) / 2**20:.0f}" for key in ("pss_bytes", "peak_rss_bytes")),
        ]

    return [HEADER, *(row(name) for name in [COPIES, "ZeRO 1", "ZeRO 2", "ZeRO 3", KEPT, FREED])]


def recorded(path: Path, circumstances: dict) -> list[dict]:
    """The rounds of a file, which must have been run under the same circumstances; none if there is no file."""
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    different = [key for key, value in circumstances.items() if document.get(key) != value]
    if different:
        values = ", ".join(f"{key} {document.get(key)!r}, now {circumstances[key]!r}" for key in different)
        raise Failed(f"{path} has other circumstances: {values}")
    return document["rounds"]


def circumstances_of(arguments: argparse.Namespace, peer: Peer) -> dict:
    kernels = peer.kernels
    return {
        "case": str(arguments.case),
        "ranks": arguments.ranks,
        "threads": arguments.threads,
        "steps": arguments.steps,
        "zero_settings": arguments.zero_settings,
        "machine": f"{cpu_name()}, {os.cpu_count()} logical CPUs",
        "environment": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_") or name == "LD_PRELOAD"},
        "lockstep": arguments.commit or lockstep_version(arguments.lockstep),
        "kernels": {
            "lockstep": lockstep_kernels(arguments.lockstep),
            "pytorch": {"f32": kernels.f32_level(), "bf16": kernels.bf16, "aten": kernels.aten},
            "below_avx512": peer.faults,
        },
    }


def in_words(circumstances: dict, rounds: list[dict]) -> str:
    environment = " ".join(f"{name}={value}" for name, value in circumstances["environment"].items())
    kernels = circumstances["kernels"]
    pytorch = ", ".join(f"{name} {value}" for name, value in kernels["pytorch"].items())
    slow = f" PyTorch runs below this processor's AVX-512: {'; '.join(kernels['below_avx512'])}." if kernels["below_avx512"] else ""
    most = max(result.get("others", 0.0) for one in rounds for result in one.values() if isinstance(result, dict))
    return (
        f"{datetime.date.today().isoformat()}, {circumstances['machine']}, {circumstances['ranks']} ranks of "
        f"{circumstances['threads']} threads, {circumstances['case']} on each. {circumstances['lockstep']} against PyTorch "
        f"{rounds[0]['torch']}, eager. {len(rounds)} rounds by turns, the median of {circumstances['steps']} steps in each; "
        f"others had {most:.0%} of the processors at most{f'; {environment}' if environment else ''}.\n"
        f"Kernels: Lockstep {kernels['lockstep']}; PyTorch {pytorch}.{slow}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Case.parse, default=Case.parse(DEFAULT_CASE), metavar="MODEL:PRECISION:BxS")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=3, help="steps timed in each run, after one that is not")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--threads", type=positive, default=1, help="of each rank")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="more for ZeRO 1 to 3")
    parser.add_argument("--lockstep", type=Path, default=REPOSITORY / "target" / "release" / "lockstep")
    parser.add_argument("--commit", help="what to call the binary, if this tree is not the one that it was built from")
    parser.add_argument("--out", type=Path, help="file of rounds to which these are added")
    parser.add_argument("--markdown", action="store_true", help="print the table for benches/RESULTS.md")
    add_arguments(parser)
    arguments = parser.parse_args()
    arguments.zero_settings = [word for setting in arguments.sets for word in ("--set", setting)]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    peer = prepared(arguments, [arguments.case.precision])
    circumstances = circumstances_of(arguments, peer)

    def execute(command: list[str], steps: int) -> dict:
        return run(command, steps, None if command[0] == str(arguments.lockstep) else peer.environment)

    try:
        rounds = recorded(arguments.out, circumstances) if arguments.out else []
        for _ in range(arguments.rounds):
            rounds.append(measure(commands(arguments.case, arguments), arguments.steps, len(rounds), execute))
            if arguments.out:
                arguments.out.write_text(json.dumps({**circumstances, "rounds": rounds}, indent=1) + "\n", encoding="utf-8")
    except Failed as failure:
        sys.exit(f"compare_sharded.py: {failure}")
    rows = table(rounds, peer.mark(arguments.case.precision))
    print(markdown_table(rows) if arguments.markdown else plain_table(rows))
    print("\n" + in_words(circumstances, rounds))


if __name__ == "__main__":
    main()
