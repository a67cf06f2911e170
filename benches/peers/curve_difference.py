#!/usr/bin/env python3
"""How far a run's losses lie from a recorded PyTorch curve, step by step.

    python3 benches/peers/curve_difference.py benches/peers/results/nanogpt_curve_dropout0.2.json metrics.jsonl

Exits 1 if any step differs by more than 2 % of the curve's loss, or if the run has fewer steps than the curve.
"""

import argparse
import json
import sys
from pathlib import Path

LIMIT = 0.02


def losses_of_run(metrics: Path) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curve", type=Path)
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--every", type=int, default=20, help="steps between the printed ones")
    arguments = parser.parse_args()
    curve = json.loads(arguments.curve.read_text(encoding="utf-8"))["loss"]
    run = losses_of_run(arguments.metrics)
    if len(run) < len(curve):
        print(f"the run has {len(run)} steps, the curve {len(curve)}")
        return 1
    differences = [abs(ours - theirs) / theirs for ours, theirs in zip(run, curve)]
    print("| step | PyTorch | Lockstep | difference |\n|---|---|---|---|")
    for step in range(1, len(curve) + 1):
        if step == 1 or step % arguments.every == 0:
            index = step - 1
            print(f"| {step} | {curve[index]:.4f} | {run[index]:.4f} | {differences[index]:.2%} |")
    largest = max(differences)
    mean = sum(differences) / len(differences)
    print(f"\n{len(curve)} steps: largest difference {largest:.2%} (step {differences.index(largest) + 1}), mean {mean:.2%}")
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
