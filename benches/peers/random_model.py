"""Writes a Hugging Face directory with random weights at the size of a published model.

    python benches/peers/random_model.py --shape llama-2-7b --dtype bfloat16 --out /tmp/llama-2-7b
    lockstep bench generate --model /tmp/llama-2-7b

`--layers` writes fewer layers than the published model has: qwen3-30b-a3b has 1.2 GB of experts in each.
Speed and memory do not depend on the values. The directory has no tokenizer. Tensors are written one after the other, so
that the largest one is all that is held in memory.
"""

import argparse
import json
import struct
from pathlib import Path

import torch

def qwen3(hidden_size, intermediate_size, num_hidden_layers, num_attention_heads):
    return dict(
        model_type="qwen3", vocab_size=151936, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers, num_attention_heads=num_attention_heads, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=True, rope_theta=1e6, max_position_embeddings=40960, rms_norm_eps=1e-6,
    )


SHAPES = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16),
    "qwen3-4b": qwen3(2560, 9728, 36, 32),
    "qwen3-30b-a3b": dict(
        qwen3(2048, 6144, 48, 32), model_type="qwen3_moe", num_key_value_heads=4, tie_word_embeddings=False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "llama-2-7b": dict(
        model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, head_dim=128, tie_word_embeddings=False, rope_theta=1e4,
        max_position_embeddings=4096, rms_norm_eps=1e-5,
    ),
}
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def tensors(config):
    """Yields the name and shape of each tensor."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        yield block + "input_layernorm.weight", [hidden]
        yield block + "self_attn.q_proj.weight", [queries, hidden]
        yield block + "self_attn.k_proj.weight", [keys, hidden]
        yield block + "self_attn.v_proj.weight", [keys, hidden]
        yield block + "self_attn.o_proj.weight", [hidden, queries]
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            yield block + "self_attn.q_norm.weight", [head_dim]
            yield block + "self_attn.k_norm.weight", [head_dim]
        yield block + "post_attention_layernorm.weight", [hidden]
        experts, width = config.get("num_experts", 0), config.get("moe_intermediate_size")
        if experts:
            yield block + "mlp.gate.weight", [experts, hidden]
        for module in [f"mlp.experts.{expert}." for expert in range(experts)] or ["mlp."]:
            yield block + module + "gate_proj.weight", [width or inner, hidden]
            yield block + module + "up_proj.weight", [width or inner, hidden]
            yield block + module + "down_proj.weight", [hidden, width or inner]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="number of layers (default: those of the published model)")
    parser.add_argument("--dtype", choices=SAFETENSORS_NAMES, default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    shape, dtype = SHAPES[arguments.shape], getattr(torch, arguments.dtype)
    shape = dict(shape, num_hidden_layers=arguments.layers or shape["num_hidden_layers"])
    config = dict(
        shape, architectures=[ARCHITECTURES[shape["model_type"]]], hidden_act="silu", attention_bias=False,
        torch_dtype=arguments.dtype, bos_token_id=1, eos_token_id=2,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header, offset = {}, 0
    for name, size in tensors(shape):
        end = offset + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[arguments.dtype], "shape": size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    random = torch.Generator().manual_seed(0)
    with open(arguments.out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensors(shape):
            if name.endswith("norm.weight"):
                values = torch.ones(size)
            else:
                # Large embeddings dominate the residual stream, so that unlike tokens are routed to unlike experts.
                bound = 1.0 if name == "model.embed_tokens.weight" and "num_experts" in config else 0.03
                values = torch.empty(size).uniform_(-bound, bound, generator=random)
            file.write(values.to(dtype).view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    main()
