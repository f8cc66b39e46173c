"""A captured graph, its strategies and its layouts as JSON, and back.

1. Graphs (`write_graph`, `read_graph`): operators with their argument trees, values, the nesting of inputs and
   outputs. A graph is complete for planning, not for running: constants keep shape and dtype but lose their values,
   and plain objects that were given to a user's `torch.autograd.Function` are lost. Reading imports no module and
   runs no code of the file's writer: operators and classes are those that this process has already.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from ..autocast import Autocast, UnderAutocast, under
from ..capture.regions import Applied
from ..errors import LayoutError, PlanError, ShardwrightError, StrategyError, shown
from ..graph import Graph, Master, Op, Pieces, Recompute, Value, values_in
from ..json_files.json_reader import MIB, JsonObject, parse
from ..layout import Digit, Digits, Layout, beside, merge
from ..rules import Assignment, Bound, assignment_of
from ..torch_private import OpOverload, pytree

__all__ = [
    "fingerprint",
    "fingerprint_of",
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
_TORCH_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class UnsavedObject:
    """A stand-in for an object that a document does not hold; it has the object's repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


# -- writing -----------------------------------------------------------------------------------------------------------


def _leaf(x: object) -> object:
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
    for word, kind in _TORCH_KINDS.items():
        if isinstance(x, kind):
            return {word: str(x).removeprefix("torch.")}
    return {"object": repr(x)}


def _target(target: object) -> object:
    if isinstance(target, UnderAutocast):
        return {
            "autocast": [[name, _leaf(dtype)] for name, dtype in target.state.dtypes],
            "shares": target.state.shares,
            "target": _target(target.operator),
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


def _spec(spec: object) -> str | None:
    """The nesting of a tree as text; None where it has a class that cannot be written."""
    if spec is None:
        return None
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError):
        return None


def _value(value: Value) -> list[object]:
    master = [] if value.master is None else [[str(dtype).removeprefix("torch.") for dtype in value.master]]
    return [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad, *master]


def write_recompute(setting: Recompute) -> dict[str, object]:
    """The recomputation of an operator as a dict: ``call``, and the fields that differ from their default."""
    fields_and_defaults = {f.name: (getattr(setting, f.name), f.default) for f in fields(setting)}
    return {name: value for name, (value, default) in fields_and_defaults.items() if name == "call" or value != default}


def _op(op: Op) -> dict[str, object]:
    out: dict[str, object] = {"name": op.name, "target": _target(op.target), "args": [_leaf(x) for x in op.args]}
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


def write_graph(graph: Graph) -> dict[str, object]:
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
    return fingerprint_of(write_graph(graph))


def fingerprint_of(encoded: JsonObject) -> str:
    """The fingerprint of the graph that `encoded` is, as `write_graph` writes it.

    Raises:
        KeyError, TypeError, AttributeError: `encoded` was not written by `write_graph`.
    """
    ops = [{key: x for key, x in op.items() if key not in ("module", "source")} for op in encoded["ops"]]
    return hashlib.sha256(json.dumps({**encoded, "ops": ops}, sort_keys=True).encode()).hexdigest()[:16]


