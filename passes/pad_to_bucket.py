"""Which inputs and outputs of the body are token-sized: what is padded to a bucket, and what is cut to real rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from fullgraph_compile.passes.common import (
    Refusal,
    mentions,
    output_node,
    placeholders,
    refusal,
    token_dims,
    value_of,
)


@dataclass(frozen=True)
class Padding:
    """Token dims by position.

    Attributes:
        inputs: placeholder index -> its token dim.
        outputs: for each output of the body, its token dim, or None where the whole leaf is returned.
        refusals: inputs and outputs whose size holds the token count in another way.
    """

    inputs: dict[int, int]
    outputs: tuple[int | None, ...]
    refusals: tuple[Refusal, ...]


def pad_to_bucket(body: GraphModule, token: Any) -> Padding:
    """Read the token dims of a body's inputs and outputs; its pieces are symbolic, so no size is rewritten."""
    inputs: dict[int, int] = {}
    refusals: list[Refusal] = []
    for i, node in enumerate(placeholders(body)):
        value = value_of(node)
        dims = token_dims(value, token)
        if len(dims) == 1:
            inputs[i] = dims[0]
        elif mentions(value, token):
            refusals.append(refusal(node, f"its shape {tuple(value.shape)} is not one token dim beside fixed dims"))
    outputs: list[int | None] = []
    for leaf in output_node(body).args[0]:  # type: ignore[union-attr]
        result: Any = value_of(leaf) if isinstance(leaf, torch.fx.Node) else leaf
        dims = token_dims(result, token)
        outputs.append(dims[0] if len(dims) == 1 else None)
        if len(dims) != 1 and mentions(result, token) and isinstance(leaf, torch.fx.Node):
            refusals.append(refusal(leaf, f"its shape {tuple(result.shape)} is not one token dim beside fixed dims"))
    return Padding(inputs, tuple(outputs), tuple(refusals))
