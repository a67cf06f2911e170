"""What the peer scripts share: the optimizer, one training step, and a description of the machine."""

import datetime
import os
import platform

import torch
from torch import Tensor, nn

from machine import cpu_name
from models import token_mean_loss


def adamw(model: nn.Module, lr: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (embeddings included, biases and norms not), in PyTorch's fused form."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=1e-8, fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, autocast: bool = False):
    """Forward, backward, clip at 1.0, update. Returns the loss and the gradient norm before clipping."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = token_mean_loss(model(ids), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def environment() -> dict:
    """Versions, machine and date, so that a figure can be judged later."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "date": datetime.date.today().isoformat(),
    }
