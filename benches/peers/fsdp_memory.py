#!/usr/bin/env python3
"""Memory of PyTorch's DDP and FSDP2 over Gloo on the work of Lockstep's example `fsdp_memory`: GPT-2 with 24 layers, two
steps of AdamW in f32.

PyTorch has no ledger on the CPU, so this counts the tensors: parameters and gradients after the backward, and the optimizer's
state after its step, each storage once. *saved* are the tensors that autograd saves for the backward, parameters excepted.
*process* is the most that a rank's own pages came to, buckets and temporary buffers included. All in MB, the maximum over ranks.

    /tmp/peers/bin/python benches/peers/fsdp_memory.py --ranks 2
"""

import argparse
import json
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import adamw, use_threads
from machine import peak_own_bytes
from models import build, token_mean_loss

LAYERS, VOCAB, STEPS = 24, 50_257, 2


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storage_bytes(tensors) -> int:
    """Bytes of the storages of `tensors`, each once."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def wrap(model: nn.Module, layout: str, ranks: int) -> nn.Module:
    if layout == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(1)
    module = build("gpt2-124m", layers=LAYERS, heads=arguments.hidden // 64, width=arguments.hidden, vocab=VOCAB)
    model = wrap(module, arguments.layout, arguments.ranks)
    optimizer = adamw(model, 1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    held = {"parameters": 0, "gradients": 0, "optimizer": 0, "saved": 0}
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (1, arguments.seq_len + 1))
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = local(tensor).untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = token_mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        own = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
        loss.backward()
        gradients = storage_bytes(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
        now = {
            "parameters": storage_bytes(model.parameters()),
            "gradients": gradients,
            "optimizer": storage_bytes(state),
            "saved": sum(size for pointer, size in saved.items() if pointer not in own),
        }
        held = {name: max(size, now[name]) for name, size in held.items()}
        optimizer.zero_grad(set_to_none=True)
    return {**held, "process": peak_own_bytes()}


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    use_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks)
    held = measure(arguments)
    values = torch.tensor(list(held.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({name: value / 1e6 for name, value in zip(held, values.tolist(), strict=True)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=["DDP", "FSDP"], default="DDP")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--seq-len", type=int, default=128)
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(work, args=(arguments, port), nprocs=arguments.ranks)
