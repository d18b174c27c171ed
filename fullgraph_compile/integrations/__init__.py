"""Everything that knows another project lives here."""

from __future__ import annotations

from torch import nn

from fullgraph_compile.integrations.plain import PlainModule


def integration_for(module: nn.Module) -> PlainModule:
    """What knows the module best."""
    from fullgraph_compile.integrations.transformers import TransformersModule, is_transformers

    return TransformersModule(module) if is_transformers(module) else PlainModule(module)
