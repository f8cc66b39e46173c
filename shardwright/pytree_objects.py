"""Inputs and outputs as trees, also through objects that torch's pytrees take for leaves.

1. A dataclass, or a plain object whose attributes hold tensors (a cache of keys and values, say), becomes an
   `OpenedObject` node: its children are the attributes that hold tensors, its other attributes stay as they are.
2. A plain object without tensors, a dtype or a device becomes a `PlainLeaf`, a node without children.
3. `closed` restores the objects from their attributes, without calling their classes.

`with_tensors` makes tensors of numpy arrays, which torch's operators do not take.

Example: an object ``cache`` with ``keys``, a tensor, and ``layer``, which is 3, becomes an `OpenedObject` with the
child ``keys`` and the rest ``{"layer": 3}``. `closed` restores an object of the same class with both attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from .errors import SettingError
from .torch_private import pytree, register_node

__all__ = ["closed", "holds_objects", "opened", "with_tensors"]


@dataclass(eq=False)
class OpenedObject:
    """An object taken apart.

    Attributes:
        cls: its class.
        opened_attributes: its attributes that hold tensors.
        rest: its other attributes.
    """

    cls: type
    opened_attributes: dict[str, object]
    rest: dict[str, object]


@dataclass(eq=False)
class PlainLeaf:
    """A value without tensors: a node without children."""

    value: object


#: The class, the names of the children and the other attributes of an opened object.
_Context: TypeAlias = "tuple[type, tuple[str, ...], dict[str, object]]"


def _flatten(node: OpenedObject) -> tuple[list[object], _Context]:
    return list(node.opened_attributes.values()), (node.cls, tuple(node.opened_attributes), node.rest)


def _unflatten(children: Iterable[object], context: _Context) -> OpenedObject:
    cls, names, rest = context
    return OpenedObject(cls, dict(zip(names, children)), rest)


def _flatten_with_keys(node: OpenedObject) -> tuple[list[tuple[object, object]], _Context]:
    children, context = _flatten(node)
    return [(pytree.GetAttrKey(name), child) for name, child in zip(node.opened_attributes, children)], context


register_node(
    OpenedObject,
    _flatten,
    _unflatten,
    serialized_type_name="shardwright.Opened",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_node(
    PlainLeaf,
    lambda node: ([], node.value),
    lambda children, value: PlainLeaf(value),
    serialized_type_name="shardwright.Kept",
    flatten_with_keys_fn=lambda node: ([], node.value),
)

_SIMPLE = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex, bytes, range, Enum)


def _attributes(leaf: object) -> dict[str, object] | None:
    """The attributes of an object; None for a tensor, a module, a class, a callable, and objects without attributes."""
    if isinstance(leaf, (torch.Tensor, torch.nn.Module, type)) or callable(leaf):
        return None
    if is_dataclass(leaf):
        named = {f.name: getattr(leaf, f.name) for f in fields(leaf) if hasattr(leaf, f.name)}
        return named | getattr(leaf, "__dict__", {})
    return getattr(leaf, "__dict__", None)


def _among(leaf: object, around: tuple[object, ...]) -> bool:
    return any(leaf is one for one in around)


def _holds(tree: object, around: tuple[object, ...] = ()) -> bool:
    """True where a tree holds a tensor, also in the attributes of its leaves."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            return True
        attributes = _attributes(leaf)
        if attributes and not _among(leaf, around) and _holds(attributes, (*around, leaf)):
            return True
    return False


def opened(tree: object, around: tuple[object, ...] = ()) -> Any:
    """The tree with every object that holds tensors opened.

    Args:
        tree: the tree.
        around: the objects around it, which a cycle may reach again.
    """

    def open_leaf(leaf: object) -> object:
        attributes = _attributes(leaf)
        if _among(leaf, around) or attributes is None:
            return PlainLeaf(leaf) if isinstance(leaf, _SIMPLE) else leaf
        within = (*around, leaf)
        if not _holds(attributes, within):
            return PlainLeaf(leaf)
        opened_attributes = {name: opened(a, within) for name, a in attributes.items() if _holds(a, within)}
        return OpenedObject(
            type(leaf), opened_attributes, {name: a for name, a in attributes.items() if name not in opened_attributes}
        )

    return pytree.tree_map(open_leaf, tree)


def with_tensors(tree: object) -> Any:
    """The tree with a tensor in place of each numpy array, on the memory of the array where it is contiguous and may be
    written, and Python's number in place of each of numpy's.

    Raises:
        SettingError: an array of objects, text or dates.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None or not any(isinstance(x, (numpy.ndarray, numpy.generic)) for x in pytree.tree_leaves(tree)):
        return tree

    def tensor(array: Any) -> object:
        if isinstance(array, numpy.generic):
            return array.item()
        writable = numpy.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        try:
            return torch.from_numpy(writable)
        except TypeError:
            raise SettingError(
                f"an input is a numpy array of {array.dtype}", legal="an array of numbers or truth values, or a tensor"
            ) from None

    return pytree.tree_map_only((numpy.ndarray, numpy.generic), tensor, tree)


def closed(tree: object) -> Any:
    """The tree with the objects restored."""

    def close(node: object) -> object:
        if isinstance(node, PlainLeaf):
            return node.value
        if not isinstance(node, OpenedObject):
            return node
        made: object = object.__new__(node.cls)
        for name, attribute in {**{n: closed(h) for n, h in node.opened_attributes.items()}, **node.rest}.items():
            object.__setattr__(made, name, attribute)
        return made

    return pytree.tree_map(close, tree, is_leaf=_is_ours)


def holds_objects(spec: Any) -> bool:
    """True where a tree of this structure needs `closed`."""
    tree = pytree.tree_unflatten([None] * spec.num_leaves, spec)
    return any(map(_is_ours, pytree.tree_leaves(tree, is_leaf=_is_ours)))


def _is_ours(node: object) -> bool:
    return isinstance(node, (OpenedObject, PlainLeaf))
