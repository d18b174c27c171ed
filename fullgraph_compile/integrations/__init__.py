"""Everything that knows another project lives here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from fullgraph_compile.integrations.plain import PlainModule

# Packages whose modules hold one transformers model, and leave its rows to it.
_WRAPPERS = ("peft.", "sentence_transformers.")


def integration_for(module: nn.Module, whole: nn.Module) -> PlainModule:
    """What knows the module best.

    Args:
        module: the body.
        whole: the model that it is the body of, or the module itself.
    """
    from fullgraph_compile.integrations.transformers import TransformersModule, is_transformers

    return TransformersModule(module, whole) if is_transformers(module) else PlainModule(module)


def body_of(module: nn.Module) -> nn.Module:
    """The part of a model that is traced: of a transformers model with a head its body, as the head's own code is
    written for padded batches and costs one launch; of a model of peft or sentence-transformers the same, of the one
    that it wraps; of any other module all of it, as it may do anything with the tokens before and after."""
    from fullgraph_compile.integrations.transformers import is_transformers

    if not is_transformers(module):
        inside = list(_models_in(module)) if type(module).__module__.startswith(_WRAPPERS) else []
        return body_of(inside[0]) if len(inside) == 1 else module
    body = module.base_model
    if not isinstance(body, nn.Module) or not is_transformers(body):
        return module
    while (inner := _wrapped(body)) is not None:
        body = inner
    return body


def _models_in(module: nn.Module) -> Iterator[nn.Module]:
    """The transformers models in a module, not those within them."""
    from fullgraph_compile.integrations.transformers import is_transformers

    for part in module.children():
        if is_transformers(part):
            yield part
        else:
            yield from _models_in(part)


def _wrapped(body: nn.Module) -> nn.Module | None:
    """The decoder that a body is nothing but a wrapper of; its model may pass by it and call the decoder itself.

    A wrapper that takes something besides does something with it, images for one, and may then call the decoder with
    embeddings and masks of its own.
    """
    from fullgraph_compile.integrations.transformers import is_transformers

    parts = [part for part in body.children() if is_transformers(part)]
    if len(parts) != 1 or {id(p) for p in parts[0].parameters()} != {id(p) for p in body.parameters()}:
        return None
    return parts[0] if _named(body) <= _named(parts[0]) else None


def _named(module: nn.Module) -> set[str]:
    """Parameters of a module's forward that have a name of their own."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in inspect.signature(module.forward).parameters.values() if p.kind not in several}
