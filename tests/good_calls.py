"""Good calls around a bad one: what each user error must leave as it was, and right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import fullgraph_compile as fgc
from fullgraph_compile.batch import active_batch
from tests.models import T2, tiny, tokens

GOOD: dict[str, Any] = {"buckets": [16], "graphs": "tape", "compiler": "eager"}
WAYS = ["compile", "torch.compile"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "T2": lambda: T2(layers=1).eval(),
    "Llama": lambda: tiny("Llama", num_hidden_layers=1),
}


def compiled(way: str, module: nn.Module, options: dict[str, Any]) -> Any:
    if way == "compile":
        return fgc.compile(module, **options)
    return torch.compile(module, backend="full_prefill", options=options)


def call(body: Any, lengths: list[int], batch: fgc.PrefillBatch | None = None) -> Tensor:
    """One packed call; ``lengths`` are what its ids and positions are made of, whatever the batch says."""
    described = fgc.PrefillBatch(lengths, device="cpu")
    module = getattr(body, "_orig_mod", body)
    more = {} if isinstance(module, T2) else {"use_cache": False}
    with torch.no_grad(), batch or described:
        out = body(
            input_ids=tokens(described.tokens)[None],
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            **more,
        )
    return (out if isinstance(out, Tensor) else out[0])[0]


def per_request(model: nn.Module, lengths: list[int]) -> Tensor:
    more = {} if isinstance(model, T2) else {"use_cache": False}
    ids, rows, start = tokens(sum(lengths)), [], 0
    for n in lengths:
        with torch.no_grad():
            out = model(input_ids=ids[None, start : start + n], position_ids=torch.arange(n)[None], **more)
        rows.append((out if isinstance(out, Tensor) else out[0])[0])
        start += n
    return torch.cat(rows)


def check_good_calls(body: Any, eager: nn.Module) -> None:
    """Calls of one request and of several are right and replay."""
    before = sum(fgc.report(body).replays.values())
    # Outside of fgc.compile the first call is traced for its size alone, so it is not a batch of several.
    for lengths in ([9], [7], [3, 4, 2]):
        torch.testing.assert_close(call(body, lengths), per_request(eager, lengths), rtol=1e-5, atol=2e-5)
    assert sum(fgc.report(body).replays.values()) >= before + 2


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """The module has the same attributes, weights and attention setting after as before."""
    attributes = dict(module.__dict__)
    weights = {k: (v.data_ptr(), v.clone()) for k, v in module.state_dict().items()}
    setting = getattr(getattr(module, "config", None), "_attn_implementation", None)
    yield
    changed = {k for k, v in module.__dict__.items() if attributes.get(k) is not v}
    assert changed <= {"_is_torch_compile"}  # torch.compile's own mark
    assert list(module.state_dict()) == list(weights)
    for name, value in module.state_dict().items():
        pointer, before = weights[name]
        assert value.data_ptr() == pointer
        assert torch.equal(value, before)
    assert getattr(getattr(module, "config", None), "_attn_implementation", None) == setting
    assert active_batch() is None
