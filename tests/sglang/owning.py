"""Our own attention in SGLang's graphs: ``python -m tests.sglang.owning KIND``, with the option ``attention``."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from tests.sglang.one_model import OneModel, prompts
from tests.sglang.processes import tell
from tests.sglang.serving import BATCHES, serve


def written(model: OneModel, lengths: tuple[int, ...]) -> dict[str, Any]:
    """What a replay leaves in the pool, beside what SGLang's eager forward leaves there."""
    pool = model.runner.token_to_kv_pool
    caches = [t for layer in range(2) for t in pool.get_kv_buffer(layer)]
    batch = model.batch(prompts(*lengths))
    cells = batch.out_cache_loc.long()
    others = torch.ones(caches[0].shape[0], dtype=torch.bool)
    # Padded rows may write to cell 0, which belongs to no request.
    others[cells], others[0] = False, False
    wanted = []
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(1)))
    model.eager(batch)
    for cache in caches:
        wanted.append(cache[cells].clone())
        cache[cells] = float("nan")
    before = [cache[others].clone() for cache in caches]
    _, replayed = model.forward(batch)
    return {
        "replayed": replayed,
        "error": max(float((c[cells] - w).abs().max()) for c, w in zip(caches, wanted, strict=True)),
        "others": all(torch.equal(c[others], b) for c, b in zip(caches, before, strict=True)),
    }


def main(kind: str) -> None:
    logging.basicConfig(level=logging.INFO)
    model = OneModel(kind)
    model.capture()
    captured = list(model.double.events)
    served = {name: serve(model, lengths) for name, lengths in BATCHES.items()}
    facts = {name: written(model, lengths) for name, lengths in BATCHES.items() if not name.startswith("more")}
    from fullgraph_compile.integrations.sglang.counting import as_json

    attention = model.runner.attn_backend
    tell(
        {
            "captured": captured, "served": served, "written": facts, "report": as_json(model.report),
            "left_behind": [n for n in vars(attention) if n.startswith("init_forward_metadata")],
        }
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
