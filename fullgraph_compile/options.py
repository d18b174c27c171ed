"""What a user can choose, checked before anything is traced."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fullgraph_compile.attention import attention_names
from fullgraph_compile.ladder import MEASURED, MOST_TOKENS, check_buckets, check_lengths, default_ladder
from fullgraph_compile.ladder_costs import candidate_sizes

COMPILERS = ("inductor", "aot_eager", "eager")
GRAPHS = ("auto", "cuda", "tape", "none")
UNSAFE = ("compiled", "error")


class BadOption(ValueError):
    """A choice that cannot be had on this machine or for this module; never turned into a fallback."""


@dataclass(frozen=True)
class Options:
    """The keys of ``options=`` of ``torch.compile(..., backend="full_prefill")`` and of ``fgc.compile``.

    Attributes:
        max_tokens: largest token bucket, at most 1,048,576; None = the largest of ``buckets`` where those are a list,
            else 2,048.
        buckets: token buckets: a list of which those above ``max_tokens`` are left out and ``max_tokens`` is one more;
            None = the default ladder up to ``max_tokens``; "measured" = sizes are timed before
            the first capture, and the fewest are kept that cost the calls to expect next to nothing.  Where a call is
            faster without a graph it then takes the compiled route.
        lengths: token counts of the calls to expect, for ``buckets="measured"``: a list of counts, or a mapping of
            counts to how often each comes; None = short calls as often as long ones, on a log scale.
        memory_budget: device memory that graphs may take beside weights and KV cache, in bytes or as "300MiB"; what
            they will take is forecast before capture, and the largest buckets that do not fit are left out.
        request_slots: requests that one graph can hold; None = max(16, max_tokens // 64), never above max_tokens.
        context_length: longest request in tokens, cached and new together; None = ``max_tokens``.
        attention: "auto" or the name of a registered attention backend.
        compiler: what turns the pieces between attention calls into kernels: "inductor", "aot_eager" or "eager".
        graphs: "auto" (CUDA graphs on a GPU, none on a CPU), "cuda", "tape" (the CPU double) or "none".
        max_padding: a batch of n tokens never replays a bucket above ``max_padding * n``; buckets up to 64 tokens
            are exempt, as their cost is flat.
        unsafe: what becomes of a body whose padding is not proven safe: "compiled" runs it at exact sizes,
            "error" raises.
        strict: raise ``FallbackError`` wherever a call would not replay a graph; that of ``fgc.warmup`` is none.
        clone_outputs: True gives outputs that the caller owns; False gives views of one buffer that the next call
            overwrites.
        fuse_projections: let linears that read the same input (query, key and value; gate and up) run as one. Only
            ``fgc.compile`` does so, and only with plain parameters that share no memory; each stays a parameter, in a
            storage that it shares with its siblings, until ``fgc.close``. Plain ``torch.compile`` ignores it.
        progress: show a progress bar while compiling and capturing; None = when stderr is a terminal.

    Raises:
        ValueError: a value is not valid; the message says which are.
        TypeError: a value is of the wrong type.
    """

    max_tokens: int = None  # type: ignore[assignment]  # an integer once made
    buckets: tuple[int, ...] | str | None = None
    request_slots: int | None = None
    context_length: int | None = None
    attention: str = "auto"
    compiler: str = "inductor"
    graphs: str = "auto"
    max_padding: float = 2.0
    lengths: tuple[tuple[int, float], ...] | None = None
    memory_budget: int | None = None
    unsafe: str = "compiled"
    strict: bool = False
    clone_outputs: bool = True
    fuse_projections: bool = True
    progress: bool | None = None

    def __post_init__(self) -> None:
        # Not compared with "measured" before: an array is, element by element.
        if self.buckets is not None and not self.measured:
            object.__setattr__(self, "buckets", check_buckets(self.buckets))
        listed = self.buckets if isinstance(self.buckets, tuple) else ()
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", listed[-1] if listed else 2048)
        _positive_int("max_tokens", self.max_tokens, MOST_TOKENS)
        if listed and self.max_tokens < listed[0]:
            raise ValueError(
                f"max_tokens={self.max_tokens} is below the smallest bucket, {listed[0]}; "
                f"give max_tokens >= {listed[0]} or a smaller bucket"
            )
        if self.lengths is not None:
            object.__setattr__(self, "lengths", check_lengths(self.lengths))
            if not self.measured:
                raise ValueError(f"lengths= chooses among measured buckets; give buckets={MEASURED!r} with it")
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_bytes("memory_budget", self.memory_budget))
        for name in ("request_slots", "context_length"):
            if getattr(self, name) is not None:
                _positive_int(name, getattr(self, name), _MOST_LENGTH)
        if self.request_slots is not None and self.request_slots > self.max_tokens:
            raise ValueError(
                f"request_slots={self.request_slots} is above max_tokens={self.max_tokens}; a request has at least "
                f"one token, so at most {self.max_tokens} slots can be filled"
            )
        _one_of("compiler", self.compiler, COMPILERS)
        _one_of("graphs", self.graphs, GRAPHS)
        _one_of("unsafe", self.unsafe, UNSAFE)
        if not isinstance(self.attention, str):
            raise TypeError(f"attention={self.attention!r} must be 'auto' or the name of an attention backend")
        _one_of("attention", self.attention, attention_names())
        if isinstance(self.max_padding, bool) or not isinstance(self.max_padding, (int, float)):
            raise TypeError(f"max_padding={self.max_padding!r} must be a number >= 1")
        if not self.max_padding >= 1:
            raise ValueError(f"max_padding={self.max_padding!r} must be >= 1 (1 = no padding, inf = no limit)")
        for name in ("strict", "clone_outputs", "fuse_projections"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.progress is not None and not isinstance(self.progress, bool):
            raise TypeError(f"progress={self.progress!r} must be True, False or None")
        if self.graphs == "tape" and self.compiler == "inductor":
            raise ValueError(
                "graphs='tape' cannot see inside Inductor's kernels; with it, compiler must be 'aot_eager' or 'eager'"
            )

    @property
    def ladder(self) -> tuple[int, ...]:
        """The token buckets, ascending, none above ``max_tokens``, and ``max_tokens`` among them; those to choose from
        where they are measured."""
        if self.buckets is None:
            return default_ladder(self.max_tokens)
        if isinstance(self.buckets, str):
            return candidate_sizes(self.max_tokens, self.lengths or ())
        kept = tuple(b for b in self.buckets if b <= self.max_tokens)
        return kept if kept[-1] == self.max_tokens else (*kept, self.max_tokens)

    @property
    def measured(self) -> bool:
        """Whether the ladder is chosen by timings."""
        return isinstance(self.buckets, str) and self.buckets == MEASURED

    @property
    def slots(self) -> int:
        """Request slots of the largest bucket."""
        return self.request_slots or min(max(16, self.max_tokens // 64), self.max_tokens)

    @property
    def show_progress(self) -> bool:
        return sys.stderr.isatty() if self.progress is None else self.progress

    def check_device(self, device: torch.device) -> None:
        """Raise ``BadOption`` where a choice cannot be had on the device of the body."""
        if self.graphs == "cuda" and device.type != "cuda":
            raise BadOption(
                f"graphs='cuda' needs a CUDA device, the body is on {device}; valid here: 'auto', 'tape', 'none'"
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from a mapping of names to values; an unknown name is an error that lists the valid ones."""
        options = dict(options or {})
        valid = [f.name for f in fields(cls)]
        for name in options:
            if name not in valid:
                near = difflib.get_close_matches(str(name), valid, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(f"unknown option {name!r}{hint} Valid options: {', '.join(valid)}")
        return cls(**options)


def disabled() -> bool:
    """Whether ``FULLGRAPH_COMPILE_DISABLE`` turns the package into a plain call."""
    # Asked at each call: where it is known how ``os.environ`` keeps it, its own four steps in Python are not taken.
    kept = getattr(os.environ, "_data", None) if os.name == "posix" else None
    if kept is not None and b"FULLGRAPH_COMPILE_DISABLE" not in kept:
        return False
    return os.environ.get("FULLGRAPH_COMPILE_DISABLE", "") not in ("", "0")


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_MOST_BYTES = 2**63 - 1
# Lengths and offsets of requests are int32 on the device.
_MOST_LENGTH = 2**31 - 1


def parse_bytes(name: str, value: Any) -> int:
    """A number of bytes, from an integer or from a number with a unit.

    Raises:
        TypeError, ValueError: it is neither; the message says what is valid.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", value)
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ValueError(
                f"{name}={value!r} is no number of bytes; valid are 300000000, '300MB', '300MiB', '1.5GiB'"
            )
        number = float(found[1]) * unit
        if number > _MOST_BYTES:
            raise ValueError(f"{name}={value!r} is more than {_MOST_BYTES} bytes, which is the most")
        value = int(number)
    _positive_int(name, value, _MOST_BYTES)
    return int(value)


def _positive_int(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a positive integer")
    if not 1 <= value <= most:
        raise ValueError(f"{name}={value} must be a positive integer, at most {most}")


def _one_of(name: str, value: Any, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, valid))}")
