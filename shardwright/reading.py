"""From an exported program to a `Graph`.

Mark nodes name their operators and go, in-place forms become plain ones, regions are inlined with what they do written
out, tied parameters become one value, each operator keeps its module path and the user's line.
"""

from __future__ import annotations

import math
import operator
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from .autocast import Autocast, Like, casts_of, entered, under, with_dtype
from .errors import CaptureError
from .graph import Graph, Op, Value, map_values, values_in
from .marks import Operator
from .normalisation import batch_norm, without_side_effects
from .opaque import OPAQUE, Applied
from .recompute import EDGE, Settings, recomputed_ops
from .vmapped import regions, written_out

__all__ = ["MarkUse", "Reader", "bare", "is_users", "user_frame"]

aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
_OURS = __file__.rsplit("/", 1)[0] + "/"
_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"


@dataclass(frozen=True)
class MarkUse:
    """A mark on one operator call.

    Args:
        in_strategy, out_strategy: as the user gave them.
        source: the line that gave them.
        order: ``order[i]`` is the index in `Op.inputs` of the i-th entry of the in_strategy, which stands in the order
            of the user's call.
        priority: as of `shardwright.shard`.
    """

    in_strategy: Any
    out_strategy: Any
    source: str
    order: tuple[int, ...]
    priority: int = 0


def is_users(file: str) -> bool:
    """Whether a file is neither ours nor torch's nor Python's own; installed packages may be the user's model."""
    return not (file.startswith((_OURS, _TORCH, "<")) or file.startswith(_PYTHON) and "-packages/" not in file)


def user_frame(frames: list[tuple[str, int]]) -> str:
    """The innermost frame that is the user's own, as ``file.py:41``."""
    return next((f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in reversed(frames) if is_users(file)), "")


