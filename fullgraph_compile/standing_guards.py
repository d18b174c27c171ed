"""Dynamo's guards on a module, asked without walking through the module: only what has changed is looked at."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._C import _dynamo

from fullgraph_compile.watching import Watch

# Not described to type checkers in full.
dynamo: Any = _dynamo.guards

# Guards that read nothing but the value, or the dict, that they are on.
_OF_THE_VALUE = (
    dynamo.TYPE_MATCH, dynamo.ID_MATCH, dynamo.EQUALS_MATCH, dynamo.NONE_MATCH, dynamo.NOT_NONE, dynamo.TRUE_MATCH,
    dynamo.FALSE_MATCH, dynamo.DICT_LENGTH, dynamo.DICT_CONTAINS,
)  # fmt: skip
_DICTS = (dict, OrderedDict)
# In the place of a value: it is not known, or may change unseen.
_UNKNOWN = object()
# In the place of a key: a module's ``__dict__``, and its class.
_ATTRIBUTES = object()
_CLASS = object()


class StandingGuards:
    """The guards of one trace, split in two by what they read.

    Most of them walk through the module's tree of attribute dicts down to something that cannot change, such as a
    number or an empty dict of hooks.  As long as each dict on the way is as it was when all guards held, so do those:
    the dicts are watched instead.  All other guards stay, and are asked each time: on globals, classes, functions,
    lists, tensors, and objects that are no modules.

    Args:
        root: all guards of the trace, which hold now.
        module: what they call ``L['module']``.
        more: other dicts to watch.

    Attributes:
        watch: whether nothing that is watched has changed.
        rest: the guards that are left to ask.
        asked: how many places of the module and its surroundings are still looked at by each asking.

    Raises:
        ValueError: the guards are of a form that cannot be split.
    """

    def __init__(self, root: Any, module: nn.Module, more: list[dict[str, Any]]) -> None:
        # How each watched dict and module is found: from which found before, by which key; and its type.
        self._ways: list[tuple[int, Any, type]] = []
        self._found: list[Any] = []
        self._of_classes: set[Any] = set()
        self._kept: set[str] = {root.get_source()}
        for child in root.get_child_managers():
            self._keep(child, module if child.get_source() == "L['module']" else _UNKNOWN, -1, None)
        self._of_classes.clear()
        kept = self._kept
        self.rest = root.clone_manager(lambda node: node.get_source() in kept)
        if self.rest is None:
            raise ValueError("the guards cannot be cloned")
        self.asked = len(kept)
        self._watch(more)

    def again(self, module: nn.Module, more: list[dict[str, Any]]) -> None:
        """Watch from now on what the module holds now, for which all guards must then be asked.

        Raises:
            ValueError: the module is not of the form that was traced.
        """
        found: list[Any] = []
        for parent, key, kind in self._ways:
            if parent < 0:
                value: Any = module
            else:
                value = vars(found[parent]) if key is _ATTRIBUTES else found[parent].get(key)
            if type(value) is not kind:
                raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} was")
            found.append(value)
        self._found = found
        self._watch(more)

    def _watch(self, more: list[dict[str, Any]]) -> None:
        modules = [v for v in self._found if isinstance(v, nn.Module)]
        self.watch = Watch([*more, *(v for v in self._found if isinstance(v, dict))], modules)

    # -- splitting -----------------------------------------------------------------------------------------------

    def _keep(self, node: Any, value: Any, parent: int, key: Any) -> bool:
        """Note what must still be asked at or below a node, and what is watched in the place of the rest.

        Args:
            value: what the node is about, if watched dicts are all that leads to it.
            parent: where in ``_found`` the dict or the module is that it was read from.
            key: by which key.

        Returns:
            Whether anything must be asked.
        """
        if type(value) is not node.get_type_of_guarded_value():
            value = _UNKNOWN
        at = len(self._found)
        if type(value) in _DICTS or isinstance(value, nn.Module):
            self._ways.append((parent, key, type(value)))
            self._found.append(value)
        elif isinstance(value, Tensor) or not node.is_guarded_value_immutable():
            value = _UNKNOWN
        kept = value is _UNKNOWN or not all(isinstance(guard, _OF_THE_VALUE) for guard in node.get_leaf_guards())
        for below, way, child in _below(node, value):
            if way is _CLASS:
                # What is asked of a class need not be asked again at each module of that class.
                question = type(value), _described(child, child.get_source())
                if question in self._of_classes:
                    continue
                self._of_classes.add(question)
            kept |= self._keep(child, below, at, way)
        if kept:
            self._kept.add(node.get_source())
        return kept


def _below(node: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a node leads to, if watched dicts are all that is read for it; by which key; and the node there."""
    if isinstance(node, dynamo.DictGuardManager):
        # By place.  A plain dict cannot change its order without changing its keys.
        items = list(value.items()) if type(value) is dict else []
        for place, (key, item) in node.get_key_value_managers().items():
            known = items[place] if place < len(items) else (_UNKNOWN, _UNKNOWN)
            if key is not None:
                yield known[0] if isinstance(known[0], str) else _UNKNOWN, None, key
            if item is not None:
                yield known[1], known[0], item
        return
    for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        if isinstance(accessor, dynamo.GetGenericDictGuardAccessor) and isinstance(value, nn.Module):
            yield vars(value), _ATTRIBUTES, child
        elif isinstance(accessor, dynamo.TypeGuardAccessor) and isinstance(value, nn.Module):
            yield _UNKNOWN, _CLASS, child
        elif isinstance(accessor, dynamo.DictGetItemGuardAccessor) and type(value) in _DICTS:
            key = _key_of(accessor)
            yield _UNKNOWN if key is _UNKNOWN else value.get(key, _UNKNOWN), key, child
        else:
            yield _UNKNOWN, None, child


def _key_of(accessor: Any) -> Any:
    try:
        return ast.literal_eval(accessor.repr().partition("(")[2].rpartition(")")[0])
    except (SyntaxError, ValueError):
        return _UNKNOWN


def _described(node: Any, base: str) -> Any:
    """What is asked at and below a node, in words that are the same wherever the node hangs."""
    asked = tuple(
        (type(guard).__name__, *(part.partition("  # ")[0].replace(base, "") for part in guard.verbose_code_parts()))
        for guard in node.get_leaf_guards()
    )
    below = [child for _, _, child in _below(node, _UNKNOWN)]
    return node.get_source().replace(base, ""), asked, tuple(_described(child, base) for child in below)
