#!/usr/bin/env python3
"""Records the loss curve of nanoGPT's Shakespeare recipe on bytes, in PyTorch, for Lockstep to be held against.

The recipe: `baby-gpt` (6 layers, 6 heads, width 384, 256 positions, no biases), 64 sequences of 256 bytes a step,
dropout 0.2 on embedding, attention probabilities and residual branches, AdamW (betas 0.9/0.99, decay 0.1 on
matrices), clipping at 1.0, learning rate 1e-3 -> 1e-4 by a cosine over 5,000 steps after 100 of linear warm-up.
The first 90 % of the file is for training.

Data order `sequential` can be repeated by any engine: sample i is window (i mod number of windows) of seq_len + 1
bytes with stride seq_len, and step k (from 0) takes samples 64k to 64k + 63. `random` draws offsets as nanoGPT does.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r benches/peers/requirements.txt
    /tmp/peers/bin/python benches/peers/nanogpt_curve.py --data tinyshakespeare.txt --steps 200 --out curve.json

`--save-init FILE.safetensors` writes the initial weights under Lockstep's names (with `--steps 0` and nothing
else happens); `--load-init` starts from such a file.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import adamw, environment, train_step, use_threads
from models import Gpt, build, canonical_tensors, load_canonical_tensors

BATCH, SEQ_LEN = 64, 256
PEAK_LR, MIN_LR, WARMUP_STEPS, DECAY_STEPS = 1e-3, 1e-4, 100, 5_000
BETAS, WEIGHT_DECAY, TRAIN_PERCENT = (0.9, 0.99), 0.1, 90


def learning_rate(step: int) -> float:
    """Step counts from 0. The first step already moves: its factor is 1 / WARMUP_STEPS."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = min(1.0, (step - WARMUP_STEPS) / (DECAY_STEPS - WARMUP_STEPS))
    return MIN_LR + (PEAK_LR - MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * progress))


def sequential_offsets(tokens: int, step: int) -> list[int]:
    """First token of each sample of a step, in a corpus of `tokens` tokens."""
    windows = (tokens - 1) // SEQ_LEN
    return [(step * BATCH + i) % windows * SEQ_LEN for i in range(BATCH)]


def random_offsets(tokens: int, generator: torch.Generator) -> list[int]:
    return torch.randint(tokens - SEQ_LEN, (BATCH,), generator=generator).tolist()


def batch_at(corpus: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """ids and labels, each [BATCH, SEQ_LEN] int64."""
    samples = torch.stack([corpus[o : o + SEQ_LEN + 1] for o in offsets]).long()
    return samples[:, :-1], samples[:, 1:]


def digest(tensors: dict[str, Tensor]) -> str:
    """One hash for all weights: two curves with the same digest began at the same point."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(tensors[name].contiguous().numpy().tobytes())
    return hasher.hexdigest()


def initial_model(arguments: argparse.Namespace) -> Gpt:
    torch.manual_seed(arguments.seed)
    model = build("baby-gpt", dropout=arguments.dropout)
    if arguments.load_init:
        load_canonical_tensors(model, load_file(arguments.load_init))
    if arguments.save_init:
        save_file(canonical_tensors(model), arguments.save_init, metadata={"format": "pt"})
    if arguments.save_hf:
        save_hugging_face(arguments.save_hf, canonical_tensors(model))
    return model


def save_hugging_face(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Writes the weights as a GPT-2 directory: fused `c_attn`, matrices `[in, out]`, no biases (Lockstep's `"bias"`)."""
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".h." in name)
    width = tensors["transformer.ln_f.weight"].numel()
    state = {}
    for name, tensor in tensors.items():
        if name.endswith((".attn.q.weight", ".attn.k.weight", ".attn.v.weight")):
            continue
        transposed = ".h." in name and tensor.dim() == 2
        state[name] = tensor.t().contiguous() if transposed else tensor
    for layer in range(layers):
        attention = f"transformer.h.{layer}.attn"
        fused = torch.cat([tensors[f"{attention}.{part}.weight"] for part in "qkv"])
        state[f"{attention}.c_attn.weight"] = fused.t().contiguous()
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": tensors["transformer.wte.weight"].shape[0],
        "n_positions": tensors["transformer.wpe.weight"].shape[0],
        "n_embd": width,
        "n_layer": layers,
        "n_head": 6,
        "activation_function": "gelu",
        "bias": False,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def significant(value: float) -> float:
    """Eight digits: all that an f32 holds."""
    return float(f"{value:.8g}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a text file, read as bytes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="where the curve goes, as JSON (rewritten every 10 steps)")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--data-order", choices=["sequential", "random"], default="sequential")
    parser.add_argument("--seed", type=int, default=1337, help="of the initial weights; dropout and data take seed + 1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-init", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--save-hf", type=Path, metavar="DIR", help="the initial weights as a Hugging Face directory")
    parser.add_argument("--load-init", type=Path, metavar="FILE.safetensors")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    use_threads(arguments.threads)
    text = arguments.data.read_bytes()
    corpus = torch.frombuffer(bytearray(text[: len(text) * TRAIN_PERCENT // 100]), dtype=torch.uint8)
    model = initial_model(arguments)
    optimizer = adamw(model, PEAK_LR, BETAS, WEIGHT_DECAY)
    curve = {
        "recipe": {
            "model": "baby-gpt",
            "batch": BATCH,
            "seq_len": SEQ_LEN,
            "dropout": arguments.dropout,
            "data_order": arguments.data_order,
            "data_sha256": hashlib.sha256(text).hexdigest(),
            "train_tokens": len(corpus),
            "seed": arguments.seed,
            "init_sha256": digest(canonical_tensors(model)),
            "peak_lr": PEAK_LR,
            "min_lr": MIN_LR,
            "warmup_steps": WARMUP_STEPS,
            "decay_steps": DECAY_STEPS,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": 1.0,
        },
        "environment": environment(),
        "loss": [],
        "grad_norm": [],
    }

    # A seed of their own, so that dropout and data do not depend on whether the weights were drawn or loaded.
    torch.manual_seed(arguments.seed + 1)
    generator = torch.Generator().manual_seed(arguments.seed + 1)
    for step in range(arguments.steps):
        started = time.perf_counter()
        if arguments.data_order == "sequential":
            offsets = sequential_offsets(len(corpus), step)
        else:
            offsets = random_offsets(len(corpus), generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss, norm = train_step(model, optimizer, *batch_at(corpus, offsets))
        curve["loss"].append(significant(loss))
        curve["grad_norm"].append(significant(norm))
        seconds = time.perf_counter() - started
        print(f"step {step + 1:>4}  loss {loss:.4f}  grad norm {norm:.3f}  {seconds:.1f} s", file=sys.stderr, flush=True)
        if arguments.out and ((step + 1) % 10 == 0 or step + 1 == arguments.steps):
            arguments.out.write_text(json.dumps(curve, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
