"""Weights that are moved at each call, or spread: offloading and a ``device_map``, as accelerate makes them."""

from __future__ import annotations

from torch import nn


def moved_weights(module: nn.Module) -> str:
    """What moves or spreads a module's weights, in words; empty = they stay where they are, on one device."""
    for name, part in module.named_modules():
        # The hook of the body itself runs around the compiled forward.
        hook = getattr(part, "_hf_hook", None) if name else None
        if hook is not None:
            return f"accelerate's {type(hook).__name__} on {name}"
    devices = sorted({str(p.device) for p in module.parameters()})
    if "meta" in devices:
        return "weights on the meta device"
    return f"weights on {' and '.join(devices)}" if len(devices) > 1 else ""
