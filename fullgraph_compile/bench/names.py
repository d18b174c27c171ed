"""The ways to run a body that the bench knows."""

from __future__ import annotations

PLAIN = ("eager", "torch.compile", "reduce-overhead")
OURS = ("compiled", "pieces", "full_prefill")
ROUTES = (*PLAIN, *OURS)
MEANING = {
    "eager": "the transformers model as it is",
    "torch.compile": "torch.compile(body), token dim marked dynamic",
    "reduce-overhead": 'torch.compile(body, mode="reduce-overhead"), which records each token count by itself',
    "compiled": "the compiled pieces of full_prefill at exact sizes, without graphs",
    "pieces": "the same pieces captured one by one, attention run eagerly between them (breakable style)",
    "full_prefill": "one graph per token bucket",
}
NEEDS_CUDA = ("reduce-overhead", "pieces")
