"""The peer models: GPT-2 and Llama in plain PyTorch, for one device.

They compute what Lockstep's presets of the same name compute, written as a PyTorch user would write them for
speed: fused query/key/value projections and `scaled_dot_product_attention`. Shapes in comments: B sequences,
T tokens each, D model width, H heads, V vocabulary.

`canonical_tensors` and `load_canonical_tensors` translate the GPT weights to and from Lockstep's names (separate
q, k and v, every matrix `[out, in]`), so that both engines can start from the same weights.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptConfig:
    layers: int
    heads: int
    width: int
    vocab: int
    positions: int
    bias: bool
    gelu: str  # "none" is the exact GELU, "tanh" its approximation, as in torch.nn.functional.gelu
    dropout: float = 0.0


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    heads: int
    width: int
    hidden: int
    vocab: int
    positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


PRESETS = {
    "baby-gpt": GptConfig(6, 6, 384, vocab=256, positions=256, bias=False, gelu="none"),
    "gpt2-124m": GptConfig(12, 12, 768, vocab=50_257, positions=1024, bias=True, gelu="tanh"),
    "llama-110m": LlamaConfig(12, 12, 768, hidden=2048, vocab=32_000, positions=2048),
}


def build(preset: str, **overrides) -> nn.Module:
    """A freshly initialised model of `preset`; `overrides` replace fields of its configuration."""
    config = replace(PRESETS[preset], **overrides)
    return Gpt(config) if isinstance(config, GptConfig) else Llama(config)


def token_mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in f32, averaged over all tokens. logits [B, T, V], labels [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Gpt(nn.Module):
    """GPT-2: learned positions, pre-norm blocks, output head tied to the embedding."""

    def __init__(self, config: GptConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(GptBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.apply(init_normal)
        scale_residual_projections([p for b in self.blocks for p in (b.attention_out, b.mlp_out)], config.layers)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token_embedding.weight)


class GptBlock(nn.Module):
    def __init__(self, config: GptConfig):
        super().__init__()
        self.config = config
        width, bias = config.width, config.bias
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention_qkv = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp_in = nn.Linear(width, 4 * width, bias=bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        p = self.config.dropout
        x = x + F.dropout(self.attention(self.attention_norm(x)), p, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), p, self.training)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.config.heads) for t in self.attention_qkv(x).chunk(3, dim=-1))
        p = self.config.dropout if self.training else 0.0
        return self.attention_out(merge_heads(F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)))

    def mlp(self, x: Tensor) -> Tensor:
        return self.mlp_out(F.gelu(self.mlp_in(x), approximate=self.config.gelu))


class Llama(nn.Module):
    """Llama 2: RMSNorm, rotary positions in the half-split form, SwiGLU, output head tied to the embedding."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.apply(init_normal)
        scale_residual_projections([p for b in self.blocks for p in (b.attention_out, b.mlp_out)], config.layers)
        # Kept as two plain tensors in f32: `module.to(bfloat16)` must not round the angles' sine and cosine.
        self.rotary = rotary_table(config)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, V]."""
        x = self.token_embedding(ids)
        rotary = tuple(table[: ids.shape[1]].to(x.dtype) for table in self.rotary)
        for block in self.blocks:
            x = block(x, rotary)
        return F.linear(self.norm(x), self.token_embedding.weight)


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.attention_qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.mlp_gate_up = nn.Linear(width, 2 * config.hidden, bias=False)
        self.mlp_out = nn.Linear(config.hidden, width, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        gate, up = self.mlp_gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * up)

    def attention(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (split_heads(t, self.config.heads) for t in self.attention_qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, rotary).to(v.dtype), rotate(k, rotary).to(v.dtype)
        return self.attention_out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] -> [B, H, T, D/H]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D/H] -> [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


def rotary_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/d), each [positions, d] with the d/2 angles written twice."""
    head = config.width // config.heads
    frequency = config.rope_theta ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angle = torch.outer(torch.arange(config.positions, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (x[i], x[i + d/2]) of each head by the angle of their position. x [B, H, T, d]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def init_normal(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def scale_residual_projections(projections: list[nn.Linear], layers: int) -> None:
    """Redraws what writes into the residual stream with 0.02 / sqrt(2 layers): the stream's variance then stays
    put as blocks are added (GPT-2 paper, section 2.3)."""
    for projection in projections:
        nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * layers))


# Our module names and Lockstep's, inside a block. q, k and v stand apart there and are one matrix here.
BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}


def canonical_names(model: Gpt) -> dict[str, list[str]]:
    """Each parameter's name here -> the canonical tensors that it holds, stacked along dimension 0."""
    names = {
        "token_embedding.weight": ["transformer.wte.weight"],
        "position_embedding.weight": ["transformer.wpe.weight"],
    }
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module == "norm":
            names[name] = [f"transformer.ln_f.{kind}"]
        elif module.startswith("blocks."):
            _, layer, part = module.split(".")
            parts = [f"attn.{x}" for x in "qkv"] if part == "attention_qkv" else [BLOCK_NAMES[part]]
            names[name] = [f"transformer.h.{layer}.{p}.{kind}" for p in parts]
    return names


def canonical_tensors(model: Gpt) -> dict[str, Tensor]:
    """The weights under Lockstep's names, every matrix `[out, in]`."""
    parameters = dict(model.named_parameters())
    tensors = {}
    for name, canonical in canonical_names(model).items():
        pieces = parameters[name].detach().chunk(len(canonical))
        tensors.update((c, piece.clone()) for c, piece in zip(canonical, pieces, strict=True))
    return tensors


def load_canonical_tensors(model: Gpt, tensors: dict[str, Tensor]) -> None:
    """The inverse of `canonical_tensors`; a tensor missing or left over is an error."""
    names = canonical_names(model)
    expected = {c for canonical in names.values() for c in canonical}
    if expected != tensors.keys():
        raise ValueError(f"missing: {sorted(expected - tensors.keys())}, unknown: {sorted(tensors.keys() - expected)}")
    stacked = {name: torch.cat([tensors[c] for c in canonical]) for name, canonical in names.items()}
    model.load_state_dict(stacked)