def packed(encoded: object) -> str:
    """JSON as one line of base64, compressed."""
    text = json.dumps(encoded, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


# -- reading -----------------------------------------------------------------------------------------------------------


#: Bytes of a captured graph, unpacked, at most. An operator takes some 250 bytes.
LONGEST = 64 * MIB


def unpacked(text: str, source: str = "", legal: str = "a file that Plan.save wrote") -> Any:
    """The value that `packed` was given.

    Args:
        text: the packed line.
        source: the file, as errors name it.
        legal: the legal files, for errors.

    Raises:
        PlanError: the text is cut short or damaged, or has more than `LONGEST` bytes when unpacked.
    """
    try:
        worker = zlib.decompressobj()
        content = worker.decompress(base64.b64decode(text, validate=True), LONGEST + 1)
        if len(content) > LONGEST:
            raise PlanError(
                f"the captured graph has more than {LONGEST:,} bytes when it is unpacked",
                source=source,
                legal=f"{legal}, of a graph of at most {LONGEST // MIB} MiB",
            )
        if not worker.eof or worker.unused_data:
            raise ValueError("it is cut short, or goes on after its end")
        encoded = content.decode()
    except (ValueError, zlib.error) as error:
        raise PlanError(f"the captured graph cannot be read: {error}", source=source, legal=legal) from None
    return parse(encoded, PlanError, "the captured graph", source, legal, lines=False)


def _read_spec(text: str | None, source: str) -> object:
    """The nesting that `_spec` has written.

    torch's own reader imports the modules of enums and of defaults of dicts. A plan that names a class which is not
    there yet is refused before.

    Raises:
        PlanError: a class that is not imported, by name.
        ValueError, TypeError, ...: the text was not written by `_spec`.
    """
    if text is None:
        return None
    for kind, module, path in _classes_of(text, source):
        found = _loaded(module, path)
        if found is None or (kind is Enum and not issubclass(found, Enum)):
            raise PlanError(
                f"the nesting of a value names the {kind.__name__} {shown(path)} of the module {shown(module)}, which "
                "is not imported here",
                source=source,
                legal="import what defines it before the plan is read",
            )
    return pytree.treespec_loads(text)


def _classes_of(text: str, source: str) -> Iterator[tuple[type, str, str]]:
    """The classes that a nesting names: `Enum` or `dict`, the module, the name of the class in it."""

    def read(encoded: str) -> object:
        return parse(encoded, PlanError, "the nesting of a value", source, "a file that Plan.save wrote", lines=False)

    stack: list[object] = [read(text)]
    while stack:
        encoded = stack.pop()
        if isinstance(encoded, list):
            stack += encoded
        elif isinstance(encoded, dict):
            if "__enum__" in encoded:
                module, _, path = str(encoded.get("fqn")).partition(":")
                yield Enum, module, path
            if "default_factory_module" in encoded:
                yield dict, str(encoded["default_factory_module"]), str(encoded.get("default_factory_name"))
            context = encoded.get("context")  # JSON within JSON; of other kinds of nodes the name of a class
            if isinstance(context, str) and context.lstrip()[:1] in ("[", "{"):
                stack.append(read(context))
            stack += encoded.values()


def _leaf_of(x: object, values: dict[str, Value]) -> Any:
    if isinstance(x, list):
        return [_leaf_of(y, values) for y in x]
    if not isinstance(x, dict):
        return x
    ((word, content),) = x.items()
    if word == "%":
        return values[content]
    if word == "tuple":
        return tuple(_leaf_of(y, values) for y in content)
    if word == "dict":
        return {_leaf_of(k, values): _leaf_of(v, values) for k, v in content}
    if word == "float":
        return float(content)
    if word == "complex":
        return complex(*(_leaf_of(y, values) for y in content))
    if word == "device":
        return torch.device(content)
    return _named(word, content) if word in _TORCH_KINDS else UnsavedObject(content)


def _named(word: str, name: Any) -> Any:
    """The value of torch of that name and kind. Names that torch would import at their first use are not looked up.

    Raises:
        ValueError: torch has no such value.
    """
    value = vars(torch).get(name)
    if not isinstance(value, _TORCH_KINDS[word]):
        raise ValueError(f"torch has no {word} {shown(name)}")
    return value


def _loaded(module: str, path: str) -> type | None:
    """A class of a module that this process has imported already; None where it has not, or has no such class.

    Nothing is imported: names are looked up where they are, and a module that would import them at their first use is
    not asked.
    """
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found if isinstance(found, type) else None


def _target_of(encoded: Any, name: str, source: str | None) -> object:
    """The operator of a written target.

    Raises:
        PlanError: it is not registered in this process.
    """
    if isinstance(encoded, dict) and "autocast" in encoded:
        state = Autocast(tuple((kind, _leaf_of(dtype, {})) for kind, dtype in encoded["autocast"]), encoded["shares"])
        return under(_target_of(encoded["target"], name, source), state)
    if isinstance(encoded, dict):
        return _applied(encoded, name, source)
    namespace, _, rest = encoded.partition(".")
    packet, _, overload = rest.rpartition(".")
    found = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    if not isinstance(found, OpOverload):
        raise PlanError(
            f"there is no operator {encoded} in this process",
            operator=name,
            source=source,
            legal="import what registers it (torch.library.custom_op, sw.rule) before the plan is read; a command "
            "takes --import MODULE",
        )
    return found


def _applied(encoded: JsonObject, name: str, source: str | None) -> Applied:
    """A user's function, looked up in the module that defined it; nothing is imported."""
    module, _, path = encoded["function"].partition(":")
    found = _loaded(module, path)
    if found is None or not issubclass(found, torch.autograd.Function):
        raise PlanError(
            f"there is no torch.autograd.Function {path} in the module {module}",
            operator=name,
            source=source,
            legal=f"import {module} before the plan is read",
        )
    leaves = [
        torch.empty(0, device="meta") if i in encoded["places"] else _leaf_of(x, {})
        for i, x in enumerate(encoded["leaves"])
    ]
    made = Applied(found, leaves, _read_spec(encoded["spec"] or None, source or name))
    made.differentiable = tuple(encoded["differentiable"])
    return made


def recompute_of(encoded: JsonObject | None) -> Recompute | None:
    """The recomputation that `write_recompute` wrote; None for None.

    Raises:
        TypeError: `encoded` has other fields or types.
    """
    if encoded is None:
        return None
    made = Recompute(**encoded)
    kinds = {**dict.fromkeys(asdict(made), bool), "call": int, "path": str}
    if any(type(getattr(made, name)) is not kind for name, kind in kinds.items()):
        raise TypeError(f"{encoded!r}")
    return made


def read_graph(encoded: dict[str, object], source: str = "", expected: str | None = None) -> Graph:
    """The graph that `write_graph` wrote, constants as meta tensors. Nothing is imported.

    Args:
        encoded: the graph, as it was read.
        source: the file, as errors name it.
        expected: the fingerprint that it must have, which is compared before the graph is interpreted; None: none.

    Raises:
        PlanError: another fingerprint; an operator or class that this process does not have, by name; `encoded` was not
            written by `write_graph`.
    """
    legal = "a file that Plan.save wrote"
    try:
        if expected is not None and (found := fingerprint_of(encoded)) != expected:
            raise PlanError(
                f"the captured graph is {found}, the plan is of {shown(expected)}", source=source, legal=legal
            )
        return _graph(encoded, source)
    except ShardwrightError:
        raise
    except Exception as error:  # of any kind: what was captured is interpreted by torch's own functions too
        raise PlanError(
            f"the captured graph cannot be read: Plan.save writes no such graph ({type(error).__name__}: {error})",
            source=source,
            legal=legal,
        ) from error


def _graph(encoded: JsonObject, source: str) -> Graph:

    def value(name: str, shape: list[int], dtype: str, grad: bool, master: list[object] | None = None) -> Value:
        return Value(
            name,
            tuple(shape),
            _named("dtype", dtype),
            grad,
            None if master is None else Master(*(_named("dtype", each) for each in master)),
        )

    values = {name: value(name, *rest) for name, rest in encoded["values"].items()}
    ops = []
    for op in encoded["ops"]:
        args = tuple(_leaf_of(x, values) for x in op["args"])
        kwargs = {key: _leaf_of(x, values) for key, x in op.get("kwargs", {}).items()}
        inputs = tuple(values[n] for n in op["inputs"]) if "inputs" in op else values_in((args, kwargs))
        outputs = tuple(None if n is None else values[n] for n in op["outputs"])
        line = op.get("source", "")
        ops.append(
            Op(
                op["name"],
                _target_of(op["target"], op["name"], line or None),
                args,
                kwargs,
                inputs,
                outputs,
                op.get("module", ""),
                line,
                None,
                op.get("origin"),
                op.get("number", 0),
                micro=Pieces(*op["micro"]) if "micro" in op else None,
                fast=op.get("fast", False),
            )
        )
    constants = {
        name: torch.empty(shape, dtype=_leaf_of(dtype, {}), device="meta")
        for name, (shape, dtype) in encoded["constants"].items()
    }
    in_spec, out_spec = (_read_spec(encoded[which], source) for which in ("in_spec", "out_spec"))
    return Graph(
        tuple(values[n] for n in encoded["inputs"]),
        {name: value(*rest) for name, rest in encoded["parameters"].items()},
        {name: value(*rest) for name, rest in encoded["buffers"].items()},
        constants,
        tuple(ops),
        tuple(_leaf_of(x, values) for x in encoded["outputs"]),
        in_spec,
        out_spec,
        {name: values[n] for name, n in encoded["updates"].items()},
        dict(encoded["aliases"]),
        encoded.get("batch"),
        tuple(encoded.get("changed", ())),
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
    def encoded(self) -> dict[str, list[int] | list[str]]:
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


def spell_assignment(bound: Bound, assignment: Assignment) -> JsonObject:
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

    def written(sides: Sequence[Sequence[tuple[int, ...]]]) -> list[list[object]]:
        return [[axes.entry(bound.dim_digits(dim, assignment) or ()) for dim in dims] for dims in sides]

    encoded = axes.encoded | {"in_strategy": written(bound.inputs)}
    seen = {factor for dims in bound.inputs for dim in dims for factor in dim}
    if any(digits and i not in seen for i, digits in enumerate(assignment.digits)):
        encoded["leaves"] = written(bound.outputs)
    return encoded


def read_assignment(bound: Bound, encoded: Mapping[str, object], devices: int) -> Assignment:
    """The assignment that the fields of a line describe.

    Args:
        bound: the operator's notation, bound to its shapes.
        encoded: the fields.
        devices: the number of devices.

    Raises:
        StrategyError, LayoutError: a strategy that the operator cannot follow, with the legal ones.
    """
    entries = encoded.get("in_strategy")
    if not isinstance(entries, list):
        raise StrategyError(f"its in_strategy is {entries!r}", legal="a list with one entry per tensor input")
    matrix = _matrix(encoded)
    assignment = assignment_of(bound, tuple(_entry(matrix, entry) for entry in entries), devices)
    if "leaves" not in encoded:
        return assignment
    leaves = encoded["leaves"]
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
    by_outputs = bound.follow(layouts, of_outputs=True)
    if by_outputs is None:
        raise StrategyError(
            f"the outputs {list(bound.out_shapes)} cannot be cut so",
            strategy=leaves,
            legal=f"cuts that divide, of dims that may be split: {_splittable(bound)}",
        )
    merged = bound.cut_by(devices, {i: a or b for i, (a, b) in enumerate(zip(assignment.digits, by_outputs.digits))})
    if (
        any(a and b and a != b for a, b in zip(assignment.digits, by_outputs.digits))
        or not beside(devices, merged.used)
        or not bound.is_consistent(merged)
    ):
        raise StrategyError(
            "in_strategy and leaves do not agree",
            strategy=dict(encoded),
            legal="the same axes for dims that are cut alike, each axis once",
        )
    return merged


def _splittable(bound: Bound) -> str:
    return ", ".join(f"{f.name} ({f.size})" for f in bound.factors if f.splittable and f.size > 1) or "none"


def _matrix(encoded: Mapping[str, object]) -> Layout | None:
    """The named device matrix of a line, or None.

    Raises:
        LayoutError: sizes or names that make no device matrix.
    """
    if "device_matrix" not in encoded and "alias_name" not in encoded:
        return None
    try:
        return Layout(encoded.get("device_matrix"), encoded.get("alias_name"))  # type: ignore[arg-type]
    except LayoutError as error:
        raise LayoutError(error.message, legal=error.legal) from None  # without the source line of this reader


def _entry(matrix: Layout | None, entry: object) -> Any:
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


def spell_layout(layout: Layout) -> object:
    """A layout without partial sums, as a list of cuts, or else with named axes:
    ``{"device_matrix": ..., "alias_name": ..., "layout": [...]}``.
    """
    cuts = layout.cuts
    if Layout.from_cuts(layout.devices, cuts) == layout:
        return list(cuts)
    axes = _Axes(layout.devices, layout.carried)
    return axes.encoded | {"layout": [axes.entry(digits) for digits in layout.dims or ()]}


def read_layout(encoded: Any, devices: int, shape: Sequence[int], padded: bool = False) -> Layout:
    """The layout of a tensor of `shape`.

    Args:
        encoded: the layout, as `spell_layout` writes it.
        devices: the number of devices.
        shape: the shape of the whole tensor.
        padded: True: cuts need not divide the dims.

    Raises:
        LayoutError: no layout of so many dims or devices; or cuts that do not divide.
    """
    layout = encoded
    if isinstance(encoded, Mapping):
        matrix, entry = _matrix(encoded), encoded.get("layout")
        if matrix is not None and isinstance(entry, list):
            layout = _entry(matrix, entry) if entry else Layout.replicated(devices, 0)
    if isinstance(layout, list):
        layout = Layout.from_cuts(devices, tuple(layout))
    if not isinstance(layout, Layout) or layout.dims is None:
        raise LayoutError(f"{encoded!r} is no layout", legal=f"cuts, one for each dim of {tuple(shape)}")
    if layout.devices != devices:
        raise LayoutError(
            f"the device matrix {encoded['device_matrix']} is of {layout.devices} devices, there are {devices}",
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
    return axes.encoded | {"axes": [named] if isinstance(named, str) else named}


def read_digits(encoded: object, devices: int) -> Digits:
    """The digits that `spell_digits` wrote.

    Raises:
        LayoutError: they are not digits of `devices` devices.
    """
    if encoded == []:
        return ()
    matrix = _matrix(encoded) if isinstance(encoded, Mapping) else None
    names = encoded.get("axes") if isinstance(encoded, Mapping) else None
    if matrix is None or matrix.devices != devices or not isinstance(names, list) or not names:
        raise LayoutError(
            f"{encoded!r} names no axes of {devices} devices",
            legal='{"device_matrix": [2, 4], "alias_name": ["a", "b"], "axes": ["b"]}, or []',
        )
    layout = _entry(matrix, [names])
    return merge(sorted(layout.carried, key=lambda d: -d.stride))
