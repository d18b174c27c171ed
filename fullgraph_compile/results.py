"""The result of a call, made again from what a graph returned and what the call was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Result:
    """How it is made.

    Attributes:
        template: for each leaf, where it is from: "output" with an index, "input" with a name, or "constant" with the
            value.
        build: from the leaves to the result.
    """

    template: tuple[tuple[str, Any], ...]
    build: Callable[[list[Any]], Any]

    @classmethod
    def learn(cls, result: Any, outputs: Sequence[Any], names: dict[int, str]) -> Result | None:
        """From the result of one call; None where a leaf is none of these.

        Args:
            outputs: what the graph returned.
            names: of the tensors that were given, by ``id``.
        """
        leaves, spec = pytree.tree_flatten(result)
        at = {id(t): i for i, t in enumerate(outputs) if isinstance(t, Tensor)}
        template: list[tuple[str, Any]] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in at:
                template.append(("output", at[id(leaf)]))
            elif isinstance(leaf, Tensor) and id(leaf) in names:
                template.append(("input", names[id(leaf)]))
            elif leaf is None or isinstance(leaf, (bool, str)):
                template.append(("constant", leaf))
            else:
                return None

        def unflatten(values: list[Any]) -> Any:
            return pytree.tree_unflatten(values, spec)

        return cls(tuple(template), _copier(result, leaves, unflatten) or unflatten)

    def __call__(self, outputs: Sequence[Any], call: dict[str, Any]) -> Any:
        return self.build(
            [outputs[x] if kind == "output" else call[x] if kind == "input" else x for kind, x in self.template]
        )


def _copier(result: Any, leaves: list[Any], unflatten: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any] | None:
    """Makes dicts of a class of their own, whose entries are attributes too (``ModelOutput``), past their class's
    checks, which take longer than all else that is done for a result; None for results of another kind."""
    kind: Any = type(result)
    if not isinstance(result, OrderedDict) or not hasattr(result, "__dict__") or hasattr(result, "__slots__"):
        return None
    keys = list(result)
    if len(keys) != len(leaves) or any(v is not leaf for v, leaf in zip(result.values(), leaves, strict=True)):
        return None
    rest = {name: value for name, value in vars(result).items() if name not in result}
    attributes = {name: rest.get(name) for name in vars(result)}

    def copy(values: list[Any]) -> Any:
        made = kind.__new__(kind)
        own = vars(made)
        own.update(attributes)
        for key, value in zip(keys, values, strict=True):
            OrderedDict.__setitem__(made, key, value)
            own[key] = value
        return made

    made, as_its_class_does = copy(leaves), unflatten(leaves)
    alike = all(v is None or isinstance(v, (bool, str)) for v in rest.values()) and _same(made, as_its_class_does)
    return copy if alike else None


class Outputs:
    """Makes results of a class as the class does; with the same fields as before, past its checks."""

    def __init__(self) -> None:
        # By the class and the fields that it was given: the order that it has them in, and what copies it.
        self._known: dict[Any, tuple[list[str], Callable[[list[Any]], Any] | None]] = {}

    def __call__(self, kind: type[Any], fields: dict[str, Any]) -> Any:
        given = kind, *(name for name, value in fields.items() if value is not None)
        names, copy = self._known.get(given, ([], None))
        if copy is not None:
            return copy([fields[name] for name in names])
        made = kind(**fields)
        if given not in self._known:
            names = list(made)
            self._known[given] = (
                names,
                _copier(made, list(made.values()), lambda values: kind(**dict(zip(names, values, strict=True)))),
            )
        return made


def _same(a: Any, b: Any) -> bool:
    """Whether two of them hold the same objects under the same names, in the same order."""

    def held(x: Any) -> list[Any]:
        return [type(x), *((k, id(v)) for k, v in x.items()), *((k, id(v)) for k, v in vars(x).items())]

    return held(a) == held(b)
