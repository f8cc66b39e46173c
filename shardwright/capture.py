"""From an `nn.Module` to a `Graph`, at the operators that people write.

`torch.export` on fake tensors (nothing is allocated, so a model too large for any one machine captures too), its
training IR used as it is. On the way: mark nodes name their operators and go, in-place forms become plain ones, tied
parameters become one value, each operator keeps its module path and the user's line.

Private names of torch used here: `FakeTensorMode` is what makes parameters that were never allocated usable with inputs
that name an ordinary device; `TracerBase._filter_traceback_frames` decides which lines of the user's an operator keeps.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import operator
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree

from .errors import CaptureError, ShardwrightError
from .graph import Graph, Op, Value, values_in
from .marks import Operator, collect_marks, mark_names

__all__ = ["MarkUse", "WithLoss", "capture"]

aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
_OURS = __file__.rsplit("/", 1)[0] + "/"
_TORCH = torch.__file__.rsplit("/", 1)[0] + "/"


@dataclass(frozen=True)
class MarkUse:
    """A mark on one operator call.

    Args:
        in_strategy, out_strategy: as the user gave them.
        source: the line that gave them.
        order: ``order[i]`` is the index in `Op.inputs` of the i-th entry of the in_strategy, which stands in the order
            of the user's call.
    """

    in_strategy: Any
    out_strategy: Any
    source: str
    order: tuple[int, ...]


class WithLoss(nn.Module):
    """A model and its loss as one module: the last positional input goes to the loss."""

    def __init__(self, net: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.net, self.loss_fn = net, loss_fn
        self.training = net.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.loss_fn(self.net(*inputs[:-1], **kwargs), inputs[-1])


@contextlib.contextmanager
def _fake_state(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Parameters and buffers replaced by fake ones, tied ones by the same one; put back at the end."""
    memo: dict[int, torch.Tensor] = {}
    saved: list[tuple[dict, str, Any]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            where = device if tensor.device.type == "meta" else tensor.device
            with mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
                memo[id(tensor)] = (nn.Parameter(made, requires_grad=tensor.requires_grad)
                                    if isinstance(tensor, nn.Parameter) else made)
        return memo[id(tensor)]

    try:
        for sub in module.modules():
            for held in (sub._parameters, sub._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        saved.append((held, name, tensor))
                        held[name] = fake(tensor)
        yield
    finally:
        for held, name, tensor in saved:
            held[name] = tensor


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, _TORCH, "<"))


def _user_frame(frames: list[tuple[str, int]]) -> str:
    """The innermost frame that is the user's own, as ``file.py:41``."""
    return next((f"{file.rsplit('/', 1)[-1]}:{line}" for file, line in reversed(frames) if _is_users(file)), "")


