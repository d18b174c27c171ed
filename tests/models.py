"""Tiny models with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 97


def tiny(name: str, **changes: Any) -> nn.Module:
    """The body of a transformers architecture with two layers: Llama, Qwen2, Qwen3, Mistral, Gemma2, Phi3, ..."""
    return tiny_causal_lm(name, **changes).model


def tiny_causal_lm(name: str, **changes: Any) -> nn.Module:
    """A transformers causal LM with two layers, eval mode, fp32."""
    import transformers

    size: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    if name == "Mistral":
        size["sliding_window"] = 4
    if name == "Gemma2":
        size |= {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0}
    config = getattr(transformers, f"{name}Config")(**{**size, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            # At the usual scale of initialisation attention hardly matters.
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (0.0 if p.dim() > 1 else 1.0))
    return model


class T2(nn.Module):
    """A decoder of two layers on torch's own attention, for packed ``[T]`` or ``[1, T]`` tokens."""

    def __init__(
        self, layers: int = 2, hidden: int = 32, heads: int = 4, mlp: nn.Module | None = None, causal: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.place = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList([Layer(hidden, heads, mlp, causal) for _ in range(layers)])
        self.norm = nn.RMSNorm(hidden)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, mlp: nn.Module | None = None, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.mlp = mlp or nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(a.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


def tokens(count: int, seed: int = 1) -> Tensor:
    """``[count]`` random token ids."""
    return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
