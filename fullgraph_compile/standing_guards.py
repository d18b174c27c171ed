"""Dynamo's guards on a module, asked without walking through the module: only what has changed is looked at."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _dynamo

from fullgraph_compile.guarded_values import (
    ATTRIBUTES,
    BASES,
    CLASS,
    CLOSURE,
    CODE,
    DEFAULTS,
    DICTS,
    NAME,
    NAMED,
    UNKNOWN,
    all_known,
    dict_of,
    plain,
    read,
    steady,
)  # fmt: skip
from fullgraph_compile.watching import Watch

# Not described to type checkers in full.
dynamo: Any = _dynamo.guards

# Guards on which object it is: one object, or the same as elsewhere.
_OF_IDENTITY = (dynamo.ID_MATCH, dynamo.OBJECT_ALIASING)
# Guards on what it is an instance of, besides.
_OF_THE_CLASS = (*_OF_IDENTITY, dynamo.TYPE_MATCH, dynamo.NOT_NONE)
# The flag of such classes, by which objects may be given another one.
_WRITTEN_IN_PYTHON = 1 << 9
# Guards that read nothing but the value, or the dict, that they are on.
_OF_THE_VALUE = (
    *_OF_IDENTITY, dynamo.TYPE_MATCH, dynamo.EQUALS_MATCH, dynamo.NONE_MATCH, dynamo.NOT_NONE, dynamo.TRUE_MATCH,
    dynamo.FALSE_MATCH, dynamo.DICT_LENGTH, dynamo.DICT_CONTAINS, dynamo.LENGTH_CHECK, dynamo.SET_CONTAINS,
)  # fmt: skip
# What may be on the way to something that is guarded.
_WATCHED = (*DICTS, list, tuple, property, types.FunctionType, types.CellType)
_GETATTR = (dynamo.GetAttrGuardAccessor, dynamo.GenericGetAttrGuardAccessor)
_GETITEM = (
    dynamo.DictGetItemGuardAccessor, dynamo.ListGetItemGuardAccessor, dynamo.TupleGetItemGuardAccessor,
    dynamo.GetItemGuardAccessor,
)  # fmt: skip
_WAYS = {
    dynamo.GetGenericDictGuardAccessor: ATTRIBUTES,
    dynamo.TypeDictGuardAccessor: ATTRIBUTES,
    dynamo.TypeGuardAccessor: CLASS,
    dynamo.TypeMROGuardAccessor: BASES,
    dynamo.CodeGuardAccessor: CODE,
    dynamo.ClosureGuardAccessor: CLOSURE,
    dynamo.FuncDefaultsGuardAccessor: DEFAULTS,
}


class StandingGuards:
    """The guards of one trace, split in two by what they read.

    Most of them walk through the module's tree of attribute dicts down to something that cannot change, such as a
    number or an empty dict of hooks.  As long as each dict on the way is as it was when all guards held, so do those:
    the dicts are watched instead, and so are lists and configs in them, classes, functions, and the globals of torch
    and transformers.  All other guards stay, and are asked each time: on other globals, on tensors, on the state of
    torch, and on objects with attributes of another making.

    Args:
        root: all guards of the trace, which hold now.
        module: what they call ``L['module']``.
        own_globals: what they call ``G``.
        more: other dicts to watch.
        classes, functions: others to watch.
        switching: within it, the module is as it was traced.
        switched: dicts in which it puts something else for its time, and which are as they were whenever this is asked:
            they are compared.

    Attributes:
        watch: whether nothing that is watched has changed.
        rest: the guards that are left to ask.
        asked: how many places of the module and its surroundings are still looked at by each asking.

    Raises:
        ValueError: the guards are of a form that cannot be split.
    """

    def __init__(
        self,
        root: Any,
        module: nn.Module,
        own_globals: dict[str, Any],
        more: list[dict[str, Any]],
        classes: Sequence[type] = (),
        functions: Sequence[types.FunctionType] = (),
        switching: Callable[[], AbstractContextManager[None]] = nullcontext,
        switched: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._classes, self._functions = list(classes), list(functions)
        self._switched = list(switched)
        self._globals = own_globals
        # How each watched dict and module is found: from which found before, by which key; and its type.
        self._ways: list[tuple[int, Any, type]] = []
        self._found: list[Any] = []
        # Where in that the functions and classes are whose names are guarded.
        self._named: set[int] = set()
        self._of_classes: set[Any] = set()
        self._kept: set[str] = {root.get_source()}
        # From the root to the node that is looked at; and of each guard that two nodes are one object, where those are
        # that it is known of, and whether one is that it is not known of.
        self._path: list[str] = []
        self._aliases: dict[Any, tuple[list[list[str]], bool]] = {}
        with switching():
            for child in root.get_child_managers():
                # The arguments are those of the traced call, each time.
                if child.get_source() != "L['kwargs']":
                    self._keep(child, self._root(module, child.get_source()), -1, child.get_source())
        self._of_classes.clear()
        for known_at, asked in self._aliases.values():
            # It says nothing when it is asked at one of the two alone.
            if asked or len(known_at) != 2:
                self._kept.update(*known_at)
        self._aliases.clear()
        kept = self._kept
        self.rest = root.clone_manager(lambda node: node.get_source() in kept)
        if self.rest is None:
            raise ValueError("the guards cannot be cloned")
        self.asked = len(kept)
        self._watch(more)

    def _root(self, module: nn.Module, name: str) -> Any:
        return module if name == "L['module']" else self._globals if name == "G" else UNKNOWN

    def again(self, module: nn.Module, more: list[dict[str, Any]]) -> None:
        """Watch from now on what the module holds now, for which all guards must then be asked.

        Raises:
            ValueError: the module is not of the form that was traced.
        """
        found: list[Any] = []
        for parent, key, kind in self._ways:
            value = self._root(module, key) if parent < 0 else read(found[parent], key)
            if type(value) is not kind:
                raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} was")
            found.append(value)
        self._found = found
        self._watch(more)

    def _watch(self, more: list[dict[str, Any]]) -> None:
        found = {id(v): v for v in self._found}.values()
        objects = [v for v in found if plain(v)]
        # Of an object that is no module, more is set than the guards read, so it is compared.
        compared: list[Any] = [*self._switched, *(vars(v) for v in objects if not isinstance(v, nn.Module))]
        compared += [v for v in found if type(v) is list]
        looked_through = set(map(id, compared))
        classes = [*self._classes, *(cls for v in found if isinstance(v, type) for cls in v.__mro__)]
        classes += [cls for v in objects if all_known(v) for cls in type(v).__mro__]
        self.watch = Watch(
            [*more, *(d for v in found if (d := dict_of(v)) is not None and id(d) not in looked_through)],
            objects,
            compared,
            [*self._functions, *(v for v in found if isinstance(v, types.FunctionType))],
            list(dict.fromkeys(classes)),
            [v for v in found if type(v) is types.CellType],
            [self._found[at] for at in sorted(self._named)],
        )

    # -- splitting -----------------------------------------------------------------------------------------------

    def _keep(self, node: Any, value: Any, parent: int, key: Any) -> bool:
        """Note what must still be asked at or below a node, and what is watched in the place of the rest.

        Args:
            value: what the node is about, if watched dicts are all that leads to it.
            parent: where in ``_found`` the dict or the module is that it was read from; -1 = it is where guards begin.
            key: by which key; or the name of where they begin.

        Returns:
            Whether anything must be asked.
        """
        kind = node.get_type_of_guarded_value()
        # On Python 3.13 Dynamo looks at the attributes of an object without a dict of them.
        if type(value) is not kind and not (key is ATTRIBUTES and kind is type(None)):
            value = UNKNOWN
        at = len(self._found)
        guards, leads_on = node.get_leaf_guards(), bool(node.get_child_managers())
        of_identity = bool(guards) and all(isinstance(guard, _OF_IDENTITY) for guard in guards)
        if type(value) is types.CodeType or (
            of_identity and not leads_on and not isinstance(node, dynamo.DictGuardManager)
        ):
            pass  # Whatever it is, it is the same object as long as what led to it is as it was.
        elif type(value) in _WATCHED or plain(value) or (leads_on and (isinstance(value, type) or steady(value))):
            self._ways.append((parent, key, type(value)))
            self._found.append(value)
        elif leads_on or isinstance(value, Tensor) or not _stays(node, value):
            value = UNKNOWN
        known = (*_OF_THE_VALUE, dynamo.NO_HASATTR) if all_known(value) else _OF_THE_VALUE
        kept = value is UNKNOWN or not all(isinstance(guard, known) for guard in guards)
        self._path.append(node.get_source())
        for guard in guards:
            if isinstance(guard, dynamo.OBJECT_ALIASING):
                self._note_alias(tuple(guard.verbose_code_parts()), known=value is not UNKNOWN)
        # Nothing of a code object changes, but some is made anew at each read.
        for below, way, child in () if type(value) is types.CodeType else _below(node, value):
            if way is CLASS and isinstance(value, nn.Module):
                # What is asked of a class need not be asked again at each module of that class.
                question = type(value), _described(child, child.get_source())
                if question in self._of_classes:
                    continue
                self._of_classes.add(question)
            if way == NAME and isinstance(value, NAMED):
                self._named.add(at)
            kept |= self._keep(child, below, at, way)
        if kept:
            self._kept.add(node.get_source())
        self._path.pop()
        return kept

    def _note_alias(self, what: tuple[str, ...], *, known: bool) -> None:
        """Two objects that are known stay the one object that they are; of others, both are asked."""
        known_at, asked = self._aliases.get(what, ([], False))
        if known:
            known_at.append(list(self._path))
        self._aliases[what] = known_at, asked or not known


def _below(node: Any, value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a node leads to, if watched dicts are all that is read for it; by which key; and the node there."""
    if isinstance(node, dynamo.DictGuardManager):
        # By place.  A plain dict cannot change its order without changing its keys.
        items = list(value.items()) if type(value) is dict else []
        for place, (key, item) in node.get_key_value_managers().items():
            known = items[place] if place < len(items) else (UNKNOWN, UNKNOWN)
            if key is not None:
                yield known[0] if isinstance(known[0], str) else UNKNOWN, None, key
            if item is not None:
                yield known[1], known[0], item
        return
    for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        key = _key(accessor, value)
        below = UNKNOWN if value is UNKNOWN else read(value, key)
        by_name = isinstance(accessor, _GETATTR) and isinstance(key, str)
        if below is not UNKNOWN and by_name and getattr(value, key, UNKNOWN) is not below:
            below = UNKNOWN
        yield below, key, child


