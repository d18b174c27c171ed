"""Dynamo's guards on a module, asked without walking through the module: only what has changed is looked at."""

from __future__ import annotations

import ast
import dis
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch._C import _dynamo

from fullgraph_compile.watching import Watch, attributes_of, contents_of

# Not described to type checkers in full.
dynamo: Any = _dynamo.guards

# Guards that read nothing but the value, or the dict, that they are on.
_OF_THE_VALUE = (
    dynamo.TYPE_MATCH, dynamo.ID_MATCH, dynamo.EQUALS_MATCH, dynamo.NONE_MATCH, dynamo.NOT_NONE, dynamo.TRUE_MATCH,
    dynamo.FALSE_MATCH, dynamo.DICT_LENGTH, dynamo.DICT_CONTAINS, dynamo.LENGTH_CHECK,
)  # fmt: skip
_DICTS = (dict, OrderedDict)
# What may be on the way to something that is guarded.
_WATCHED = (*_DICTS, list, tuple, property, types.FunctionType, types.CellType)
_GETATTR = (dynamo.GetAttrGuardAccessor, dynamo.GenericGetAttrGuardAccessor)
_GETITEM = (dynamo.DictGetItemGuardAccessor, dynamo.ListGetItemGuardAccessor, dynamo.TupleGetItemGuardAccessor)
# In the place of a value: it is not known, or may change unseen.
_UNKNOWN = object()
# In the place of a key.
_ATTRIBUTES, _CLASS, _BASES, _CODE, _CLOSURE = object(), object(), object(), object(), object()
_WAYS = {
    dynamo.GetGenericDictGuardAccessor: _ATTRIBUTES,
    dynamo.TypeDictGuardAccessor: _ATTRIBUTES,
    dynamo.TypeGuardAccessor: _CLASS,
    dynamo.TypeMROGuardAccessor: _BASES,
    dynamo.CodeGuardAccessor: _CODE,
    dynamo.ClosureGuardAccessor: _CLOSURE,
}


