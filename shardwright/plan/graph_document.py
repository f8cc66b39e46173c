"""A captured graph as JSON, and back: operators with their argument trees, values, how inputs and outputs nest.

What planning needs is there. What only running needs is not: the values of constants, of which shapes and dtypes stay,
and the plain objects that were given to a user's `torch.autograd.Function`.

Values are written once, by name. In an argument tree a leaf that JSON has no word for is an object with one key:

    {"%": "matmul1"} a value    {"tuple": [...]}    {"dict": [[key, value], ...]}    {"dtype": "float32"}
    {"float": "inf"}            {"device": "cpu"}   {"complex": [0.0, 1.0]}          {"object": "its repr"}
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
import zlib
from dataclasses import asdict, fields
from typing import Any

import torch

from ..autocast import Autocast, UnderAutocast, under
from ..errors import PlanError
from ..graph import Graph, Master, Op, Pieces, Recompute, Value, values_in
from ..opaque import Applied
from ..torch_private import pytree

__all__ = ["fingerprint", "packed", "read_graph", "recompute_of", "unpacked", "write_graph", "write_recompute"]

#: Words of torch that stand among arguments -> their class.
_WORDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class Unkept:
    """An object that a document does not hold; it looks as it did."""

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
        return {"autocast": [[name, _leaf(dtype)] for name, dtype in target.state.dtypes], "shares": target.state.shares,
                "target": _target(target.inner)}
    if isinstance(target, Applied):
        function = target.described_as
        return {"function": f"{function.__module__}:{function.__qualname__}",
                "leaves": [_leaf(x) for x in target.leaves], "places": target.places, "spec": _spec(target.spec),
                "differentiable": list(target.differentiable)}
    return str(target)


def _spec(spec: Any) -> str | None:
    """How a tree nests; None where a class in it cannot be written."""
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
    """What is said of an operator's recomputation, without what is as ever."""
    held = {f.name: (getattr(said, f.name), f.default) for f in fields(said)}
    return {name: value for name, (value, default) in held.items() if name == "call" or value != default}


def _op(op: Op) -> dict[str, Any]:
    out: dict[str, Any] = {"name": op.name, "target": _target(op.target), "args": [_leaf(x) for x in op.args]}
    if op.kwargs:
        out["kwargs"] = {key: _leaf(x) for key, x in op.kwargs.items()}
    if op.inputs != values_in((op.args, op.kwargs)):
        out["inputs"] = [v.name for v in op.inputs]
    out["outputs"] = [None if v is None else v.name for v in op.outputs]
    for name in ("module", "source", "origin", "number"):
        if getattr(op, name):
            out[name] = getattr(op, name)
    if op.micro is not None:
        out["micro"] = list(op.micro)
    return out


def write_graph(graph: Graph) -> dict[str, Any]:
    """A graph as lists, dicts, numbers and strings; without marks and recomputation, which a plan's lines have."""
    values = {v.name: v for side in (graph.inputs, *(side for op in graph.ops for side in (op.inputs, op.outputs)))
              for v in side if v is not None}
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
        "in_spec": _spec(graph.in_spec), "out_spec": _spec(graph.out_spec), **batch,
        **({"changed": list(graph.changed)} if graph.changed else {})}


def fingerprint(graph: Graph) -> str:
    """A short hash of a graph: its operators, their arguments, shapes and dtypes; not where they are called."""
    said = write_graph(graph)
    said["ops"] = [{key: x for key, x in op.items() if key not in ("module", "source")} for op in said["ops"]]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def packed(said: Any) -> str:
    """JSON in one line of base64, compressed."""
    text = json.dumps(said, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


# -- reading -----------------------------------------------------------------------------------------------------------


def unpacked(text: str) -> Any:
    """What `packed` packed.

    Raises:
        ValueError: it is cut short or damaged.
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
    (word, held), = x.items()
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
    return getattr(torch, held) if word in _WORDS else Unkept(held)


def _target_of(said: Any, name: str, source: str | None) -> Any:
    """The operator of that name.

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
        raise PlanError(f"there is no operator {said} in this process", operator=name, source=source,
                        legal="import what registers it (torch.library.custom_op, sw.rule) before the plan is read"
                        ) from None


def _applied(said: dict[str, Any], name: str, source: str | None) -> Applied:
    """A user's function: looked up where it was defined, and nothing imported for it."""
    module, _, path = said["function"].partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, torch.autograd.Function)):
        raise PlanError(f"there is no torch.autograd.Function {path} in the module {module}", operator=name,
                        source=source, legal=f"import {module} before the plan is read")
    leaves = [torch.empty(0, device="meta") if i in said["places"] else _leaf_of(x, {})
              for i, x in enumerate(said["leaves"])]
    made = Applied(found, leaves, pytree.treespec_loads(said["spec"]) if said["spec"] else None)
    made.differentiable = tuple(said["differentiable"])
    return made


def recompute_of(said: dict[str, Any] | None) -> Recompute | None:
    """What `write_recompute` wrote.

    Raises:
        TypeError: it says something else.
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
        KeyError, TypeError, ValueError: what no `write_graph` wrote.
    """
    def value(name: str, shape: list, dtype: str, grad: bool, master: list | None = None) -> Value:
        return Value(name, tuple(shape), getattr(torch, dtype), grad,
                     None if master is None else Master(*(getattr(torch, each) for each in master)))
    values = {name: value(name, *rest) for name, rest in said["values"].items()}
    ops = []
    for op in said["ops"]:
        args = tuple(_leaf_of(x, values) for x in op["args"])
        kwargs = {key: _leaf_of(x, values) for key, x in op.get("kwargs", {}).items()}
        inputs = tuple(values[n] for n in op["inputs"]) if "inputs" in op else values_in((args, kwargs))
        outputs = tuple(None if n is None else values[n] for n in op["outputs"])
        source = op.get("source", "")
        ops.append(Op(op["name"], _target_of(op["target"], op["name"], source or None), args, kwargs, inputs, outputs,
                      op.get("module", ""), source, None, op.get("origin"), op.get("number", 0),
                      micro=Pieces(*op["micro"]) if "micro" in op else None))
    constants = {name: torch.empty(shape, dtype=_leaf_of(dtype, {}), device="meta")
                 for name, (shape, dtype) in said["constants"].items()}
    specs = [None if said[which] is None else pytree.treespec_loads(said[which]) for which in ("in_spec", "out_spec")]
    return Graph(tuple(values[n] for n in said["inputs"]),
                 {name: value(*rest) for name, rest in said["parameters"].items()},
                 {name: value(*rest) for name, rest in said["buffers"].items()}, constants, tuple(ops),
                 tuple(_leaf_of(x, values) for x in said["outputs"]), *specs,
                 {name: values[n] for name, n in said["updates"].items()}, dict(said["aliases"]), said.get("batch"),
                 tuple(said.get("changed", ())))
