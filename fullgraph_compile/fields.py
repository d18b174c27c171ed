"""What functions, classes and cells point to, and where in memory: a pointer is read faster than an attribute."""

from __future__ import annotations

import gc
import sys
import sysconfig
from typing import Any, NamedTuple

from fullgraph_compile.words import places, word

READABLE = (
    sys.implementation.name == "cpython"
    and sys.maxsize > 2**32
    # A debug build lays objects out differently, and so does one without the global lock.
    and not hasattr(sys, "gettotalrefcount")
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
"""Whether the memory of an object is known to be laid out as it is looked for here."""


class Field(NamedTuple):
    """What objects of one type point to.

    Attributes:
        name: of the attribute.
        at: where the pointer is, in bytes from the address of the object; -1 = it was not found.
    """

    name: str
    at: int

    @classmethod
    def find(cls, name: str, *samples: Any) -> Field:
        """Looks for it in some objects, which point to different ones."""
        if not READABLE:
            return cls(name, -1)
        found = [places(id(s), type(s).__basicsize__, id(getattr(s, name))) for s in samples]
        return cls(name, min(set.intersection(*found), default=-1))

    def held(self, owner: Any) -> tuple[Any, ...]:
        """What an object points to; empty where it points to nothing."""
        try:
            value = getattr(owner, self.name)
        except ValueError:  # an empty cell
            return ()
        return () if value is None and self.name == "__defaults__" else (value,)

    def place(self, owner: Any) -> int:
        """The address of the pointer of an object.

        Raises:
            ValueError: this one keeps it elsewhere.
        """
        held = self.held(owner)
        if self.at < 0 or word(id(owner) + self.at) != (id(held[0]) if held else 0):
            raise ValueError(f"a {type(owner).__name__} does not keep its {self.name} where others do")
        return id(owner) + self.at


def _functions() -> tuple[Any, Any]:
    def one(x: object = object()) -> Any:
        return lambda: x

    def other(x: object = object()) -> Any:
        return lambda: (x, x)

    return one, other


_ONE, _OTHER = _functions()
CODE = Field.find("__code__", _ONE, _OTHER)
DEFAULTS = Field.find("__defaults__", _ONE, _OTHER)
BASES = Field.find("__mro__", type("_One", (), {}), type("_Other", (), {}))
CONTENTS = Field.find("cell_contents", _ONE().__closure__[0], _OTHER().__closure__[0])

_EMPTY = object()


def contents_of(cell: Any) -> Any:
    """What a cell holds, or a value that is nothing else."""
    return next(iter(CONTENTS.held(cell)), _EMPTY)


def attributes_of(cls: type) -> dict[str, Any]:
    """The dict that ``cls.__dict__`` is a view of."""
    (attributes,) = gc.get_referents(cls.__dict__)
    if type(attributes) is not dict:
        raise ValueError(f"{cls.__name__} keeps its attributes in a {type(attributes).__name__}")
    return attributes
