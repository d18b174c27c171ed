"""Small calls of our own that a model cannot make: what is said of them."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from fullgraph_compile.dispatch import Reason
from fullgraph_compile.integrations.plain import NotServed


@contextmanager
def refusing(reason: Reason, what: str = "a small call to learn from") -> Iterator[None]:
    """Where what is asked within it raises, the user's call runs as it is.

    Args:
        reason: why no graph replays it then.
        what: what was asked, in words that "failed" can follow.
    """
    try:
        yield
    except NotServed:
        raise
    except Exception as error:
        raise NotServed(reason, f"{what} failed: {raised_in(error)}") from error


def raised_in(error: BaseException) -> str:
    """An exception in one line, with the model's module that raised it and the source line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    place, frame = "", error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        by_torch = frame.tb_frame.f_globals.get("__name__", "").startswith("torch.")
        if isinstance(module, nn.Module) and not by_torch:
            file = frame.tb_frame.f_code.co_filename
            line = linecache.getline(file, frame.tb_lineno).strip()
            place = f" in {type(module).__name__} at {Path(file).name}:{frame.tb_lineno}: {line}"
        frame = frame.tb_next
    return f"{type(error).__name__}: {first}{place}"
