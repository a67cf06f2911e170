#!/usr/bin/env python3
"""Times training steps of PyTorch FSDP2 (`fully_shard`) over Gloo: the yardstick for `lockstep bench step` with ZeRO 2 and 3.

Each block is wrapped by itself and what is left, both embeddings and the last norm, as the root, which is gathered once a
step in any case. With `--reshard yes` a block is freed after its forward and gathered again for its backward (ZeRO 3), with
`--reshard no` it is kept until its backward is done (ZeRO 2); gradients and optimizer state are shards in both. Everything
else is as in `ddp_step.py`.

It needs a PyTorch whose Gloo has `reduce_scatter_tensor` and `all_gather_into_tensor` on the CPU, which FSDP2 calls (tried:
2.15), and nothing that asks Gloo for an average: `fully_shard` by itself divides before a sum there.

    /tmp/peers/bin/python benches/peers/fsdp2_step.py --ranks 2 --threads 1 --model baby-gpt --precision f32 --reshard yes
"""

import argparse
import contextlib

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ranks


def wrap(model: nn.Module, arguments: argparse.Namespace) -> ranks.Wrapped:
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=arguments.reshard == "yes")
    fully_shard(model, mesh=mesh)

    def micro_batch(is_last: bool) -> contextlib.AbstractContextManager:
        model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    return ranks.Wrapped(model, micro_batch)


if __name__ == "__main__":
    parser = ranks.parser(__doc__)
    parser.add_argument("--reshard", choices=["yes", "no"], default="yes", help="free a block's weights after its forward")
    ranks.run(parser, wrap)
