#!/usr/bin/env python3
"""Times training steps of transformers' Mixtral on the CPU: the yardstick for `lockstep bench step --model mixtral-20m`.

A step is that of `pytorch_step.py`; experts run as `--experts-implementation` says (transformers' `eager` loops over them,
`grouped_mm` gives them to PyTorch's grouped product, where the CPU has one).

    /tmp/peers/bin/pip install transformers==5.23.0
    /tmp/peers/bin/python benches/peers/mixtral_step.py --precision f32 --batch 4 --seq-len 256
    /tmp/peers/bin/python benches/peers/mixtral_step.py --experts 64 --experts-per-token 8 --width 64

The second is `lockstep bench step --model mixtral-20m --set model.num_local_experts=64 --set model.num_experts_per_tok=8 --set
model.intermediate_size=64`.
"""

import argparse
import json
import statistics
import time

import torch
import transformers
from torch import Tensor, nn

from common import adamw, environment, train_step, use_threads
from machine import peak_rss_bytes

LEARNING_RATE = 3e-4
VOCABULARY = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--bf16-mode", choices=["autocast", "pure"], default="autocast")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of an expert")
    parser.add_argument("--experts-implementation", choices=["eager", "grouped_mm", "batched_mm"], default="eager")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps timed")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    return parser.parse_args()


class Logits(nn.Module):
    """A model of transformers that returns logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        return self.model(input_ids=ids, use_cache=False).logits


def build(arguments: argparse.Namespace) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=arguments.width, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        num_local_experts=arguments.experts, num_experts_per_tok=arguments.experts_per_token,
        bos_token_id=None, eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation=arguments.experts_implementation
    )
    return Logits(model)


def measure(arguments: argparse.Namespace) -> dict:
    use_threads(arguments.threads)
    torch.manual_seed(1)
    model = build(arguments)
    is_pure = arguments.precision == "bf16" and arguments.bf16_mode == "pure"
    if is_pure:
        model = model.to(torch.bfloat16)
    autocast = arguments.precision == "bf16" and not is_pure
    optimizer = adamw(model, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.randint(VOCABULARY, (arguments.warmup + arguments.steps, arguments.batch, arguments.seq_len + 1))
    losses, step_ms = [], []
    for tokens in batches:
        started = time.perf_counter()
        loss, _ = train_step(model, optimizer, tokens[:, :-1], tokens[:, 1:], autocast)
        step_ms.append((time.perf_counter() - started) * 1e3)
        losses.append(loss)
    median_ms = statistics.median(step_ms[arguments.warmup :])
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": arguments.batch * arguments.seq_len / median_ms * 1e3,
        "step_ms": median_ms,
        "peak_rss_bytes": peak_rss_bytes(),
        "loss": losses[arguments.warmup :],
        "environment": environment(),
    }


def main() -> None:
    arguments = parse_arguments()
    result = measure(arguments)
    if arguments.json:
        print(json.dumps(result))
        return
    mode = f" ({arguments.bf16_mode})" if arguments.precision == "bf16" else ""
    print(f"mixtral {arguments.experts}x{arguments.width}, {arguments.experts_per_token} of them a token, "
          f"{arguments.precision}{mode} {arguments.batch}x{arguments.seq_len}, {arguments.threads} threads")
    print(f"{result['tokens_per_s']:.0f} tokens/s, {result['step_ms']:.1f} ms a step (median of {arguments.steps})")


if __name__ == "__main__":
    main()
