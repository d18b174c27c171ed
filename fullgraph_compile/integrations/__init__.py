"""Everything that knows another project lives here."""

from __future__ import annotations

from torch import nn

from fullgraph_compile.integrations.plain import PlainModule


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
    written for padded batches and costs one launch; of any other module all of it."""
    from fullgraph_compile.integrations.transformers import is_transformers

    if not is_transformers(module):
        return module
    body = module.base_model
    if not isinstance(body, nn.Module) or not is_transformers(body):
        return module
    # A body that is nothing but a wrapper of a decoder may be passed by: its model calls the decoder itself.
    while len(parts := list(body.children())) == 1 and is_transformers(parts[0]):
        body = parts[0]
    return body