@contextlib.contextmanager
def _user_lines() -> Iterator[None]:
    """Of an operator's stack, export keeps what lies in functions called ``forward``: the user's innermost line
    instead, which may be in a helper."""
    plain = getattr(TracerBase, "_filter_traceback_frames", None)

    def innermost(self: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([f for f in frames if _is_users(f.filename)][-1:])

    if plain is not None:
        TracerBase._filter_traceback_frames = innermost
    try:
        yield
    finally:
        if plain is not None:
            TracerBase._filter_traceback_frames = plain


def _source(node: torch.fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    return _user_frame([(m["file"], int(m["line"])) for m in _FRAME.finditer(trace)])


def _module_path(node: torch.fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack")
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else path


def capture(net: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None, *, loss_fn: Any = None,
            device: torch.device | str = "cpu") -> Graph:
    """Capture one call of a model.

    Args:
        net: the model; its parameters may be real, fake or meta.
        args, kwargs: the inputs of the call with their **global** shapes; real, fake or meta tensors.
        loss_fn: if given, the last of `args` is its target and the graph ends in the loss.
        device: the device that meta tensors stand for.

    Raises:
        CaptureError: what `torch.export` could not follow, with the user's line.
    """
    module = net if loss_fn is None else WithLoss(net, loss_fn)
    prefix = "" if loss_fn is None else "net"
    device = torch.device(device)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake_input(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = device if leaf.device.type == "meta" else leaf.device
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=where, requires_grad=leaf.requires_grad)

    fake_args, fake_kwargs = pytree.tree_map(fake_input, (tuple(args), dict(kwargs or {})))
    tied: dict[int, list[str]] = {}
    for name, tensor in [*module.named_parameters(remove_duplicate=False),
                         *module.named_buffers(remove_duplicate=False)]:
        tied.setdefault(id(tensor), []).append(_bare(name, prefix))
    try:
        with _fake_state(module, mode, device), collect_marks() as calls, _quiet(), \
                _own_backwards_refused(), _user_lines():
            program = torch.export.export(module, fake_args, fake_kwargs, strict=False)
    except ShardwrightError:
        raise
    except Exception as error:
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
        first = str(error).strip().split("\n\n")[0]
        calling = [(f.filename, f.lineno or 0) for f in traceback.extract_stack()]
        raise CaptureError(f"the model cannot be captured: {type(error).__name__}: {first}",
                           source=_user_frame(frames) or _user_frame(calling) or None,
                           legal="control flow that depends on shapes and settings only, not on the values of tensors"
                           if "data-dependent" in first or "DataDependent" in type(error).__name__ else None
                           ) from error
    aliases = {alias: names[0] for names in tied.values() for alias in names[1:]}
    called = _input_names(net, len(fake_args) - 1) if loss_fn is not None else {}
    return _Reader(program, calls, mark_names(net), prefix, aliases, called).graph()


def _input_names(net: nn.Module, count: int) -> dict[str, str]:
    """The names that a model's own forward gives to the inputs which `WithLoss` passes through."""
    names = [p.name for p in inspect.signature(net.forward).parameters.values()
             if p.kind is p.POSITIONAL_OR_KEYWORD][:count]
    return {f"inputs_{i}": name for i, name in enumerate(names)} | {f"inputs_{count}": "target"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What export logs and prints beside the error that it raises (half a graph) is left out: the error says it."""
    logs = [logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes",
                                                            "_subclasses.fake_tensor")]
    levels, graph, written = [log.level for log in logs], "", io.StringIO()
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(written):
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
        sys.stderr.write(written.getvalue().replace(graph, "").lstrip("\n") if graph else written.getvalue())


@contextlib.contextmanager
def _own_backwards_refused() -> Iterator[None]:
    """A user's `torch.autograd.Function` would be captured without its backward, silently: an error instead."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch.") or cls.__module__ == "torch.utils.checkpoint":
            frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack()]
            raise CaptureError(f"{cls.__qualname__} is a torch.autograd.Function: its backward cannot be captured",
                               source=_user_frame(frames) or None,
                               legal="torch.library.custom_op with register_autograd, described by sw.rule"
                               if cls.__module__ != "torch.utils.checkpoint" else "checkpoint(..., use_reentrant=False)")
        return plain.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain


def _bare(name: str, prefix: str) -> str:
    return name.removeprefix(prefix + ".") if prefix else name


class _Cell:
    """A tensor variable of the user's program: in-place operators change what it holds."""

    def __init__(self, value: Value, base: _Cell | None = None) -> None:
        self.value = value
        self.base = base.base or base if base is not None else None  # the cell that it is a view of
        self.stale: torch.fx.Node | None = None
        self.views: list[_Cell] = []


class _Reader:
    """Reads an exported program into a `Graph`."""

    def __init__(self, program: Any, calls: list[Operator], names: dict[int, str], prefix: str,
                 aliases: dict[str, str], called: dict[str, str]) -> None:
        self.called = called
        self.program, self.calls, self.prefix, self.aliases = program, calls, prefix, aliases
        self.mark_names = names
        self.ops: list[Op] = []
        self.cells: dict[torch.fx.Node, Any] = {}
        self.updates: dict[str, Value] = {}
        self.state: dict[int, tuple[InputKind, str]] = {}  # cells of parameters and buffers
        self.used: set[str] = set()
        self.begun: dict[int, int] = {}                    # marked call -> how many operators came before it
        self.entries: dict[torch.fx.Node, int] = {}        # mark node -> which tensor input of the call it is
        self.places: list[dict[int, int]] = []             # per operator: index of an input -> its place in the call
        self.attached: set[int] = set()
        self.named: set[int] = set()                       # marked operators whose bare name is taken

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
        parameters: dict[str, Value] = {}
        buffers: dict[str, Value] = {}
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
                name = _bare(spec.target, self.prefix)
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
        graph = Graph(tuple(inputs), parameters, buffers, constants, tuple(self.ops), tuple(kept),
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
        for node in graph.nodes:
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
        elif target is operator.getitem:
            held = self.cells[node.args[0]]
            self.cells[node] = held[node.args[1]]
        elif isinstance(target, torch._ops.OpOverload):
            self.operator(node, target)
        elif target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self.grad_mode(node)
        else:
            raise CaptureError(f"{target} holds a program of its own that is not understood", source=_source(node))

    def grad_mode(self, node: torch.fx.Node) -> None:
        """A region under torch.no_grad: inlined, what leaves it carries no gradient."""
        enabled, sub, *args = node.args
        owner = self.cells[sub]
        for placeholder, argument in zip((n for n in owner.graph.nodes if n.op == "placeholder"), args):
            self.cells[placeholder] = self.cells[argument] if isinstance(argument, torch.fx.Node) else argument
        results = self.walk(owner.graph, owner)
        if not enabled:
            results = [self.record(node, aten.detach.default, (self.read(r),), {})[0]
                       if isinstance(r, _Cell) else r for r in results]
        self.cells[node] = results

    def mark(self, node: torch.fx.Node) -> None:
        source, call, place = node.args
        self.cells[node] = self.cells[source]
        if place >= 0:
            self.begun.setdefault(call, len(self.ops))
            self.entries[node] = place
        elif self.calls[call].in_strategy is not None or self.calls[call].out_strategy is not None:
            begin = self.begun.get(call, len(self.ops))
            self.attach(self.calls[call], call, list(range(begin, len(self.ops))))

    def attach(self, marked: Operator, call: int, inside: list[int]) -> None:
        """Name the one operator recorded since the marked call began, and put the mark on it."""
        if call in self.attached:
            return  # a further output of the same call
        self.attached.add(call)
        name = self.mark_names.get(id(marked))
        if len(inside) != 1:
            kinds = ", ".join(self.ops[i].kind for i in inside) or "none"
            raise CaptureError(f"a mark names one operator; this one holds {len(inside)}: {kinds}", operator=name,
                               source=marked.source, strategy=marked.in_strategy,
                               legal="shard() on each operator by itself")
        op, places = self.ops[inside[0]], self.places[inside[0]]
        order = tuple(sorted(range(len(op.inputs)), key=lambda i: (places.get(i, len(op.inputs)), i)))
        path = op.name
        if name is not None:  # the first call has the bare name
            path = self.unique(name) if id(marked) in self.named else name
            self.named.add(id(marked))
        self.ops[inside[0]] = replace(op, name=path, mark=MarkUse(marked.in_strategy, marked.out_strategy, marked.source, order))

    def operator(self, node: torch.fx.Node, target: Any) -> None:
        written = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        args, kwargs = pytree.tree_map(
            lambda a: self.leaf(self.cells[a]) if isinstance(a, torch.fx.Node) else a, (node.args, dict(node.kwargs)))
        if written:
            self.in_place(node, target, len(written), tuple(args), kwargs)
            return
        cells = self.record(node, target, tuple(args), kwargs)
        returns = target._schema.returns
        base = self.cells.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if len(returns) == 1 and returns[0].alias_info is not None and isinstance(base, _Cell):
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
        self.cells[node] = changed

    def record(self, node: torch.fx.Node, target: Any, args: tuple, kwargs: dict) -> list[_Cell]:
        """Append an operator; its outputs' cells."""
        meta = node.meta.get("val")
        metas = list(meta) if isinstance(meta, (tuple, list)) else [meta]
        if any(isinstance(s, _SYMBOLIC) for m in metas for s in (m.shape if isinstance(m, torch.Tensor) else (m,))):
            raise CaptureError(f"what {target} gives depends on the values of tensors", source=_source(node) or None,
                               legal="shapes and numbers that do not depend on the values of tensors")
        name = self.unique(node.name.rstrip("_") or node.name)
        inputs = values_in((args, kwargs))
        grad = any(v.requires_grad for v in inputs) and target is not aten.detach.default
        outputs = tuple(
            Value(name if len(metas) == 1 else f"{name}.{i}", tuple(m.shape), m.dtype,
                  grad and (m.dtype.is_floating_point or m.dtype.is_complex)) if isinstance(m, torch.Tensor) else None
            for i, m in enumerate(metas))
        nodes = [a for a in pytree.tree_leaves((node.args, dict(node.kwargs))) if isinstance(a, torch.fx.Node)
                 and isinstance(self.cells[a], _Cell)]
        self.places.append({i: self.entries[n] for i, n in enumerate(nodes) if n in self.entries})
        self.ops.append(Op(name, target, args, kwargs, inputs, outputs, _module_path(node, self.prefix),
                           _source(node)))
        return [_Cell(v) if v is not None else None for v in outputs]


def _functional(target: Any) -> Any | None:
    """``aten.relu_.default`` -> ``aten.relu.default``."""
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

