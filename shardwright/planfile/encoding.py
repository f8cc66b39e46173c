"""A captured graph, its strategies and its layouts as JSON, and back.

1. Graphs (`write_graph`, `read_graph`): operators with their argument trees, values, the nesting of inputs and
   outputs. A graph is complete for planning, not for running: constants keep shape and dtype but lose their values,
   and plain objects that were given to a user's `torch.autograd.Function` are lost.

   Values are written once, by name. In an argument tree a leaf without a JSON type is an object with one key:

       {"%": "matmul1"} a value    {"tuple": [...]}    {"dict": [[key, value], ...]}    {"dtype": "float32"}
       {"float": "inf"}            {"device": "cpu"}   {"complex": [0.0, 1.0]}          {"object": "its repr"}

2. Strategies and layouts (`spell_assignment`, `spell_layout`), in the notation in which users write them. A tuple of
   cuts where it gives the same strategy: ``[[2, 4], [4, 1]]``. Otherwise a `Layout` spelt out: a device matrix, the
   names of its axes, and one entry per dim:

       "device_matrix": [2, 2, 2], "alias_name": ["a", "b", "c"],
       "in_strategy": [["c", ["a", "b"]], [["a", "b"], "None"]]

   The axes are the ranks' digits, cut at each boundary of a digit of the strategy. Example on 8 devices: digits 4@2
   (size 4, stride 2) and 2@1 cut the rank at 2, so the axes are a of size 4 and b of size 2.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import string
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from ..autocast import Autocast, UnderAutocast, under
from ..capture.regions import Applied
from ..errors import LayoutError, PlanError, ShardwrightError, StrategyError
from ..graph import Graph, Master, Op, Pieces, Recompute, Value, values_in
from ..layout import Digit, Digits, Layout, beside, merge
from ..rules import Assignment, Bound, assignment_of
from ..torch_private import pytree

__all__ = [
    "fingerprint",
    "packed",
    "read_assignment",
    "read_digits",
    "read_graph",
    "read_layout",
    "recompute_of",
    "spell_assignment",
    "spell_digits",
    "spell_layout",
    "unpacked",
    "write_graph",
    "write_recompute",
]

#: Key of a leaf of an argument tree -> the class of torch that it stands for.
_WORDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class UnsavedObject:
    """A stand-in for an object that a document does not hold; it has the object's repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


# -- writing -----------------------------------------------------------------------------------------------------------


def _leaf(x: Any) -> Any:
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": str(x)}
    if isinstance(x, Value):
        return {"%": x.name}
    if isinstance(x, list):
        return [_leaf(y) for y in x]
    if isinstance(x, tuple):
        return {"tuple": [_leaf(y) for y in x]}
    if isinstance(x, dict):
        return {"dict": [[_leaf(k), _leaf(v)] for k, v in x.items()]}
    if isinstance(x, complex):
        return {"complex": [_leaf(x.real), _leaf(x.imag)]}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    for word, kind in _WORDS.items():
        if isinstance(x, kind):
            return {word: str(x).removeprefix("torch.")}
    return {"object": repr(x)}


def _target(target: Any) -> Any:
    if isinstance(target, UnderAutocast):
        return {
            "autocast": [[name, _leaf(dtype)] for name, dtype in target.state.dtypes],
            "shares": target.state.shares,
            "target": _target(target.inner),
        }
    if isinstance(target, Applied):
        function = target.described_as
        return {
            "function": f"{function.__module__}:{function.__qualname__}",
            "leaves": [_leaf(x) for x in target.leaves],
            "places": target.places,
            "spec": _spec(target.spec),
            "differentiable": list(target.differentiable),
        }
    return str(target)


def _spec(spec: Any) -> str | None:
    """The nesting of a tree as text; None where it has a class that cannot be written."""
    if spec is None:
        return None
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError):
        return None


def _value(value: Value) -> list:
    master = [] if value.master is None else [[str(dtype).removeprefix("torch.") for dtype in value.master]]
    return [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad, *master]


