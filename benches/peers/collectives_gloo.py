#!/usr/bin/env python3
"""Times collectives of Gloo as `lockstep bench collectives --json` times ours: the median of all repetitions, on the
slowest rank; prints one JSON document.

    /tmp/peers/bin/python benches/peers/collectives_gloo.py --op all_reduce --ranks 2 4096 16777216
"""

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

WARM_UP, MOST = 3, 20_000


def call(op: str, first: torch.Tensor, second: torch.Tensor, rank: int, ranks: int) -> None:
    block = first.numel() // ranks
    if op == "all_reduce":
        dist.all_reduce(first)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(second[:block], first)
    elif op == "all_gather":
        dist.all_gather_into_tensor(second, first[rank * block : (rank + 1) * block])
    elif op == "all_to_all":
        dist.all_to_all_single(second, first)


def time_size(arguments: argparse.Namespace, size: int, rank: int) -> dict:
    elements = size // 4 // arguments.ranks * arguments.ranks
    # Sums of zeros neither overflow nor become denormal, however often they are summed.
    first, second = torch.zeros(elements), torch.zeros(elements)
    times: list[float] = []
    repetitions = WARM_UP
    while len(times) < repetitions:
        started = time.perf_counter()
        call(arguments.op, first, second, rank, arguments.ranks)
        times.append(time.perf_counter() - started)
        if len(times) == WARM_UP:
            often = torch.tensor([min(MOST, max(5, int(arguments.seconds / statistics.median(times))))])
            dist.broadcast(often, 0)
            dist.barrier()
            repetitions = WARM_UP + int(often)
    slowest = torch.tensor([statistics.median(times[WARM_UP:])], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest)
    return {"op": arguments.op, "bytes": elements * 4, "median_us": seconds * 1e6, "algbw_GBps": elements * 4 / seconds / 1e9}


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]} if arguments.pin else set(cores))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    rows = [time_size(arguments, size, rank) for size in arguments.sizes]
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["all_reduce", "reduce_scatter", "all_gather", "all_to_all"], default="all_reduce")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--pin", action="store_true", help="each rank and its threads on one core")
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(work, args=(arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
