"""A captured model: operators in program order and the values between them.

The records are small, immutable and free of torch.fx. Shapes are global: those of the one-device program.
`partition.local_program` has the program on slices that a plan makes of such a graph.

Example, the graph of ``relu(fc(x))`` with ``fc = nn.Linear(16, 32)`` and x [8, 16]::

    linear    f32[8, 16], f32[32, 16], f32[32] -> f32[8, 32]      in the module fc, of the line model.py:7
    relu      f32[8, 32] -> f32[8, 32]                            of the same line
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .torch_private import pytree, schema_of

__all__ = [
    "SEED",
    "Form",
    "Graph",
    "Master",
    "Op",
    "Pieces",
    "Recompute",
    "Value",
    "argument_names",
    "changed",
    "form_of",
    "key_of",
    "leaves",
    "leaves_of_type",
    "map_leaves",
    "map_values",
    "share_form",
    "short_dtype",
    "types_of",
    "values_in",
]


class Master(NamedTuple):
    """The storage of a parameter whose operators read it in another dtype. See `mixed_precision`.

    Args:
        dtype: the dtype of the stored parameter, of its gradient and of the optimizer's view of both.
        sums: the dtype in which terms of its gradient are summed over ranks.
    """

    dtype: torch.dtype
    sums: torch.dtype


@dataclass(frozen=True)
class Value:
    """A tensor of the program.

    Args:
        name: unique in its graph.
        shape: global shape.
        dtype: element type.
        requires_grad: True where a gradient flows to it from a loss.
        master: for a parameter that is stored in another dtype than the `dtype` of its consumers, or whose gradient
            is summed in another dtype; else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    master: Master | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def stored(self) -> Value:
        """A parameter in its storage dtype."""
        return (
            self if self.master is None or self.master.dtype == self.dtype else replace(self, dtype=self.master.dtype)
        )

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which terms of its gradient are summed over ranks."""
        return self.dtype if self.master is None else self.master.sums

    def __str__(self) -> str:
        return f"%{self.name}"


Record = TypeVar("Record")
Leaf = TypeVar("Leaf")

#: The seed of the random operators: a further input of a program that has some. See `counter_rng`.
SEED = Value("<seed>", (4,), torch.int64)


def values_in(tree: object) -> tuple[Value, ...]:
    """The values among the leaves of nested arguments, in call order."""
    return tuple(leaves_of_type(tree, Value))


def leaves_of_type(tree: object, wanted: type[Leaf]) -> list[Leaf]:
    """The leaves of one type of nested arguments, in call order."""
    found: list[Leaf] = []
    _collect(tree, wanted, found)
    return found


def _collect(tree: Any, wanted: type[Leaf], found: list[Leaf]) -> None:
    """Append the leaves of one type: `leaves` without a generator for each branch."""
    kind = type(tree)
    if kind is wanted:
        found.append(tree)
    elif kind in _SEQUENCES:
        for branch in tree:
            if type(branch) is wanted:
                found.append(branch)
            elif type(branch) not in _LEAVES:
                _collect(branch, wanted, found)
    elif kind in _MAPPINGS:
        for branch in tree.values():
            _collect(branch, wanted, found)
    elif kind not in _LEAVES and _nests(kind):
        found.extend(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, wanted))


def map_values(tree: Any, change: Callable[[Value], object]) -> Any:
    """Nested arguments with every value replaced."""
    kind = type(tree)
    if kind is Value:
        return change(tree)
    if kind in _SEQUENCES:  # a call of this function for each leaf would take most of the time
        return kind(
            [change(x) if type(x) is Value else x if type(x) in _LEAVES else map_values(x, change) for x in tree]
        )
    if kind in _MAPPINGS:
        return kind([(key, map_values(branch, change)) for key, branch in tree.items()])
    if kind in _LEAVES or not _nests(kind):
        return tree
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Value) else leaf, tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested arguments, in call order.

    `pytree.tree_leaves`, at a tenth of its cost for tuples, lists and dicts.
    """
    kind = type(tree)
    if kind in _SEQUENCES:
        for branch in tree:
            yield from leaves(branch)
    elif kind in _MAPPINGS:
        for branch in tree.values():
            yield from leaves(branch)
    elif kind in _LEAVES or not _nests(kind):
        yield tree
    else:
        yield from pytree.tree_leaves(tree)


def map_leaves(change: Callable[[Any], object], tree: Any) -> Any:
    """Nested arguments with every leaf replaced, in call order: `pytree.tree_map`, as fast as `leaves`."""
    kind = type(tree)
    if kind in _SEQUENCES:
        return kind([change(x) if type(x) in _LEAVES else map_leaves(change, x) for x in tree])
    if kind in _MAPPINGS:
        return kind([(key, map_leaves(change, branch)) for key, branch in tree.items()])
    if kind in _LEAVES or not _nests(kind):
        return change(tree)
    return pytree.tree_map(change, tree)


