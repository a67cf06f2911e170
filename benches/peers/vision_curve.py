#!/usr/bin/env python3
"""Losses of 200 training steps of an image model, Lockstep's beside PyTorch's: the same weights, images and order.

    cargo build --release -p lockstep
    /tmp/peers/bin/pip install torch torchvision safetensors numpy
    /tmp/peers/bin/python benches/peers/vision_curve.py

PyTorch initializes a ResNet-18 for CIFAR and saves it as a model directory; `lockstep train` starts from that directory. Images
are patterns with noise in CIFAR-10's binary format. SGD with momentum 0.9, no decay, batches of 32 in sequence.

PyTorch runs with channels_last tensors. Rounding grows in training, so a control runs PyTorch with contiguous tensors: the same
numbers but for the order of additions. Exits 1 if the mean of any ten consecutive losses of Lockstep differs from PyTorch's by
more than 2 % and by more than the control's does.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
import torchvision
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
IMAGES, BATCH, WINDOW = 6400, 32, 10
LIMIT = 0.02
CONFIG = {
    "model_type": "resnet", "image_size": 32, "num_labels": 10, "stem": "cifar", "layer_type": "basic",
    "embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2],
}


def write_images(directory: Path) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Ten kinds of stripes under heavy noise; returns pixels u8 [images, 3, 32, 32] and labels."""
    random = numpy.random.default_rng(7)
    labels = random.integers(0, 10, IMAGES).astype(numpy.uint8)
    row, column = numpy.mgrid[0:32, 0:32]
    angle = labels[:, None, None] * numpy.pi / 10
    wave = numpy.sin((row * numpy.cos(angle) + column * numpy.sin(angle)) * 0.8 + random.uniform(0, 6.28, (IMAGES, 1, 1)))
    pixels = 128 + 30 * wave[:, None] + random.normal(0, 60, (IMAGES, 3, 32, 32))
    pixels = pixels.clip(0, 255).astype(numpy.uint8)
    records = numpy.concatenate([labels[:, None], pixels.reshape(IMAGES, -1)], axis=1)
    for part, some in enumerate(numpy.split(records, 5)):
        (directory / f"data_batch_{part + 1}.bin").write_bytes(some.tobytes())
    (directory / "test_batch.bin").write_bytes(records[:100].tobytes())
    return pixels, labels


def resnet() -> torch.nn.Module:
    torch.manual_seed(1)
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = torch.nn.Identity()
    return model


def pytorch(
    model: torch.nn.Module, pixels: numpy.ndarray, labels: numpy.ndarray, steps: int, lr: float, layout: torch.memory_format
) -> list[float]:
    model = copy.deepcopy(model).to(memory_format=layout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        of_step = numpy.arange(step * BATCH, (step + 1) * BATCH) % IMAGES
        x = (torch.from_numpy(pixels[of_step]).float() / 255 - 0.5) / 0.25
        x = x.to(memory_format=layout)
        loss = torch.nn.functional.cross_entropy(model(x), torch.from_numpy(labels[of_step]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def lockstep(binary: Path, work: Path, steps: int, lr: float) -> list[float]:
    (work / "run.toml").write_text(f"""
[model]
path = "model"
from_pretrained = true
[data]
format = "cifar10"
train = ["images"]
order = "sequential"
transforms = [{{ kind = "normalize", mean = [0.5, 0.5, 0.5], std = [0.25, 0.25, 0.25] }}]
[train]
steps = {steps}
global_batch = {BATCH}
micro_batch = {BATCH}
max_grad_norm = 0.0
[optimizer]
kind = "sgd"
momentum = 0.9
lr = {lr}
weight_decay = 0.0
[schedule]
kind = "constant"
warmup_steps = 0
[metrics]
dir = "metrics"
""")
    subprocess.run([binary, "train", "run.toml", "--nproc-per-node", "1"], cwd=work, check=True, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (work / "metrics/metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--binary", type=Path, default=TARGET / "release/lockstep")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "images").mkdir()
        (work / "model").mkdir()
        pixels, labels = write_images(work / "images")
        model = resnet()
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "num_batches" not in name}
        save_file(weights, work / "model/model.safetensors")
        (work / "model/config.json").write_text(json.dumps(CONFIG))
        found = lockstep(arguments.binary, work, arguments.steps, arguments.lr)
        expected, control = (
            pytorch(model, pixels, labels, arguments.steps, arguments.lr, layout)
            for layout in (torch.channels_last, torch.contiguous_format)
        )
    worst = {"Lockstep": 0.0, "PyTorch, contiguous": 0.0}
    print("steps      PyTorch  Lockstep        off     contiguous        off")
    for end in range(WINDOW, arguments.steps + 1, WINDOW):
        own, of_torch, of_control = (sum(losses[end - WINDOW : end]) / WINDOW for losses in (found, expected, control))
        off = [own / of_torch - 1, of_control / of_torch - 1]
        worst = {name: max(most, abs(now)) for (name, most), now in zip(worst.items(), off, strict=True)}
        if end % (2 * WINDOW) == 0:
            differences = f"{own:.5f}  {100 * off[0]:+.3f} %        {of_control:.5f}  {100 * off[1]:+.3f} %"
            print(f"{end - WINDOW + 1:3} to {end:3}  {of_torch:.5f}   {differences}")
    for name, most in worst.items():
        print(f"{name}: up to {100 * most:.3f} % from PyTorch")
    own, of_control = worst.values()
    return 1 if own > max(LIMIT, of_control) else 0


if __name__ == "__main__":
    sys.exit(main())
