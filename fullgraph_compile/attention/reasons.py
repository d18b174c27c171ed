"""Why a backend cannot serve a site, in the words that all backends of FlashAttention's kind share."""

from __future__ import annotations

import torch

from fullgraph_compile.ops import AttentionSite


def no_cuda(device: torch.device, rocm: str = "it was never tried on ROCm") -> list[str]:
    """Why a kernel for CUDA cannot run on a device at all; ``rocm``: what is said of AMD's builds of torch."""
    if device.type != "cuda":
        return [f"the device is {device.type}; it runs on CUDA only"]
    if torch.version.hip is not None:
        return [rocm]
    return [] if torch.cuda.is_available() else ["there is no CUDA device"]


def too_old(device: torch.device, *least: int) -> list[str]:
    """Whether the compute capability of a CUDA device is below ``least``, (major, minor)."""
    found = torch.cuda.get_device_capability(device)
    return [] if found >= least else ["compute capability {}.{} is below {}.{}".format(*found, *least)]


def features(site: AttentionSite, **missing: bool) -> list[str]:
    """Features of the site that are named as missing."""
    words = {
        "softcap": (site.softcap, f"it has no soft cap, the site has one of {site.softcap:g}"),
        "sinks": (site.sinks, "it has no attention sinks, the site has them"),
        "slopes": (site.slopes, "it has no ALiBi slopes, the site has them"),
        "window": (site.left >= 0 or site.right > 0, f"it has no window, the site has a {site.mask}"),
    }
    return [words[name][1] for name, off in missing.items() if off and words[name][0]]


def sizes(site: AttentionSite, most: int) -> list[str]:
    reasons = []
    for size in sorted({site.head_size, site.value_head_size}):
        if size > most:
            reasons.append(f"head size {size} is above {most}")
        if size % 8:
            reasons.append(f"head size {size} is no multiple of 8")
    if site.heads % site.kv_heads:
        reasons.append(f"{site.heads} query heads are no multiple of {site.kv_heads} key heads")
    return reasons


def equal_sizes(site: AttentionSite) -> list[str]:
    if site.head_size == site.value_head_size:
        return []
    return [f"key head size {site.head_size} and value head size {site.value_head_size} differ; it needs equal ones"]


def no_dtype(site: AttentionSite, *known: torch.dtype) -> list[str]:
    names = " and ".join(str(d).removeprefix("torch.") for d in known)
    return [] if site.dtype in known else [f"dtype is {site.dtype}; it computes in {names} only"]