def _source(node: torch.fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    return user_frame([(m["file"], int(m["line"])) for m in _FRAME.finditer(trace)])


def _module_path(node: torch.fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else path


def bare(name: str, prefix: str) -> str:
    return name.removeprefix(prefix + ".") if prefix else name


class _Cell:
    """A tensor variable of the user's program: in-place operators change what it holds."""

    def __init__(self, value: Value, base: _Cell | None = None) -> None:
        self.value = value
        self.base = base.base or base if base is not None else None  # the cell that it is a view of
        self.stale: torch.fx.Node | None = None
        self.views: list[_Cell] = []


class Reader:
    """Reads an exported program into a `Graph`."""

    def __init__(self, program: Any, calls: list[Operator], names: dict[int, str], prefix: str,
                 aliases: dict[str, str], called: dict[str, str], functions: list[Applied],
                 regions: list[Settings]) -> None:
        self.called, self.functions, self.regions = called, functions, regions
        self.program, self.calls, self.prefix, self.aliases = program, calls, prefix, aliases
        self.mark_names = names
        self.ops: list[Op] = []
        self.parameters: dict[str, Value] = {}
        self.cells: dict[torch.fx.Node, Any] = {}
        self.updates: dict[str, Value] = {}
        self.state: dict[int, tuple[InputKind, str]] = {}  # cells of parameters and buffers
        self.used: set[str] = set()
        self.begun: dict[int, int] = {}                    # marked call -> how many operators came before it
        self.entries: dict[torch.fx.Node, int] = {}        # mark node -> which tensor input of the call it is
        self.places: list[dict[int, int]] = []             # per operator: index of an input -> its place in the call
        self.attached: set[int] = set()
        self.named: set[int] = set()                       # marked operators whose bare name is taken
        self.drawing: list[str] = []                       # random operators, in order
        self.casting = Autocast()                          # the state of autocast
        self.casts: dict[tuple, Value] = {}                # (value, dtype, module) -> the value cast, while that is shared
        self.uncast: dict[str, Value] = {}                 # a cast made for autocast -> its value
        self.entered: dict[int, tuple[int, dict]] = {}     # recomputed region -> how many operators, which casts came before it
        self.spans: list[tuple[int, int, int]] = []        # region, its first operator, one past its last

    def unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.used:
            candidate, count = f"{name}_{count}", count + 1
        self.used.add(candidate)
        return candidate

    # -- the whole program --

    def graph(self) -> Graph:
        signature, constants = self.program.graph_signature, {}
        inputs: list[Value] = []
        parameters, buffers = self.parameters, {}
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            meta = node.meta.get("val")
            if not isinstance(meta, torch.Tensor):
                self.cells[node] = meta if spec.kind is not InputKind.USER_INPUT else getattr(spec.arg, "value", meta)
                continue
            if spec.kind is InputKind.USER_INPUT:
                value = Value(self.unique(node.name), tuple(meta.shape), meta.dtype, meta.requires_grad)
                inputs.append(value)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                value = Value(self.unique(spec.target), tuple(meta.shape), meta.dtype)
                constants[value.name] = self.program.constants[spec.target]
            else:
                name = bare(spec.target, self.prefix)
                name = self.aliases.get(name, name)
                table = parameters if spec.kind is InputKind.PARAMETER else buffers
                if name not in table:
                    self.used.add(name)
                    table[name] = Value(name, tuple(meta.shape), meta.dtype,
                                        spec.kind is InputKind.PARAMETER and meta.requires_grad)
                value = table[name]
            cell = _Cell(value)
            self.cells[node] = cell
            if spec.kind in (InputKind.BUFFER, InputKind.PARAMETER):
                self.state[id(cell)] = (spec.kind, value.name)
        for mark_path in self.mark_names.values():
            self.used.add(mark_path)
        result = self.walk(self.program.graph, self.program.graph_module)
        kept = [self.leaf(r) for r, spec in zip(result, signature.output_specs, strict=True)
                if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)]
        graph = Graph(tuple(inputs), parameters, buffers, constants,
                      tuple(recomputed_ops(self.ops, self.regions, self.spans, self.mark_names)), tuple(kept),
                      self.program.call_spec.in_spec, self.program.call_spec.out_spec, self.updates, self.aliases)
        return _without_dead(graph)

    def leaf(self, held: Any) -> Any:
        return self.read(held) if isinstance(held, _Cell) else held

    def read(self, cell: _Cell) -> Value:
        if cell.stale is not None:
            raise CaptureError(f"a tensor is used after {cell.stale.target} changed, in place, memory that it shares",
                               source=_source(cell.stale) or None, legal="the operator without the underscore")
        return cell.value

    def walk(self, graph: torch.fx.Graph, owner: torch.fx.GraphModule) -> list[Any]:
        for node in regions(graph.nodes):
            if isinstance(node, list):
                self.vmapped(node)
                continue
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self.cells[node] = getattr(owner, node.target)
            elif node.op == "output":
                return [self.cells[a] if isinstance(a, torch.fx.Node) else a for a in node.args[0]]
            elif node.op == "call_function":
                self.call(node)
            else:
                raise CaptureError(f"unexpected node {node.format_node()}", source=_source(node))
        return []

    # -- one node --

    def call(self, node: torch.fx.Node) -> None:
        target = node.target
        if target is torch.ops.shardwright.mark.default:
            self.mark(node)
        elif target is EDGE:
            self.region_edge(*node.args)
        elif target is OPAQUE:
            self.cells[node] = self.record(node, self.functions[node.args[1]],
                                           tuple(self.leaf(self.cells[a]) for a in node.args[0]), {})
            if self.casting:
                self.ops[-1] = replace(self.ops[-1], target=under(self.ops[-1].target, self.casting))
        elif target is operator.getitem:
            held = self.cells[node.args[0]]
            self.cells[node] = held[node.args[1]]
        elif isinstance(target, torch._ops.OpOverload):
            self.operator(node, target)
        elif target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self.grad_mode(node)
        elif target is torch.ops.higher_order.wrap_with_autocast:
            self.autocast(node)
        else:
            raise CaptureError(f"{target} holds a program of its own that is not understood", source=_source(node))

    def grad_mode(self, node: torch.fx.Node) -> None:
        """A region under torch.no_grad: inlined, what leaves it carries no gradient."""
        enabled, sub, *args = node.args
        results = self.inlined(sub, args)
        if not enabled:
            results = [self.record(node, aten.detach.default, (self.read(r),), {})[0]
                       if isinstance(r, _Cell) else r for r in results]
        self.cells[node] = results

    def autocast(self, node: torch.fx.Node) -> None:
        """A region under torch.autocast: inlined, its casts written out."""
        device_type, dtype, enabled, _, sub, *args = node.args
        outside, casts = self.casting, self.casts
        self.casting = outside.within(device_type, dtype, enabled)
        self.casts = casts if outside else {}
        self.cells[node] = self.inlined(sub, args)
        self.casting, self.casts = outside, casts

    def vmapped(self, region: list[torch.fx.Node]) -> None:
        with entered(self.casting, "cpu", *(name for name, _ in self.casting.dtypes)):
            program, taken, made = written_out(region, lambda node: self.leaf(self.cells[node]))
        for placeholder, node in zip((n for n in program.graph.nodes if n.op == "placeholder"), taken):
            self.cells[placeholder] = self.cells[node]
        outside, self.casting = self.casting, Autocast()  # its casts are written out
        self.cells.update(zip(made, self.walk(program.graph, program)))
        self.casting = outside

    def inlined(self, sub: torch.fx.Node, args: list) -> list[Any]:
        """What a region gives; its placeholders are the arguments."""
        owner = self.cells[sub]
        for placeholder, argument in zip((n for n in owner.graph.nodes if n.op == "placeholder"), args):
            self.cells[placeholder] = self.cells[argument] if isinstance(argument, torch.fx.Node) else argument
        return self.walk(owner.graph, owner)

    def cast(self, node: torch.fx.Node, target: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict, bool]:
        """The arguments as autocast gives them to an operator, and whether the operator has to run under autocast.

        Args:
            args, kwargs: the node's arguments, with values in the place of nodes.
        """
        nodes = [a for a in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(a, torch.fx.Node)
                 and isinstance(self.cells[a], _Cell)]
        devices = iter([n.meta["val"].device for n in nodes])
        decided = casts_of(target, *map_values((args, kwargs), lambda v: Like(v.shape, v.dtype, next(devices))),
                           self.casting)
        recorded = tuple(m.dtype for m in pytree.tree_leaves(node.meta.get("val")) if isinstance(m, torch.Tensor))
        if decided.made is not None and decided.made != recorded:
            raise CaptureError(f"internal error: under {self.casting} {target} of {[v.dtype for v in values_in((args, kwargs))]} "
                               f"was captured with results of {[*recorded]}, and its casts give {[*decided.made]}",
                               operator=node.name, source=_source(node) or None,
                               legal="with torch.autocast(..., enabled=False) around it, and its casts written there")
        to = iter(decided.inputs)
        args, kwargs = map_values((args, kwargs), lambda v: self.cast_to(node, v, next(to)))
        if decided.dtype is not None:
            args, kwargs = with_dtype(target, args, kwargs, decided.dtype)
        return args, kwargs, decided.whole

    def cast_to(self, node: torch.fx.Node, value: Value, dtype: torch.dtype | None) -> Value:
        """The value in another dtype, for the operator of `node`."""
        if dtype is None or dtype == value.dtype:
            return value
        # Modules that share a parameter may lie in different stages of a pipeline: each casts it.
        key = value.name, dtype, _module_path(node, self.prefix) if value.name in self.parameters else ""
        cast = self.casts.get(key)
        if cast is None:
            name = self.unique(f"{value.name}_{str(dtype).removeprefix('torch.')}")
            cast = Value(name, value.shape, dtype, value.requires_grad)
            self.places.append({})
            self.ops.append(Op(name, aten.to.dtype, (value, dtype), {}, (value,), (cast,),
                               _module_path(node, self.prefix), _source(node)))
            self.uncast[name] = value
            if self.casting.shares:
                self.casts[key] = cast
        return cast

    def mark(self, node: torch.fx.Node) -> None:
        source, call, place = node.args
        self.cells[node] = self.cells[source]
        if place >= 0:
            self.begun.setdefault(call, len(self.ops))
            self.entries[node] = place
        elif self.calls[call].in_strategy is not None or self.calls[call].out_strategy is not None:
            begin = self.begun.get(call, len(self.ops))
            self.attach(self.calls[call], call, list(range(begin, len(self.ops))))

    def region_edge(self, call: int, entering: bool) -> None:
        if entering:
            self.entered[call] = len(self.ops), dict(self.casts)
        else:
            begin, self.casts = self.entered[call]  # the casts made in it are its own: they are dropped with it
            self.spans.append((call, begin, len(self.ops)))

    def attach(self, marked: Operator, call: int, inside: list[int]) -> None:
        """Name the one operator recorded since the marked call began, and put the mark on it. Views beside it do not
        count: where it has them, the strategy speaks of the operator's own inputs. Nor does what reads buffers alone, as
        a batch norm's count of batches."""
        if call in self.attached:
            return  # a further output of the same call
        self.attached.add(call)
        name = self.mark_names.get(id(marked))
        if len(inside) > 1:
            buffers = {held for kind, held in self.state.values() if kind is InputKind.BUFFER}
            inside = [i for i in inside if not _is_view(self.ops[i].target) and self.ops[i].name not in self.uncast and not (
                self.ops[i].inputs and buffers.issuperset(v.name for v in self.ops[i].inputs))] or inside
        if len(inside) != 1:
            kinds = ", ".join(self.ops[i].kind for i in inside) or "none"
            modules = [self.ops[i].module for i in inside]
            single = [f"{self.ops[i].module} ({self.ops[i].kind})" for i in inside
                      if self.ops[i].module != name and modules.count(self.ops[i].module) == 1]
            raise CaptureError(f"a mark names one operator; this one holds {len(inside)}: {kinds}", operator=name,
                               source=marked.source, strategy=marked.in_strategy,
                               legal="shard() on each operator by itself" + (": " + ", ".join(single)) * bool(single))
        op, places = self.ops[inside[0]], self.places[inside[0]]
        own = list(self.parameters)  # after its inputs a module's own weights, as it holds them
        given = [self.uncast.get(v.name, v).name for v in op.inputs]
        order = tuple(sorted(range(len(given)), key=lambda i: (
            places.get(i, len(given)), own.index(given[i]) if given[i] in own else len(own), i)))
        path = op.name
        if name is not None:  # the first call has the bare name
            path = self.unique(name) if id(marked) in self.named else name
            self.named.add(id(marked))
        use = MarkUse(marked.in_strategy, marked.out_strategy, marked.source, order, marked.priority)
        self.ops[inside[0]] = replace(op, name=path, mark=use)

    def operator(self, node: torch.fx.Node, target: Any) -> None:
        written = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not target._schema.returns and not written:
            return  # a check of what export knows by now
        args, kwargs = pytree.tree_map(
            lambda a: self.leaf(self.cells[a]) if isinstance(a, torch.fx.Node) else a, (node.args, dict(node.kwargs)))
        if self.casting:
            args, kwargs, whole = self.cast(node, target, tuple(args), kwargs)
            first = len(self.ops)
            self.applied(node, target, written, args, kwargs)
            if whole:
                self.ops[first:] = [replace(op, target=under(op.target, self.casting)) for op in self.ops[first:]]
            return
        self.applied(node, target, written, tuple(args), kwargs)

    def applied(self, node: torch.fx.Node, target: Any, written: list[Any], args: tuple, kwargs: dict) -> None:
        """Record an operator in its plain form: without writes into its arguments, without side effects."""
        if written:
            self.in_place(node, target, len(written), tuple(args), kwargs)
            return
        names = [a.name for a in target._schema.arguments]
        named = dict(zip(names, args)) | kwargs
        silent = without_side_effects(target, named)
        if silent is not None:
            self.running_statistics(node, silent, named, dict(zip(names, node.args)) | dict(node.kwargs))
            return
        cells = self.record(node, target, tuple(args), kwargs)
        base = self.cells.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if _is_view(target) and isinstance(base, _Cell):
            if node.args[0] in self.entries:
                self.entries[node] = self.entries[node.args[0]]
            for cell in cells:
                cell.base = base.base or base
                cell.base.views.append(cell)
        self.cells[node] = cells[0] if isinstance(node.meta.get("val"), torch.Tensor) else cells

    def in_place(self, node: torch.fx.Node, target: Any, written: int, args: tuple, kwargs: dict) -> None:
        """``x.relu_()`` becomes a plain relu, and the variable x holds its result from here on."""
        changed = self.cells[node.args[0]] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        plain = _functional(target)
        if plain is None or written != 1 or not isinstance(changed, _Cell):
            raise CaptureError(f"{target} writes into its arguments and has no plain form", source=_source(node) or None,
                               legal="an operator that returns its result")
        old = changed.value
        if target is aten.copy_.default and (args[1].shape, args[1].dtype) == (old.shape, old.dtype):
            changed.value = args[1]
        else:
            changed.value = self.record(node, plain, args, kwargs)[0].value
        if (changed.value.shape, changed.value.dtype) != (old.shape, old.dtype):
            raise CaptureError(f"{target} would change the type or shape of the tensor it writes to",
                               source=_source(node) or None)
        self.changed(node, changed)
        self.cells[node] = changed

    def running_statistics(self, node: torch.fx.Node, target: Any, named: dict[str, Any], nodes: dict[str, Any]
                           ) -> None:
        """A normalisation that changes its running statistics: `target` returns them."""
        if target is batch_norm:
            path = _module_path(node, self.prefix)
            count = f"{path}.num_batches_tracked" if path else "num_batches_tracked"
            count = self.aliases.get(count, count)
            counts = (c for c in self.cells.values() if self.state.get(id(c)) == (InputKind.BUFFER, count))
            named["tracked"] = next(map(self.read, counts), None) if math.isnan(named["momentum"]) else None
        args = tuple(named[a.name] for a in target._schema.arguments)
        held = [self.cells[nodes[name]] for name in ("running_mean", "running_var")]
        out, *new = self.record(node, target, args, {}, [c.value for c in held])
        for cell, made in zip(held, new):
            cell.value = made.value
            self.changed(node, cell)
        self.cells[node] = out

    def changed(self, node: torch.fx.Node, changed: _Cell) -> None:
        """A variable holds another value from here on: noted where it is a buffer, refused where that cannot be."""
        root = changed.base or changed
        kind, name = self.state.get(id(root), (None, ""))
        if kind is InputKind.PARAMETER:
            raise CaptureError(f"the model changes its parameter {name!r} in place", source=_source(node) or None,
                               legal="a change outside of the model's forward")
        if kind is InputKind.BUFFER:
            if changed is not root:
                raise CaptureError(f"the model changes a part of its buffer {name!r} in place",
                                   source=_source(node) or None, legal=f"a change of the whole of {name!r}")
            self.updates[name] = changed.value
        for cell in [root, *root.views]:
            if cell is not changed:
                cell.stale = node

    def record(self, node: torch.fx.Node, target: Any, args: tuple, kwargs: dict, further: Sequence[Value] = ()
               ) -> list[_Cell]:
        """Append an operator; its outputs' cells. `further`: like these are outputs that the node does not have."""
        meta = node.meta.get("val")
        metas = list(meta) if isinstance(meta, (tuple, list)) else [meta]
        if any(isinstance(s, _SYMBOLIC) for m in metas for s in (m.shape if isinstance(m, torch.Tensor) else (m,))):
            on = [tuple(v.shape) for v in values_in((args, kwargs))]
            raise CaptureError(f"what {target} gives, called on {on}, depends on the values of tensors",
                               operator=node.name, source=_source(node) or None,
                               legal="shapes and numbers that do not depend on the values of tensors")
        wish = target.__name__ if isinstance(target, Applied) else node.name
        flowing = target.differentiable if isinstance(target, Applied) else _flowing(target, args, kwargs, len(metas))
        name = self.unique(wish.rstrip("_") or wish)
        inputs = values_in((args, kwargs))
        grad = any(v.requires_grad for v in inputs) and target is not aten.detach.default
        outputs = tuple(
            Value(name if len(metas) + len(further) == 1 else f"{name}.{i}", tuple(m.shape), m.dtype,
                  grad and flowing[i] and (m.dtype.is_floating_point or m.dtype.is_complex))
            if isinstance(m, torch.Tensor) else None
            for i, m in enumerate(metas))
        outputs += tuple(Value(f"{name}.{i}", v.shape, v.dtype) for i, v in enumerate(further, len(metas)))
        nodes = [a for a in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(a, torch.fx.Node)
                 and isinstance(self.cells[a], _Cell)]
        self.places.append({i: self.entries[n] for i, n in enumerate(nodes) if n in self.entries})
        number, seeded = len(self.drawing), torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if seeded:
            self.drawing.append(name)
        self.ops.append(Op(name, target, args, kwargs, inputs, outputs, _module_path(node, self.prefix),
                           _source(node), number=number if seeded else 0))
        return [_Cell(v) if v is not None else None for v in outputs]


def _is_view(target: Any) -> bool:
    """Whether what an operator returns may share memory with its input."""
    if isinstance(target, Applied):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None


def _flowing(target: Any, args: tuple, kwargs: dict, count: int) -> tuple[bool, ...]:
    """To which of its outputs a gradient of any input comes; to all, where it does not say."""
    if count > 1 and len({v.requires_grad for v in values_in((args, kwargs))}) > 1:
        try:
            args, kwargs = map_values((args, kwargs), lambda v: torch.empty(
                v.shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad))
            with torch.enable_grad():
                made = target(*args, **kwargs)
            return tuple(isinstance(m, torch.Tensor) and m.requires_grad for m in made)
        except RuntimeError:  # it runs on tensors with values only
            pass
    return (True,) * count


#: Plain forms that have another name.
_FUNCTIONAL = {aten.normal_.default: aten.normal_functional.default, aten.bernoulli_.float: aten.bernoulli.p}


def _functional(target: Any) -> Any | None:
    """``aten.relu_.default`` -> ``aten.relu.default``."""
    if target in _FUNCTIONAL:
        return _FUNCTIONAL[target]
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.rstrip("_"), None) if name.endswith("_") else None
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None or any(a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments):
        return None
    return overload


def _without_dead(graph: Graph) -> Graph:
    """Operators that nothing uses, and has no mark on, are gone."""
    live = {v.name for v in values_in(graph.outputs)} | {v.name for v in graph.updates.values()}
    ops = []
    for op in reversed(graph.ops):
        if op.mark is not None or any(v is not None and v.name in live for v in op.outputs):
            ops.append(op)
            live.update(v.name for v in op.inputs)
    return graph.with_ops(tuple(reversed(ops)))

