#!/usr/bin/env python3
"""Losses of 200 training steps of an image model, Lockstep's beside PyTorch's: the same weights, images and order.

    cargo build --release -p lockstep
    /tmp/peers/bin/pip install torch torchvision safetensors numpy
    /tmp/peers/bin/python benches/peers/vision_curve.py

PyTorch initializes a ResNet-18 for CIFAR and saves it as a model directory; `lockstep train` starts from that directory. Images
are patterns with noise in CIFAR-10's binary format. SGD with momentum 0.9, no decay, batches of 32 in sequence. Exits 1 if the
mean of any ten consecutive losses differs by more than 2 %. Single steps are printed as well: the loss of one batch near zero
is noise.
"""

import argparse
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
IMAGES, BATCH, LIMIT, WINDOW = 6400, 32, 0.02, 10
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


def pytorch(model: torch.nn.Module, pixels: numpy.ndarray, labels: numpy.ndarray, steps: int, lr: float) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        of_step = numpy.arange(step * BATCH, (step + 1) * BATCH) % IMAGES
        x = (torch.from_numpy(pixels[of_step]).float() / 255 - 0.5) / 0.25
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
        expected = pytorch(model, pixels, labels, arguments.steps, arguments.lr)
    worst, single = 0.0, 0.0
    for step, (a, b) in enumerate(zip(found, expected, strict=True), 1):
        single = max(single, abs(a / b - 1))
        if step % WINDOW == 0:
            means = [sum(losses[step - WINDOW : step]) / WINDOW for losses in (found, expected)]
            off = means[0] / means[1] - 1
            worst = max(worst, abs(off))
            if step % (2 * WINDOW) == 0:
                print(f"steps {step - WINDOW + 1:3} to {step:3}: Lockstep {means[0]:.5f}, PyTorch {means[1]:.5f}, {100 * off:+.3f} %")
    print(f"largest difference: {100 * worst:.3f} % of ten steps, {100 * single:.3f} % of one")
    return 1 if worst > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
