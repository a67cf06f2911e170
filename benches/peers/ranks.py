"""What the peers on several processes share: ranks that meet over Gloo, and the clock around their steps.

A peer says how it wraps a model (`Wrap`); everything else is the same for all: each rank is a process with threads of its
own and its own random tokens, a step is that of `pytorch_step.py`, and what is printed counts tokens and memory of all ranks.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from common import adamw, environment, use_threads
from machine import peak_own_bytes, proportional_bytes
from models import PRESETS, build, token_mean_loss

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Wrapped:
    """A model that several ranks train."""

    module: nn.Module
    """Called with ids [B, T], it gives logits [B, T, V]; its parameters are what this rank updates."""
    micro_batch: Callable[[bool], contextlib.AbstractContextManager]
    """Around a micro-batch: whether gradients are summed over the ranks with it, as with the last one of a step."""


Wrap = Callable[[nn.Module, argparse.Namespace], Wrapped]


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--ranks", type=int, default=2)
    result.add_argument("--model", choices=PRESETS, default="baby-gpt")
    result.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="bf16 is autocast; gradients stay f32")
    result.add_argument("--batch", type=int, default=8, help="sequences in a micro-batch of a rank")
    result.add_argument("--accumulation", type=int, default=1, help="micro-batches of a rank in a step")
    result.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    result.add_argument("--threads", type=int, default=1, help="of a rank")
    result.add_argument("--pin", action="store_true", help="each rank and its threads on its share of the cores")
    result.add_argument("--steps", type=int, default=10, help="steps timed")
    result.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    result.add_argument("--seed", type=int, default=1)
    result.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    return result


def run(parser: argparse.ArgumentParser, wrap: Wrap) -> None:
    """Times the steps that the command line asks for. `wrap` has to be a function of a module, for ranks are spawned."""
    arguments = parser.parse_args()
    if arguments.seq_len > PRESETS[arguments.model].positions:
        parser.error(f"--seq-len {arguments.seq_len} exceeds the model's {PRESETS[arguments.model].positions} positions")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(work, args=(arguments, wrap, port), nprocs=arguments.ranks)


def work(rank: int, arguments: argparse.Namespace, wrap: Wrap, port: int) -> None:
    if arguments.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(cores[rank % len(cores) :: arguments.ranks]) or {cores[rank % len(cores)]})
    use_threads(arguments.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    result = measure(arguments, wrap, rank)
    if rank == 0:
        show(result, arguments)
    # Nobody closes connections that another rank still works with.
    dist.barrier()
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, wrap: Wrap, rank: int) -> dict:
    torch.manual_seed(arguments.seed)
    model = build(arguments.model)
    vocab = model.config.vocab
    wrapped = wrap(model, arguments)
    del model
    optimizer = adamw(wrapped.module, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    torch.manual_seed(arguments.seed + 1 + rank)
    steps = arguments.warmup + arguments.steps
    batches = torch.randint(vocab, (steps, arguments.accumulation, arguments.batch, arguments.seq_len + 1))
    losses, step_ms = [], []
    for tokens in batches:
        started = time.perf_counter()
        losses.append(train_step(wrapped, optimizer, tokens, arguments.precision == "bf16"))
        step_ms.append((time.perf_counter() - started) * 1e3)
    # Everybody is still there, so that what is shared is counted as shared.
    sums = torch.tensor([*losses, float(proportional_bytes()), float(peak_own_bytes())], dtype=torch.float64)
    dist.all_reduce(sums)
    median_ms = statistics.median(step_ms[arguments.warmup :])
    tokens_per_step = arguments.ranks * arguments.accumulation * arguments.batch * arguments.seq_len
    return {
        "tokens_per_s": tokens_per_step / median_ms * 1e3,
        "step_ms": median_ms,
        "pss_bytes": int(sums[-2]),
        "peak_rss_bytes": int(sums[-1]),
        "loss": (sums[arguments.warmup : -2] / arguments.ranks).tolist(),
        "ranks": arguments.ranks,
        "environment": environment(),
    }


def train_step(wrapped: Wrapped, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, autocast: bool) -> float:
    """`common.train_step` with micro-batches: gradients are summed over the ranks with the last one. Returns the own loss."""
    total = 0.0
    for number, micro_batch in enumerate(tokens):
        with wrapped.micro_batch(number + 1 == len(tokens)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = token_mean_loss(wrapped.module(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(tokens)
            loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(wrapped.module.parameters(), 1.0)
    # Of shards it is a sum that is still to be made.
    (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def show(result: dict, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(result), flush=True)
        return
    print(f"{arguments.model} {arguments.precision}, {arguments.ranks} ranks x {arguments.batch}x{arguments.seq_len}, {arguments.threads} threads each")
    print(f"{result['tokens_per_s']:.0f} tokens/s, {result['step_ms']:.1f} ms a step (median of {arguments.steps}),")
    memory = f"{result['pss_bytes'] / 2**20:.0f} MiB after the last step (PSS), {result['peak_rss_bytes'] / 2**20:.0f} MiB at peak"
    print(f"{memory}, loss {result['loss'][0]:.4f} -> {result['loss'][-1]:.4f}", flush=True)