def key_of(tree: Any, stand_in: Callable[[Any], object] | None = None) -> tuple[Any, ...]:
    """Nested arguments as a dictionary key. 1, 1.0 and True are equal in Python, as 0.0 and -0.0 are, but not to an
    operator.

    Args:
        stand_in: ``stand_in(leaf)`` takes the place of each leaf in the key, besides numbers and text.
    """
    kind = type(tree)
    if kind in _ATOMS:
        return kind, tree
    if isinstance(tree, (tuple, list)):
        return kind, tuple([(type(x), x) if type(x) in _ATOMS else key_of(x, stand_in) for x in tree])
    if isinstance(tree, dict):
        return kind, tuple([(name, key_of(branch, stand_in)) for name, branch in tree.items()])
    if kind is float:
        return kind, tree.hex()
    return kind, tree if stand_in is None else stand_in(tree)


class Form:
    """A call without its names: equal for calls that rules treat alike, such as those of equal layers."""

    __slots__ = ("_hash", "_key")

    def __init__(self, op: Op) -> None:
        places: dict[str, int] = {}

        def place(x: object) -> Hashable:
            return places.setdefault(x.name, len(places)) if type(x) is Value else x

        def side(values: Sequence[Value | None]) -> tuple[Hashable, ...]:
            return tuple([None if v is None else (v.shape, v.dtype, v.requires_grad) for v in values])

        called = key_of((op.args, op.kwargs), place)
        key: Any = op.target, called, tuple([place(v) for v in op.inputs]), side(op.inputs), side(op.outputs)
        try:
            self._key, self._hash = key, hash(key)
        except TypeError:  # an argument without a hash, such as a slice: the call is of a form of its own
            self._key, self._hash = self, object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Form) and self._key is not self and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


def form_of(op: Op) -> Form:
    """The form of a call, which is found once."""
    found: Form | None = op.__dict__.get(_FORM)
    if found is None:
        found = op.__dict__[_FORM] = Form(op)
    return found


def share_form(op: Op, form: Form) -> None:
    """Note the form of a call, which is that of another call."""
    op.__dict__[_FORM] = form


#: Where an operator keeps its form, and the fields that decide the form.
_FORM, _FORMING = "_form", frozenset({"target", "args", "kwargs", "inputs", "outputs"})

#: The most frequent types of arguments that hold others.
_SEQUENCES, _MAPPINGS = frozenset({tuple, list, immutable_list}), frozenset({dict, immutable_dict})

#: The most frequent types of arguments that are their own keys.
_ATOMS = frozenset({int, bool, str, type(None)})

#: The most frequent types of arguments that hold none.
_LEAVES = frozenset({Value, int, float, bool, str, type(None), torch.dtype, torch.device, torch.Tensor})


def _nests(kind: type) -> bool:
    """True for a type whose objects hold others by torch's pytree."""
    return kind in pytree.SUPPORTED_NODES or issubclass(kind, tuple)


@dataclass(frozen=True)
class Recompute:
    """The recomputation of an operator in the backward. The operators of one call are recomputed together.

    Args:
        call: the number of the recomputed call of a module, function or operator.
        path: the path of the module for which recomputation was requested, or the operator's name.
        everywhere: True where results used outside of the call are dropped too, not only those used inside.
        mp_comm: True where collectives are sent again; False: their results are saved.
        parallel_optimizer_comm: True where weights that were gathered for it are gathered again.
        keep: True where this operator's own results are saved.
    """

    call: int
    path: str = ""
    everywhere: bool = False
    mp_comm: bool = True
    parallel_optimizer_comm: bool = False
    keep: bool = False


class Pieces(NamedTuple):
    """The position of a micro-batch's rows among those of the whole batch.

    Args:
        dim: the operator's dim that carries the batch.
        count: the number of micro-batches.
        parts: the number of pieces of that dim; each piece is one of `count` adjacent ones in the whole batch.
    """

    dim: int
    count: int  # type: ignore[assignment]  # tuple has a method of this name
    parts: int


