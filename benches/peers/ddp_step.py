#!/usr/bin/env python3
"""Times training steps of PyTorch DistributedDataParallel over Gloo: the yardstick for `lockstep bench step --nproc-per-node`.

Each rank is a process with threads of its own. A step is that of `pytorch_step.py` on each rank's own random tokens, with
gradients averaged over the ranks in buckets of 25 MB while the backward goes on. With `--json` it prints what
`lockstep bench step --json` prints, tokens and memory over all ranks. Gloo has threads of its own, so ranks are not pinned
unless asked for.

    /tmp/peers/bin/python benches/peers/ddp_step.py --ranks 2 --threads 1 --model baby-gpt --precision f32
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

from common import adamw, environment, use_threads
from machine import peak_own_bytes
from models import PRESETS, build, token_mean_loss

LEARNING_RATE = 3e-4
BUCKET_MB = 25


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=PRESETS, default="baby-gpt")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="bf16 is autocast; gradients stay f32")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch of a rank")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a rank in a step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--pin", action="store_true", help="each rank and its threads on its share of the cores")
    parser.add_argument("--steps", type=int, default=10, help="steps timed")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    arguments = parser.parse_args()
    if arguments.seq_len > PRESETS[arguments.model].positions:
        parser.error(f"--seq-len {arguments.seq_len} exceeds the model's {PRESETS[arguments.model].positions} positions")
    return arguments


def train_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, autocast: bool) -> float:
    """`common.train_step` with micro-batches: gradients are summed over the ranks with the last one. Returns the own loss."""
    total = 0.0
    for number, micro_batch in enumerate(tokens):
        is_last = number + 1 == len(tokens)
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = token_mean_loss(ddp(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(tokens)
            loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def measure(arguments: argparse.Namespace, rank: int) -> dict:
    torch.manual_seed(arguments.seed)
    model = build(arguments.model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    optimizer = adamw(model, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(arguments.seed + 1 + rank)
    steps = arguments.warmup + arguments.steps
    batches = torch.randint(model.config.vocab, (steps, arguments.accumulation, arguments.batch, arguments.seq_len + 1))
    losses, step_ms = [], []
    for tokens in batches:
        started = time.perf_counter()
        losses.append(train_step(ddp, optimizer, tokens, arguments.precision == "bf16"))
        step_ms.append((time.perf_counter() - started) * 1e3)
    sums = torch.tensor([*losses, float(peak_own_bytes())], dtype=torch.float64)
    dist.all_reduce(sums)
    median_ms = statistics.median(step_ms[arguments.warmup :])
    tokens_per_step = arguments.ranks * arguments.accumulation * arguments.batch * arguments.seq_len
    return {
        "tokens_per_s": tokens_per_step / median_ms * 1e3,
        "step_ms": median_ms,
        "peak_rss_bytes": int(sums[-1]),
        "loss": (sums[arguments.warmup : -1] / arguments.ranks).tolist(),
        "ranks": arguments.ranks,
        "environment": environment(),
    }


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    if arguments.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[rank % len(cores) :: arguments.ranks]) or {cores[rank % len(cores)]})
    use_threads(arguments.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    result = measure(arguments, rank)
    if rank == 0:
        show(result, arguments)
    dist.destroy_process_group()


def show(result: dict, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(result), flush=True)
        return
    print(f"{arguments.model} {arguments.precision}, {arguments.ranks} ranks x {arguments.batch}x{arguments.seq_len}, {arguments.threads} threads each")
    print(f"{result['tokens_per_s']:.0f} tokens/s, {result['step_ms']:.1f} ms a step (median of {arguments.steps}),")
    print(f"{result['peak_rss_bytes'] / 2**20:.0f} MiB at peak, loss {result['loss'][0]:.4f} -> {result['loss'][-1]:.4f}")


def main() -> None:
    arguments = parse_arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(work, args=(arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
