"""Bodies to measure: the shapes of known models with random weights, or a model folder."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullgraph_compile.report import first_lines

# Shapes only: nothing is downloaded, weights are random.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": ("Qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    "qwen3-0.6b": ("Qwen3", {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    "llama-3.1-8b": ("Llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "smollm2-135m": ("Llama", {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    }),
}  # fmt: skip

SMALL = "smollm2-135m"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build(
    name: str, device: torch.device, dtype: torch.dtype, *, layers: int | None = None, **changes: Any
) -> nn.Module:
    """A body in eval mode, without gradients.

    Args:
        name: a preset, or a folder with a transformers model.
        device: where it is made.
        dtype: of its weights.
        layers: only the first so many of them.
        changes: other values of a preset's configuration.

    Raises:
        ValueError: neither a preset nor a folder, a folder that is asked for another configuration or whose model
            cannot be loaded, an encoder with a decoder, or a model that takes no token ids.
    """
    preset = PRESETS.get(name)
    folder = Path(name).expanduser()
    if preset is None:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{name!r} is no preset and no folder with a config.json; presets are {', '.join(PRESETS)}"
            )
        if layers is not None or changes:
            raise ValueError(f"{name!r} is a model of its own; only a preset can be made with other sizes")
        return _load(folder, device, dtype)
    import transformers

    family, sizes = preset
    given = {**sizes, **({} if layers is None else {"num_hidden_layers": layers}), **changes}
    config = getattr(transformers, f"{family}Config")(**given)
    with torch.device(device), _default_dtype(dtype):
        body = getattr(transformers, f"{family}Model")(config)
    return body.eval().requires_grad_(False)


def _load(folder: Path, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.is_encoder_decoder:
            raise _NoBody("it is a model of an encoder and a decoder, which has no prefill of one body")
        if not isinstance(getattr(config.get_text_config(), "vocab_size", None), int):
            raise _NoBody("it takes no token ids: its config has no vocab_size")
        body = transformers.AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
        if "input_ids" not in inspect.signature(body.forward).parameters:
            raise _NoBody("it takes no token ids: its forward has no input_ids")
        return body.to(device).eval().requires_grad_(False)
    except Exception as error:
        # What transformers and the readers of weights raise has no common kind.
        why = str(error) if isinstance(error, _NoBody) else first_lines(error, 3)
        raise ValueError(f"model folder {str(folder)!r}: {why}") from error


class _NoBody(ValueError):
    """A model that loads, but cannot be measured."""


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def vocabulary(body: nn.Module) -> int:
    """Token ids that the body takes."""
    return int(body.config.get_text_config().vocab_size)  # type: ignore[union-attr,operator]


def positions(body: nn.Module) -> int | None:
    """Tokens that the body's config has positions for; None where it names no limit."""
    most = getattr(body.config.get_text_config(), "max_position_embeddings", None)  # type: ignore[union-attr,operator]
    return most if isinstance(most, int) and most > 0 else None


def projections(body: nn.Module) -> int:
    """Numbers in the weights that a call must read at the least, and multiply each token with.

    These are the matrices named ``weight`` other than embeddings (linears, GPT-2's ``Conv1D``, routers), and the 3-D
    parameters of any name.  Of experts stacked in one parameter ``[num_experts, ...]`` only those of one token are
    counted, ``num_experts_per_tok`` of the config or else one: more are read where tokens choose others, but no token
    is multiplied with more.
    """
    active = getattr(body.config.get_text_config(), "num_experts_per_tok", None)  # type: ignore[union-attr,operator]
    found = 0
    for module in body.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and getattr(module, "num_experts", None) == len(weight):
                found += weight[0].numel() * min(len(weight), active if isinstance(active, int) else 1)
            elif weight.ndim == 3 or (name == "weight" and weight.ndim == 2 and not isinstance(module, nn.Embedding)):
                found += weight.numel()
    return found