@dataclass(frozen=True)
class Op:
    """One operator call.

    Args:
        name: unique in its graph; the mark's attribute path where there is one.
        target: the torch operator.
        args, kwargs: as called, with `Value`s in the place of tensors.
        inputs: tensor arguments in call order: those to which a strategy refers.
        outputs: one entry an output; None for one that is not a tensor.
        module: dotted path of the module that calls it, ``""`` for the outermost.
        source: ``file.py:41``, the user's line.
        mark: the strategy given by `shardwright.shard`, or None.
        origin: for an operator of an expansion, the operator of the user's program that was expanded.
        number: its number among the program's random operators.
        recompute: its recomputation in the backward; None: its results are saved.
        micro: for a random operator in a graph of one micro-batch, the position of its numbers in those of the whole
            batch.
        fast: True for a random operator whose numbers come from torch's own generators (``random="fast"``), where that
            decides the operators of its expansion.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    module: str = ""
    source: str = field(default="", compare=False)
    mark: Any = None
    origin: str | None = None
    number: int = 0
    recompute: Recompute | None = None
    micro: Pieces | None = None
    fast: bool = False

    def output(self, i: int) -> Value:
        """Output i of an operator whose output i is a tensor."""
        value = self.outputs[i]
        assert value is not None
        return value

    @property
    def kind(self) -> str:
        """The operator's plain name, such as ``matmul``."""
        packet = getattr(self.target, "overloadpacket", None)
        return packet.__name__ if packet is not None else getattr(self.target, "__name__", str(self.target))

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the operator's arguments by its schema."""
        return argument_names(self.target)

    def argument(self, name: str, default: object = None) -> Any:
        """An argument by its schema's name, given by position, by name or by default."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = self.argument_names
        if name in names:
            i = names.index(name)
            if i < len(self.args):
                return self.args[i]
            schema_default = schema_of(self.target).arguments[i]
            if schema_default.has_default_value():
                return schema_default.default_value
        return default

    def with_arguments(self, **changes: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with arguments, by schema name, replaced."""
        args, kwargs = list(self.args), dict(self.kwargs)
        names = self.argument_names
        for name, value in changes.items():
            i = names.index(name)
            if i < len(args):
                args[i] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    @property
    def where(self) -> dict[str, str | None]:
        """The operator and its source line, for an error."""
        return {
            "operator": f"{self.name} ({self.kind})" if self.kind not in self.name else self.name,
            "source": self.source or None,
        }


@lru_cache(1 << 12)
def argument_names(target: object) -> tuple[str, ...]:
    """Names of the arguments of an operator by its schema."""
    schema = schema_of(target)
    return tuple(a.name for a in schema.arguments) if schema is not None else ()


@dataclass(frozen=True, repr=False)
class Graph:
    """Operators in program order.

    Args:
        inputs: the tensors that the user feeds, in call order (flattened).
        parameters, buffers: by dotted name. Tied names share one value: see `aliases`.
        constants: tensors that the model created once, by value name.
        ops: in program order.
        outputs: a value, or a plain constant, per flattened output.
        in_spec, out_spec: the nesting of inputs and outputs.
        updates: buffer name -> its value after the step.
        aliases: further names of a parameter or buffer -> its name.
        batch: input name -> the dim that carries the batch; None: dim 0 of every input.
        changed: indices of the inputs that the model changes in place. Their new values follow the user's outputs.
    """

    inputs: tuple[Value, ...]
    parameters: dict[str, Value]
    buffers: dict[str, Value]
    constants: dict[str, torch.Tensor]
    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    in_spec: Any = None
    out_spec: Any = None
    updates: dict[str, Value] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    batch: dict[str, int] | None = None
    changed: tuple[int, ...] = ()

    def __repr__(self) -> str:
        counts = {"operator": self.ops, "parameter": self.parameters, "buffer": self.buffers, "input": self.inputs}
        parts = (f"{len(some)} {what}{'s' * (len(some) != 1)}" for what, some in counts.items() if some)
        return f"<Graph: {', '.join(parts)}>"

    def result(self, outputs: Sequence[object]) -> Any:
        """The outputs of a run in the nesting of the user's model."""
        return pytree.tree_unflatten(list(outputs[: len(outputs) - len(self.changed)]), self.out_spec)

    def producers(self) -> dict[str, Op]:
        """Value name -> its producer."""
        return {v.name: op for op in self.ops for v in op.outputs if v is not None}

    def consumers(self) -> dict[str, list[tuple[Op, int]]]:
        """Value name -> (operator, input index) of each consumer, in program order."""
        out: dict[str, list[tuple[Op, int]]] = {}
        for op in self.ops:
            for i, value in enumerate(op.inputs):
                out.setdefault(value.name, []).append((op, i))
        return out

    def sources(self) -> Iterator[Value]:
        """Yield the values without a producer."""
        yield from self.inputs
        yield from self.parameters.values()
        yield from self.buffers.values()

    def with_ops(self, ops: tuple[Op, ...]) -> Graph:
        """The same graph with other operators."""
        return replace(self, ops=ops)


def types_of(op: Op) -> str:
    """``f32[32, 784], f32[784, 512] -> f32[32, 512]``: an operator's tensors, inputs and outputs."""

    def side(values: tuple[Value | None, ...]) -> str:
        return ", ".join(f"{short_dtype(v.dtype)}{list(v.shape)}" for v in values if v is not None)

    return f"{side(op.inputs)} -> {side(op.outputs)}".strip()


def changed(record: Record, **fields: object) -> Record:
    """A copy of a dataclass, such as a value or an operator, with other fields: `dataclasses.replace`, in a third of
    its time. The class has no ``__post_init__``, and caches nothing in its objects but the form of an operator."""
    made = object.__new__(type(record))
    made.__dict__.update(record.__dict__)
    made.__dict__.update(fields)
    if not _FORMING.isdisjoint(fields):
        made.__dict__.pop(_FORM, None)
    return made


def short_dtype(dtype: torch.dtype) -> str:
    """``f32`` for torch.float32."""
    name = str(dtype).removeprefix("torch.")
    for word, letter in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(word):
            return letter + name.removeprefix(word)
    return name