def _key(accessor: Any, value: Any) -> Any:
    """By which key ``_read`` gives what an accessor leads to."""
    for kind, key in _WAYS.items():
        if isinstance(accessor, kind):
            return key
    inner = accessor.repr().partition("(")[2].rpartition(")")[0]
    if isinstance(accessor, _GETATTR):
        # Methods of a module are not its attributes.
        return inner if not isinstance(value, nn.Module) else CLASS if inner == "__class__" else UNKNOWN
    try:
        return ast.literal_eval(inner) if isinstance(accessor, _GETITEM) else UNKNOWN
    except (SyntaxError, ValueError):
        return UNKNOWN


def _stays(node: Any, value: Any) -> bool:
    """Whether a value that nothing is read of is the same as long as it is the same object."""
    if node.is_guarded_value_immutable() or isinstance(value, (type, types.CodeType, torch.dtype)):
        return True
    if type(value) is frozenset and all(type(item) is str for item in value):
        return True
    # Of an object of a class that is not written in Python the class at least stays.
    of_class = all(isinstance(guard, _OF_THE_CLASS) for guard in node.get_leaf_guards())
    return of_class and not type(value).__flags__ & _WRITTEN_IN_PYTHON


def _described(node: Any, base: str) -> Any:
    """What is asked at and below a node, in words that are the same wherever the node hangs."""
    asked = tuple(
        (type(guard).__name__, *(part.partition("  # ")[0].replace(base, "") for part in guard.verbose_code_parts()))
        for guard in node.get_leaf_guards()
    )
    below = [child for _, _, child in _below(node, UNKNOWN)]
    return node.get_source().replace(base, ""), asked, tuple(_described(child, base) for child in below)