def write_recompute(said: Recompute) -> dict[str, Any]:
    """The recomputation of an operator as a dict: ``call``, and the fields that differ from their default."""
    held = {f.name: (getattr(said, f.name), f.default) for f in fields(said)}
    return {name: value for name, (value, default) in held.items() if name == "call" or value != default}


def _op(op: Op) -> dict[str, Any]:
    out: dict[str, Any] = {"name": op.name, "target": _target(op.target), "args": [_leaf(x) for x in op.args]}
    if op.kwargs:
        out["kwargs"] = {key: _leaf(x) for key, x in op.kwargs.items()}
    if op.inputs != values_in((op.args, op.kwargs)):
        out["inputs"] = [v.name for v in op.inputs]
    out["outputs"] = [None if v is None else v.name for v in op.outputs]
    for name in ("module", "source", "origin", "number", "fast"):
        if getattr(op, name):
            out[name] = getattr(op, name)
    if op.micro is not None:
        out["micro"] = list(op.micro)
    return out


def write_graph(graph: Graph) -> dict[str, Any]:
    """A graph as lists, dicts, numbers and strings; without marks and recomputation, which a plan's lines hold."""
    values = {
        v.name: v
        for side in (graph.inputs, *(side for op in graph.ops for side in (op.inputs, op.outputs)))
        for v in side
        if v is not None
    }
    for v in (*values_in(graph.outputs), *graph.updates.values()):
        values.setdefault(v.name, v)
    batch = {} if graph.batch is None else {"batch": graph.batch}
    return {
        "values": {name: _value(v) for name, v in values.items()},
        "inputs": [v.name for v in graph.inputs],
        "parameters": {name: [v.name, *_value(v)] for name, v in graph.parameters.items()},
        "buffers": {name: [v.name, *_value(v)] for name, v in graph.buffers.items()},
        "constants": {name: [list(t.shape), _leaf(t.dtype)] for name, t in graph.constants.items()},
        "ops": [_op(op) for op in graph.ops],
        "outputs": [_leaf(x) for x in graph.outputs],
        "updates": {name: v.name for name, v in graph.updates.items()},
        "aliases": graph.aliases,
        "in_spec": _spec(graph.in_spec),
        "out_spec": _spec(graph.out_spec),
        **batch,
        **({"changed": list(graph.changed)} if graph.changed else {}),
    }