class StandingGuards:
    """The guards of one trace, split in two by what they read.

    Most of them walk through the module's tree of attribute dicts down to something that cannot change, such as a
    number or an empty dict of hooks.  As long as each dict on the way is as it was when all guards held, so do those:
    the dicts are watched instead, and so are lists and configs in them.  All other guards stay, and are asked each
    time: on globals, classes, functions, tensors, and objects with attributes of another making.

    Args:
        root: all guards of the trace, which hold now.
        module: what they call ``L['module']``.
        more: other dicts to watch.
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
        more: list[dict[str, Any]],
        switching: Callable[[], AbstractContextManager[None]] = nullcontext,
        switched: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._switched = list(switched)
        # How each watched dict and module is found: from which found before, by which key; and its type.
        self._ways: list[tuple[int, Any, type]] = []
        self._found: list[Any] = []
        self._of_classes: set[Any] = set()
        self._kept: set[str] = {root.get_source()}
        with switching():
            for child in root.get_child_managers():
                # The arguments are those of the traced call, each time.
                if child.get_source() != "L['kwargs']":
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
                value = _read(found[parent], key)
            if type(value) is not kind:
                raise ValueError(f"a {type(value).__name__} is where a {kind.__name__} was")
            found.append(value)
        self._found = found
        self._watch(more)

    def _watch(self, more: list[dict[str, Any]]) -> None:
        found = {id(v): v for v in self._found}.values()
        objects = [v for v in found if _plain(v)]
        # Of an object that is no module, more is set than the guards read, so it is compared.
        compared: list[Any] = [*self._switched, *(vars(v) for v in objects if not isinstance(v, nn.Module))]
        compared += [v for v in found if type(v) is list]
        looked_through = set(map(id, compared))
        classes = [v for v in found if isinstance(v, type)]
        classes += [cls for v in objects if _all_known(v) for cls in type(v).__mro__]
        self.watch = Watch(
            [*more, *(v for v in found if type(v) in _DICTS and id(v) not in looked_through)],
            objects,
            compared,
            [v for v in found if isinstance(v, types.FunctionType)],
            list(dict.fromkeys(classes)),
            [v for v in found if type(v) is types.CellType],
        )

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
        if type(value) in _WATCHED or isinstance(value, type) or _plain(value):
            self._ways.append((parent, key, type(value)))
            self._found.append(value)
        elif isinstance(value, Tensor) or not (node.is_guarded_value_immutable() or type(value) is types.CodeType):
            value = _UNKNOWN
        known = (*_OF_THE_VALUE, dynamo.NO_HASATTR) if _all_known(value) else _OF_THE_VALUE
        kept = value is _UNKNOWN or not all(isinstance(guard, known) for guard in node.get_leaf_guards())
        for below, way, child in _below(node, value):
            if way is _CLASS and isinstance(value, nn.Module):
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
        key = _key(accessor, value)
        below = _UNKNOWN if value is _UNKNOWN else _read(value, key)
        if below is not _UNKNOWN and isinstance(accessor, _GETATTR) and getattr(value, key, _UNKNOWN) is not below:
            below = _UNKNOWN
        yield below, key, child


def _key(accessor: Any, value: Any) -> Any:
    """By which key ``_read`` gives what an accessor leads to."""
    for kind, key in _WAYS.items():
        if isinstance(accessor, kind):
            return key
    inner = accessor.repr().partition("(")[2].rpartition(")")[0]
    if isinstance(accessor, _GETATTR):
        # Methods of a module are not its attributes.
        return _UNKNOWN if isinstance(value, nn.Module) else inner
    try:
        return ast.literal_eval(inner) if isinstance(accessor, _GETITEM) else _UNKNOWN
    except (SyntaxError, ValueError):
        return _UNKNOWN


def _read(value: Any, key: Any) -> Any:
    """What a key leads to, if nothing but what is watched is read for it."""
    if key is _CLASS:
        return type(value) if _plain(value) else _UNKNOWN
    if key is _ATTRIBUTES:
        return vars(value) if _plain(value) else attributes_of(value) if isinstance(value, type) else _UNKNOWN
    if key is _BASES:
        return value.__mro__ if isinstance(value, type) else _UNKNOWN
    if key is _CODE:
        return value.__code__ if type(value) is types.FunctionType else _UNKNOWN
    if key is _CLOSURE:
        return value.__closure__ if type(value) is types.FunctionType else _UNKNOWN
    if type(value) is types.CellType:
        return contents_of(value) if key == "cell_contents" else _UNKNOWN
    if type(value) in (list, tuple):
        return value[key] if isinstance(key, int) and -len(value) <= key < len(value) else _UNKNOWN
    if type(value) is property:
        return value.fget if key == "fget" else _UNKNOWN
    if isinstance(value, type):
        value = attributes_of(value)
    elif _plain(value):
        if key == "__dict__":
            return vars(value)
        key = _renamed(value, key)
        if isinstance(key, str) and key not in vars(value) and _all_known(value):
            return _of_class(type(value), key)
        value = vars(value)
    return value.get(key, _UNKNOWN) if type(value) in _DICTS and isinstance(key, (str, int)) else _UNKNOWN


def _of_class(cls: type, name: str) -> Any:
    """A class's attribute, if it is the same for each object that reads it."""
    found = next((attributes_of(c)[name] for c in cls.__mro__ if name in c.__dict__), _UNKNOWN)
    return _UNKNOWN if hasattr(type(found), "__get__") else found


def _renamed(value: Any, name: Any) -> Any:
    """The attribute that a property which is ``return self.attribute``, and nothing else, stands for."""
    found = getattr(type(value), name, None) if isinstance(name, str) else None
    if not isinstance(found, property) or not isinstance(found.fget, types.FunctionType):
        return name
    steps = [step for step in dis.get_instructions(found.fget) if step.opname not in ("RESUME", "CACHE")]
    simple = [step.opname for step in steps] == ["LOAD_FAST", "LOAD_ATTR", "RETURN_VALUE"]
    return steps[1].argval if simple else _UNKNOWN


def _all_known(value: Any) -> bool:
    """Whether what attributes an object lacks, too, is told by its ``__dict__`` and its classes."""
    return _plain(value) and not isinstance(value, nn.Module) and not hasattr(type(value), "__getattr__")


def _plain(value: Any) -> bool:
    """Whether reading an attribute that an object has itself reads nothing but its ``__dict__`` and its class."""
    if isinstance(value, nn.Module):
        return True
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)) or kind.__dictoffset__ == 0:
        return False
    reads = kind.__getattribute__  # a method of the class, or of one of its bases
    # That of a config translates names by a table of its class.
    return reads is object.__getattribute__ or str(getattr(reads, "__module__", "")).startswith("transformers.")


def _described(node: Any, base: str) -> Any:
    """What is asked at and below a node, in words that are the same wherever the node hangs."""
    asked = tuple(
        (type(guard).__name__, *(part.partition("  # ")[0].replace(base, "") for part in guard.verbose_code_parts()))
        for guard in node.get_leaf_guards()
    )
    below = [child for _, _, child in _below(node, _UNKNOWN)]
    return node.get_source().replace(base, ""), asked, tuple(_described(child, base) for child in below)
