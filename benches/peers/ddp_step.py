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

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks

BUCKET_MB = 25


def wrap(model: nn.Module, _arguments: argparse.Namespace) -> ranks.Wrapped:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return ranks.Wrapped(ddp, lambda is_last: contextlib.nullcontext() if is_last else ddp.no_sync())


if __name__ == "__main__":
    ranks.run(ranks.parser(__doc__), wrap)