def fingerprint(graph: Graph) -> str:
    """A short hash of a graph: its operators, arguments, shapes and dtypes, but not their modules and source lines."""
    said = write_graph(graph)
    said["ops"] = [{key: x for key, x in op.items() if key not in ("module", "source")} for op in said["ops"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def packed(said: Any) -> str:
    """JSON as one line of base64, compressed."""
    text = json.dumps(said, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


# -- reading -----------------------------------------------------------------------------------------------------------


def unpacked(text: str) -> Any:
    """The value that `packed` was given.

    Raises:
        ValueError: the text is cut short or damaged.
    """
    try:
        return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _leaf_of(x: Any, values: dict[str, Value]) -> Any:
    if isinstance(x, list):
        return [_leaf_of(y, values) for y in x]
    if not isinstance(x, dict):
        return x
    ((word, held),) = x.items()
    if word == "%":
        return values[held]
    if word == "tuple":
        return tuple(_leaf_of(y, values) for y in held)
    if word == "dict":
        return {_leaf_of(k, values): _leaf_of(v, values) for k, v in held}
    if word == "float":
        return float(held)
    if word == "complex":
        return complex(*(_leaf_of(y, values) for y in held))
    if word == "device":
        return torch.device(held)
    return getattr(torch, held) if word in _WORDS else UnsavedObject(held)


def _target_of(said: Any, name: str, source: str | None) -> Any:
    """The operator of a written target.

    Raises:
        PlanError: it is not registered in this process.
    """
    if isinstance(said, dict) and "autocast" in said:
        state = Autocast(tuple((kind, _leaf_of(dtype, {})) for kind, dtype in said["autocast"]), said["shares"])
        return under(_target_of(said["target"], name, source), state)
    if isinstance(said, dict):
        return _applied(said, name, source)
    namespace, _, rest = said.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        raise PlanError(
            f"there is no operator {said} in this process",
            operator=name,
            source=source,
            legal="import what registers it (torch.library.custom_op, sw.rule) before the plan is read",
        ) from None


def _applied(said: dict[str, Any], name: str, source: str | None) -> Applied:
    """A user's function, looked up in the module that defined it; nothing is imported."""
    module, _, path = said["function"].partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.autograd.Function)):
        raise PlanError(
            f"there is no torch.autograd.Function {path} in the module {module}",
            operator=name,
            source=source,
            legal=f"import {module} before the plan is read",
        )
    leaves = [
        torch.empty(0, device="meta") if i in said["places"] else _leaf_of(x, {}) for i, x in enumerate(said["leaves"])
    ]
    made = Applied(found, leaves, pytree.treespec_loads(said["spec"]) if said["spec"] else None)
    made.differentiable = tuple(said["differentiable"])
    return made


def recompute_of(said: dict[str, Any] | None) -> Recompute | None:
    """The recomputation that `write_recompute` wrote; None for None.

    Raises:
        TypeError: `said` has other fields or types.
    """
    if said is None:
        return None
    made = Recompute(**said)
    kinds = {**dict.fromkeys(asdict(made), bool), "call": int, "path": str}
    if any(type(getattr(made, name)) is not kind for name, kind in kinds.items()):
        raise TypeError(f"{said!r}")
    return made


def read_graph(said: dict[str, Any]) -> Graph:
    """The graph that `write_graph` wrote, constants as meta tensors.

    Raises:
        PlanError: an operator that is not registered in this process, by name.
        KeyError, TypeError, ValueError: `said` was not written by `write_graph`.
    """

    def value(name: str, shape: list, dtype: str, grad: bool, master: list | None = None) -> Value:
        return Value(
            name,
            tuple(shape),
            getattr(torch, dtype),
            grad,
            None if master is None else Master(*(getattr(torch, each) for each in master)),
        )

    values = {name: value(name, *rest) for name, rest in said["values"].items()}
    ops = []
    for op in said["ops"]:
        args = tuple(_leaf_of(x, values) for x in op["args"])
        kwargs = {key: _leaf_of(x, values) for key, x in op.get("kwargs", {}).items()}
        inputs = tuple(values[n] for n in op["inputs"]) if "inputs" in op else values_in((args, kwargs))
        outputs = tuple(None if n is None else values[n] for n in op["outputs"])
        source = op.get("source", "")
        ops.append(
            Op(
                op["name"],
                _target_of(op["target"], op["name"], source or None),
                args,
                kwargs,
                inputs,
                outputs,
                op.get("module", ""),
                source,
                None,
                op.get("origin"),
                op.get("number", 0),
                micro=Pieces(*op["micro"]) if "micro" in op else None,
                fast=op.get("fast", False),
            )
        )
    constants = {
        name: torch.empty(shape, dtype=_leaf_of(dtype, {}), device="meta")
        for name, (shape, dtype) in said["constants"].items()
    }
    in_spec, out_spec = (
        None if said[which] is None else pytree.treespec_loads(said[which]) for which in ("in_spec", "out_spec")
    )
    return Graph(
        tuple(values[n] for n in said["inputs"]),
        {name: value(*rest) for name, rest in said["parameters"].items()},
        {name: value(*rest) for name, rest in said["buffers"].items()},
        constants,
        tuple(ops),
        tuple(_leaf_of(x, values) for x in said["outputs"]),
        in_spec,
        out_spec,
        {name: values[n] for name, n in said["updates"].items()},
        dict(said["aliases"]),
        said.get("batch"),
        tuple(said.get("changed", ())),
    )


# -- strategies and layouts --------------------------------------------------------------------------------------------

#: The entry of a dim that is whole.
WHOLE = "None"


class _Axes:
    """A named device matrix of which each given digit is a product of whole axes."""

    def __init__(self, devices: int, digits: Iterable[Digit]) -> None:
        edges = sorted({1, devices} | {edge for d in digits for edge in (d.stride, d.span)}, reverse=True)
        self.axes = [Digit(above // below, below) for above, below in zip(edges, edges[1:])] or [Digit(1, 1)]
        self.names = [string.ascii_lowercase[i] if len(self.axes) <= 26 else f"a{i}" for i in range(len(self.axes))]

    @property
    def words(self) -> dict[str, list]:
        return {"device_matrix": [axis.size for axis in self.axes], "alias_name": self.names}

    def entry(self, digits: Digits) -> str | list[str]:
        """The names of the axes that make up a dim's digits, major first."""
        names = [
            name
            for digit in digits
            for axis, name in zip(self.axes, self.names)
            if digit.stride <= axis.stride < digit.span
        ]
        return WHOLE if not names else names[0] if len(names) == 1 else names


def spell_assignment(bound: Bound, assignment: Assignment) -> dict[str, Any]:
    """An operator's strategy as the fields of its line.

    ``in_strategy`` has the cuts, or axes of the named device matrix where cuts cannot express the strategy.
    ``leaves`` has the layouts of the outputs, where the inputs alone do not determine the digits of each factor.
    """
    cuts = bound.in_strategy(assignment)
    try:
        if assignment_of(bound, cuts, assignment.devices) == assignment:
            return {"in_strategy": [list(entry) for entry in cuts]}
    except ShardwrightError:
        pass  # cuts cannot express it
    axes = _Axes(assignment.devices, assignment.used)

    def written(sides: Sequence[Sequence[tuple[int, ...]]]) -> list[list]:
        return [[axes.entry(bound.dim_digits(dim, assignment) or ()) for dim in dims] for dims in sides]

    words = axes.words | {"in_strategy": written(bound.inputs)}
    seen = {factor for dims in bound.inputs for dim in dims for factor in dim}
    if any(digits and i not in seen for i, digits in enumerate(assignment.digits)):
        words["leaves"] = written(bound.outputs)
    return words


def read_assignment(bound: Bound, words: Mapping[str, Any], devices: int) -> Assignment:
    """The assignment that the fields of a line describe.

    Args:
        bound: the operator's notation, bound to its shapes.
        words: the fields.
        devices: the number of devices.

    Raises:
        StrategyError, LayoutError: a strategy that the operator cannot follow, with the legal ones.
    """
    given = words.get("in_strategy")
    if not isinstance(given, list):
        raise StrategyError(f"its in_strategy is {given!r}", legal="a list with one entry per tensor input")
    matrix = _matrix(words)
    assignment = assignment_of(bound, tuple(_entry(matrix, entry) for entry in given), devices)
    if "leaves" not in words:
        return assignment
    leaves = words["leaves"]
    if matrix is None or not isinstance(leaves, list) or len(leaves) != len(bound.outputs):
        raise StrategyError(
            f"leaves={leaves!r}",
            legal=f"with a device_matrix, one entry for each of the outputs {list(bound.out_shapes)}",
        )
    layouts = {i: _entry(matrix, entry) for i, entry in enumerate(leaves)}
    for i, layout in layouts.items():
        if not isinstance(layout, Layout) or len(layout.dims or ()) != len(bound.out_shapes[i]):
            raise StrategyError(
                f"leaves={leaves!r}", legal=f"an axis or {WHOLE!r} for each dim of {bound.out_shapes[i]}"
            )
    left = bound.follow(layouts, of_outputs=True)
    if left is None:
        raise StrategyError(
            f"the outputs {list(bound.out_shapes)} cannot be cut so",
            strategy=leaves,
            legal=f"cuts that divide, of dims that may be split: {_splittable(bound)}",
        )
    merged = bound.cut_by(devices, {i: a or b for i, (a, b) in enumerate(zip(assignment.digits, left.digits))})
    if (
        any(a and b and a != b for a, b in zip(assignment.digits, left.digits))
        or not beside(devices, merged.used)
        or not bound.is_consistent(merged)
    ):
        raise StrategyError(
            "in_strategy and leaves do not agree",
            strategy=dict(words),
            legal="the same axes for dims that are cut alike, each axis once",
        )
    return merged


def _splittable(bound: Bound) -> str:
    return ", ".join(f"{f.name} ({f.size})" for f in bound.factors if f.splittable and f.size > 1) or "none"


def _matrix(words: Mapping[str, Any]) -> Layout | None:
    """The named device matrix of a line, or None.

    Raises:
        LayoutError: sizes or names that make no device matrix.
    """
    if "device_matrix" not in words and "alias_name" not in words:
        return None
    try:
        return Layout(words.get("device_matrix"), words.get("alias_name"))  # type: ignore[arg-type]
    except LayoutError as error:
        raise LayoutError(error.message, legal=error.legal) from None  # without the source line of this reader


def _entry(matrix: Layout | None, entry: Any) -> Any:
    """The entry of one tensor: cuts as a tuple, or a `Layout` where it names axes."""
    if not isinstance(entry, list) or not any(isinstance(part, (str, list)) for part in entry):
        return tuple(entry) if isinstance(entry, list) else entry
    if matrix is None:
        raise LayoutError(
            f"{entry!r} names axes, and the line has no device_matrix",
            legal='"device_matrix": [2, 4], "alias_name": ["a", "b"], or cuts',
        )
    try:
        return matrix(*(tuple(part) if isinstance(part, list) else part for part in entry))
    except LayoutError as error:
        raise LayoutError(error.message, strategy=entry, legal=error.legal) from None


def spell_layout(layout: Layout) -> Any:
    """A layout without partial sums, as a list of cuts, or else with named axes:
    ``{"device_matrix": ..., "alias_name": ..., "layout": [...]}``.
    """
    cuts = layout.cuts
    if Layout.from_cuts(layout.devices, cuts) == layout:
        return list(cuts)
    axes = _Axes(layout.devices, layout.carried)
    return axes.words | {"layout": [axes.entry(digits) for digits in layout.dims or ()]}


def read_layout(words: Any, devices: int, shape: Sequence[int], padded: bool = False) -> Layout:
    """The layout of a tensor of `shape`.

    Args:
        words: the layout, as `spell_layout` writes it.
        devices: the number of devices.
        shape: the shape of the whole tensor.
        padded: True: cuts need not divide the dims.

    Raises:
        LayoutError: no layout of so many dims or devices; or cuts that do not divide.
    """
    layout = words
    if isinstance(words, Mapping):
        matrix, entry = _matrix(words), words.get("layout")
        if matrix is not None and isinstance(entry, list):
            layout = _entry(matrix, entry) if entry else Layout.replicated(devices, 0)
    if isinstance(layout, list):
        layout = Layout.from_cuts(devices, tuple(layout))
    if not isinstance(layout, Layout) or layout.dims is None:
        raise LayoutError(f"{words!r} is no layout", legal=f"cuts, one for each dim of {tuple(shape)}")
    if layout.devices != devices:
        raise LayoutError(
            f"the device matrix {words['device_matrix']} is of {layout.devices} devices, there are {devices}",
            legal=f"a product of {devices}",
        )
    layout.local_shape(layout.padded(shape) if padded and len(layout.dims) == len(shape) else shape)
    return layout


def spell_digits(devices: int, digits: Digits) -> Any:
    """Digits without a tensor, such as those of a partial sum that an operator passes on: a named device matrix."""
    if not digits:
        return []
    axes = _Axes(devices, digits)
    named = axes.entry(digits)
    return axes.words | {"axes": [named] if isinstance(named, str) else named}


def read_digits(words: Any, devices: int) -> Digits:
    """The digits that `spell_digits` wrote.

    Raises:
        LayoutError: they are not digits of `devices` devices.
    """
    if words == []:
        return ()
    matrix = _matrix(words) if isinstance(words, Mapping) else None
    names = words.get("axes") if isinstance(words, Mapping) else None
    if matrix is None or matrix.devices != devices or not isinstance(names, list) or not names:
        raise LayoutError(
            f"{words!r} names no axes of {devices} devices",
            legal='{"device_matrix": [2, 4], "alias_name": ["a", "b"], "axes": ["b"]}, or []',
        )
    layout = _entry(matrix, [names])
    return merge(sorted(layout.carried, key=lambda d: -d.stride))
