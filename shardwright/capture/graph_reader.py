"""The reader of an exported program: builds the `Graph`.

1. Mark nodes name their operators and are removed.
2. In-place operators become plain ones (`mutation`).
3. Regions under `torch.no_grad` and `torch.autocast` are inlined: detaches and casts are written out.
4. Tied parameters become one value.
5. Each operator keeps its module path and the user's line.

Example, where ``self.mm`` is a marked `torch.matmul` and h [32, 8] is its result::

    exported    mark(x), mark(w), matmul, mark(matmul), relu_        h = self.mm(x, w); h.relu_()
    graph       mm, relu                                             matmul has the name of its mark
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from ..autocast import Autocast, Like, casts_of, entered, under, with_dtype
from ..errors import CaptureError
from ..graph import Graph, Master, Op, Value, argument_names, leaves, map_values, values_in
from ..identity_tables import IdentityMap, IdentitySet
from ..rules.normalization import without_side_effects
from ..rules.recurrent import layer_by_layer, without_dropout
from ..torch_private import FakeTensor, OpOverload, operators, schema_of
from .annotations import MARK, Operator
from .graph_template import GraphTemplate, Step
from .hybrid_models import refused_collective
from .mutation import (
    Cell,
    InPlaceReader,
    Memory,
    View,
    ViewStep,
    Writer,
    all_tensors,
    flows,
    is_beside,
    is_view,
    metas_made,
    serial,
    tensors_of,
)
from .outlines import says_nothing, written_names
from .recapture import AsExported
from .regions import EDGE, OPAQUE, Applied, RecomputeSettings, recomputed_ops, regions, written_out
from .source_lines import module_path, source_of

__all__ = ["GraphReader", "MarkUse", "bare"]

aten = torch.ops.aten

#: Operators without a result that check values of tensors.
_CHECKS = operators("_assert_async.default", "_assert_async.msg")

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OWNERS = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}


@dataclass(frozen=True)
class MarkUse:
    """A mark on one operator call.

    Args:
        in_strategy, out_strategy: as the user gave them.
        source: the line that gave them.
        order: ``order[i]`` is the index in `Op.inputs` of entry i of the in_strategy; the in_strategy is in the order
            of the user's call.
        priority: as of `shardwright.shard`.
    """

    in_strategy: object
    out_strategy: object
    source: str
    order: tuple[int, ...]
    priority: int = 0


def bare(name: str, prefix: str) -> str:
    return name.removeprefix(prefix + ".") if prefix else name


def _branches(argument: object) -> Sequence[object]:
    """The entries of an argument that is a list or a tuple."""
    assert isinstance(argument, (list, tuple))
    return argument


class GraphReader(InPlaceReader):
    """The reader of one exported program."""

    def __init__(
        self,
        program: ExportedProgram,
        nodes: AsExported,
        calls: list[Operator],
        names: IdentityMap[object, str],
        prefix: str,
        aliases: dict[str, str],
        called: dict[str, str],
        functions: list[Applied],
        regions: list[RecomputeSettings],
    ) -> None:
        self.called, self.functions, self.regions = called, functions, regions
        self.program, self.calls, self.prefix, self.aliases = program, calls, prefix, aliases
        self.mark_names = names
        self.ops: list[Op] = []
        self.parameters: dict[str, Value] = {}
        self.cells: dict[torch.fx.Node, object] = {}
        self.updates: dict[str, Value] = {}
        self.memories: dict[str, Memory] = {}  # memories of parameters and buffers, by name
        self.writer = Writer(self.emit)
        self.node: torch.fx.Node | None = None  # the node that is being read
        self.frontier: int | None = None  # under no_grad: the serial number at its beginning
        self.used: set[str] = set()
        self.begun: dict[int, int] = {}  # marked call -> number of operators before it
        self.entries: dict[torch.fx.Node, int] = {}  # mark node -> index of the tensor input in the call
        self.places: list[dict[int, int]] = []  # per operator: index of an input -> its place in the call
        self.attached: set[int] = set()
        self.named: IdentitySet[Operator] = IdentitySet()  # the operators among `calls` whose bare name is taken
        self.drawing: list[str] = []  # random operators, in order
        self.casting = Autocast()  # the state of autocast
        self.casts: dict[tuple[object, ...], Value] = {}  # (value, dtype, module) -> the cast value, while it is shared
        self.uncast: dict[str, Value] = {}  # a cast made for autocast -> the value before the cast
        self.nodes = nodes  # the arguments and results of the program's nodes
        self.args: tuple[object, ...] = ()  # those of the operator that is being read, with nodes in place of tensors
        self.kwargs: dict[str, object] = {}
        self.tensor_nodes: list[torch.fx.Node] = []  # the nodes among them whose values are tensors
        self.grad = torch.is_grad_enabled()  # True where gradients are on at this point of the program
        self.assigned: list[str] = []  # buffers whose new values are the last outputs
        self.path_of: Callable[[object], str | None] = lambda tensor: None  # the user's name of a constant
        self.out_spec = program.call_spec.out_spec  # nesting of the outputs before the assigned buffers
        self.masters: Mapping[str, Master] = {}  # storage of parameters whose stored dtype is not the read dtype
        # Recomputed region -> number of operators, and the casts, before it.
        self.entered: dict[int, tuple[int, dict[tuple[object, ...], Value]]] = {}
        self.spans: list[tuple[int, int, int]] = []  # region, its first operator, one past its last
        # The arguments of `GraphTemplate.of`.
        self.sources: list[tuple[torch.fx.Node, InputSpec, object]] = []
        self.steps: list[tuple[Step, int | None]] = []
        self.read_ops: list[Op] = []

    def unique(self, name: str) -> str:
        candidate, count = name, 1
        while candidate in self.used:
            candidate, count = f"{name}_{count}", count + 1
        self.used.add(candidate)
        return candidate

    # -- the whole program --

    def graph(self) -> Graph:
        signature = self.program.graph_signature
        constants: dict[str, torch.Tensor] = {}
        inputs: list[Value] = []
        parameters = self.parameters
        buffers: dict[str, Value] = {}
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            meta = self.nodes.source(node, spec)
            if not isinstance(meta, torch.Tensor):
                self.cells[node] = meta if spec.kind is not InputKind.USER_INPUT else getattr(spec.arg, "value", meta)
                self.sources.append((node, spec, self.cells[node]))
                continue
            if spec.kind is InputKind.USER_INPUT:
                value = Value(self.unique(node.name), tuple(meta.shape), meta.dtype, meta.requires_grad)
                inputs.append(value)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                value = Value(self.unique(str(spec.target)), tuple(meta.shape), meta.dtype)
                constants[value.name] = self.program.constants[str(spec.target)]
            else:
                name = bare(str(spec.target), self.prefix)
                name = self.aliases.get(name, name)
                table = parameters if spec.kind is InputKind.PARAMETER else buffers
                if name not in table:
                    self.used.add(name)
                    table[name] = Value(
                        name,
                        tuple(meta.shape),
                        meta.dtype,
                        spec.kind is InputKind.PARAMETER and meta.requires_grad,
                        self.masters.get(name),
                    )
                value = table[name]
            owner = _OWNERS.get(spec.kind, "input")
            named = self.memories.setdefault if owner in ("parameter", "buffer") else lambda _, memory: memory
            self.cells[node] = Cell(named(value.name, Memory(value, owner, value.name)).whole)
            self.sources.append((node, spec, value))
        for mark_path in self.mark_names.values():
            self.used.add(mark_path)
        result = self.walk(self.program.graph, self.program.graph_module)
        outputs = [
            self.leaf(r)
            for r, spec in zip(result, signature.output_specs, strict=True)
            if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
        ]
        if self.assigned:
            self.updates.update(zip(self.assigned, values_in(outputs[-len(self.assigned) :]), strict=True))
            del outputs[-len(self.assigned) :]
        changed = self.changed_inputs([v.name for v in inputs])
        outputs += changed.values()
        self.read_ops = recomputed_ops(self.ops, self.regions, self.spans, self.mark_names)
        graph = Graph(
            tuple(inputs),
            parameters,
            buffers,
            constants,
            tuple(self.read_ops),
            tuple(outputs),
            self.program.call_spec.in_spec,
            self.out_spec,
            self.updates,
            self.aliases,
            changed=tuple(changed),
        )
        graph = _without_dead(graph)
        unseen = {name for name, tensor in constants.items() if isinstance(tensor, FakeTensor)}
        for op in graph.ops:
            if any(v.name in unseen for v in op.inputs):
                raise CaptureError(
                    "a tensor comes of others in a way that the capture does not see",
                    **op.where,
                    legal="torch's own operators",
                )
        return (
            replace(graph, constants={n: tensor for n, tensor in constants.items() if n not in unseen})
            if unseen
            else graph
        )

    def template(self, graph: Graph, settings: object) -> GraphTemplate | None:
        """`GraphTemplate.of` the graph that was read."""
        return GraphTemplate.of(self.program, graph, self.sources, self.steps, self.read_ops, settings)

    def changed_inputs(self, names: list[str]) -> dict[int, Value]:
        """Index of an input that the model changed in place -> the final value of the input.

        The value is an alias of its own, since it may be returned in another layout than an output of the model.
        """
        memories = {
            cell.memory.name: cell.memory
            for cell in self.cells.values()
            if isinstance(cell, Cell) and cell.memory.owner == "input"
        }
        return {
            i: self.emit(aten.alias.default, (self.writer.read(memories[name].whole),), {})[0]
            for i, name in enumerate(names)
            if name in memories and memories[name].version
        }

    def leaf(self, result: object) -> object:
        return self.read(result) if isinstance(result, Cell) else result

    def read(self, cell: Cell) -> Value:
        return self.writer.read(cell.view)

    def walk(self, graph: torch.fx.Graph, owner: torch.fx.GraphModule, nested: bool = False) -> list[object]:
        """Read the nodes of a program, or of a region inside it; its results."""
        for node in regions(graph.nodes):
            if isinstance(node, list):
                self.vmapped(node)
                continue
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self.cells[node] = getattr(owner, str(node.target))
            elif node.op == "output":
                results = _branches(node.args[0]) if nested else self.nodes.outputs(_branches(node.args[0]))
                return [self.cells[a] if isinstance(a, torch.fx.Node) else a for a in results]
            elif node.op == "call_function":
                try:
                    self.call(node)
                except (
                    ArithmeticError,
                    AssertionError,
                    AttributeError,
                    LookupError,
                    NotImplementedError,
                    RuntimeError,
                    TypeError,
                    ValueError,
                ) as error:
                    raise CaptureError(
                        f"{node.target} cannot be read: {type(error).__name__}: {error}",
                        source=source_of(node) or None,
                        legal="torch's plain operators",
                    ) from error
            else:
                raise CaptureError(f"unexpected node {node.format_node()}", source=source_of(node))
        return []

    # -- one node --

    def call(self, node: torch.fx.Node) -> None:
        target, self.node = node.target, node
        if isinstance(target, OpOverload):
            if not says_nothing(target):
                self.args, self.kwargs = self.nodes.arguments(node, self.grad, self.casting)
                self.tensor_nodes = []
                self.overload(node, target)
            elif target in _CHECKS:
                place = self.nodes.line(node) or node.name
                check = f"torch.{target.overloadpacket.__name__}"
                text = f"{place}: {check} is left out: a planned program checks no values of tensors"
                warnings.warn(text, stacklevel=1)
        elif target is operator.getitem:
            source, number = node.args
            assert isinstance(source, torch.fx.Node) and isinstance(number, int)
            self.cells[node] = _branches(self.cells[source])[number]
            self.nodes.passed(node, _branches(self.nodes.made(source))[number])
            self.steps.append((Step(node, source=source, number=number), None))
        elif target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self.grad_mode(node)
        elif target is torch.ops.higher_order.wrap_with_autocast:
            self.autocast(node)
        else:
            raise CaptureError(f"{target} holds a program of its own that is not understood", source=source_of(node))

    def overload(self, node: torch.fx.Node, target: OpOverload[..., torch.Tensor]) -> None:
        if target is MARK:
            self.mark(node)
        elif target is EDGE:
            self.region_edge()
        elif target is OPAQUE:
            tensors, number = self.args
            assert isinstance(number, int)
            args = tuple([self.taken(x) for x in _branches(tensors)])
            self.cells[node] = self.record(node, self.functions[number], args, {})
            if self.casting:
                self.ops[-1] = replace(self.ops[-1], target=under(self.ops[-1].target, self.casting))
        else:
            self.operator(node, target)

    def grad_mode(self, node: torch.fx.Node) -> None:
        """Inline a region under torch.no_grad: its results carry no gradient."""
        enabled, sub, *args = node.args
        assert isinstance(enabled, bool) and isinstance(sub, torch.fx.Node)
        outside, begin, grad = self.frontier, serial(), self.grad
        self.frontier, self.grad = None if enabled else begin if outside is None else outside, enabled
        results = self.inlined(node, sub, args)
        self.frontier, self.grad, self.node = outside, grad, node
        self.cells[node] = (
            results if enabled else [self.without_gradient(r, begin) if isinstance(r, Cell) else r for r in results]
        )

    def without_gradient(self, cell: Cell, begin: int) -> Cell:
        """A variable at the end of a region without gradients that began at serial number `begin`.

        A variable from before the region stays as it is. A new view of a memory from before the region is detached. A
        new memory is detached as a whole.
        """
        if cell.number < begin:
            return cell
        view, memory = cell.view, cell.memory
        value = self.writer.read(view)
        if value.requires_grad and memory.number < begin:
            step = ViewStep(aten.detach.default, (value,), {}, value, 0, (value.shape,), True)
            return Cell(View(memory, self.emit(step.target, step.args, {})[0], view, step))
        if memory.number >= begin and (value.dtype.is_floating_point or value.dtype.is_complex):
            self.writer.write(memory.whole, self.emit(aten.detach.default, (self.writer.read(memory.whole),), {})[0])
        return cell

    def autocast(self, node: torch.fx.Node) -> None:
        """Inline a region under torch.autocast: its casts are written out."""
        device_type, dtype, enabled, _, sub, *args = node.args
        assert isinstance(device_type, str) and isinstance(dtype, torch.dtype | None) and isinstance(sub, torch.fx.Node)
        outside, casts = self.casting, self.casts
        self.casting = outside.within(device_type, dtype, bool(enabled))
        self.casts = casts if outside else {}
        self.cells[node] = self.inlined(node, sub, args)
        self.casting, self.casts = outside, casts

    def vmapped(self, region: list[torch.fx.Node]) -> None:
        self.nodes.written_out(region)
        with entered(self.casting, "cpu", *(name for name, _ in self.casting.dtypes)):
            program, taken, made = written_out(region, lambda node: self.leaf(self.cells[node]))
        for placeholder, node in zip((n for n in program.graph.nodes if n.op == "placeholder"), taken):
            self.cells[placeholder] = self.cells[node]
        outside, self.casting = self.casting, Autocast()  # the casts of the region are already written out
        self.cells.update(zip(made, self.walk(program.graph, program, nested=True)))
        self.casting = outside

    def inlined(self, node: torch.fx.Node, sub: torch.fx.Node, args: Sequence[torch.fx.node.Argument]) -> list[object]:
        """The results of a region, the program of `node`; its placeholders take the arguments."""
        owner = self.cells[sub]
        assert isinstance(owner, torch.fx.GraphModule)
        for placeholder, argument in zip((n for n in owner.graph.nodes if n.op == "placeholder"), args):
            if isinstance(argument, torch.fx.Node):
                self.cells[placeholder] = self.cells[argument]
                self.nodes.passed(placeholder, self.nodes.made(argument))
            else:
                self.cells[placeholder] = argument
                self.nodes.passed(placeholder, argument)
        results = self.walk(owner.graph, owner, nested=True)
        (end,) = (n for n in owner.graph.nodes if n.op == "output")
        outputs = _branches(end.args[0])
        self.nodes.passed(node, [self.nodes.made(a) if isinstance(a, torch.fx.Node) else a for a in outputs])
        return results

    def cast(
        self, node: torch.fx.Node, target: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object], bool]:
        """The arguments as autocast gives them to an operator, and True where the operator has to run under autocast.

        Args:
            args, kwargs: the node's arguments, with values in place of nodes.
        """
        devices = iter([self.traced(n).device for n in self.tensor_nodes])
        plain, named = map_values((args, kwargs), lambda v: Like(v.shape, v.dtype, next(devices)))
        decided = casts_of(target, plain, named, self.casting)
        recorded = tuple(m.dtype for m in leaves(self.nodes.made(node)) if isinstance(m, torch.Tensor))
        if decided.made is not None and decided.made != recorded:
            raise CaptureError(
                f"internal error: under {self.casting} {target} of {[v.dtype for v in values_in((args, kwargs))]} "
                f"was captured with results of {[*recorded]}, and its casts give {[*decided.made]}",
                operator=node.name,
                source=source_of(node) or None,
                legal="with torch.autocast(..., enabled=False) around it, and its casts written there",
            )
        to = iter(decided.inputs)
        args, kwargs = map_values((args, kwargs), lambda v: self.cast_to(node, v, next(to)))
        if decided.dtype is not None:
            args, kwargs = with_dtype(target, args, kwargs, decided.dtype)
        return args, kwargs, decided.whole

    def cast_to(self, node: torch.fx.Node, value: Value, dtype: torch.dtype | None) -> Value:
        """The value in another dtype, for the operator of `node`."""
        if dtype is None or dtype == value.dtype:
            return value
        # Modules that share a parameter may be in different stages of a pipeline: each module casts it.
        key = value.name, dtype, module_path(node, self.prefix) if value.name in self.parameters else ""
        cast = self.casts.get(key)
        if cast is None:
            name = self.unique(f"{value.name}_{str(dtype).removeprefix('torch.')}")
            cast = Value(name, value.shape, dtype, value.requires_grad)
            self.places.append({})
            self.ops.append(
                Op(
                    name,
                    aten.to.dtype,
                    (value, dtype),
                    {},
                    (value,),
                    (cast,),
                    module_path(node, self.prefix),
                    self.nodes.line(node),
                )
            )
            self.uncast[name] = value
            if self.casting.shares:
                self.casts[key] = cast
        return cast

    def mark(self, node: torch.fx.Node) -> None:
        source, call, place = self.args
        assert isinstance(source, torch.fx.Node) and isinstance(call, int) and isinstance(place, int)
        self.cells[node] = self.cells[source]
        self.steps.append((Step(node, source=source, arguments=(call, place)), None))
        if place >= 0:
            self.begun.setdefault(call, len(self.ops))
            self.entries[node] = place
        else:
            begin = self.begun.get(call, len(self.ops))
            self.attach(self.calls[call], call, list(range(begin, len(self.ops))))

    def region_edge(self) -> None:
        call, entering = self.args
        assert isinstance(call, int)
        if entering:
            self.entered[call] = len(self.ops), dict(self.casts)
        else:
            begin, self.casts = self.entered[call]  # casts inside a region are dropped with it, and not shared
            self.spans.append((call, begin, len(self.ops)))

    def attach(self, marked: Operator, call: int, inside: list[int]) -> None:
        """Name the one operator recorded since the marked call began, and put the mark, if it has strategies, on it.

        Views, casts, and operators that read buffers alone (the count of batches of a batch norm) do not count: with
        them in the call, the strategy applies to the operator's own inputs.
        """
        if call in self.attached:
            return  # a further output of the same call
        self.attached.add(call)
        name = self.mark_names.get(marked)
        if len(inside) > 1:
            buffers = {memory.name for memory in self.memories.values() if memory.owner == "buffer"}
            inside = [
                i
                for i in inside
                if not is_beside(self.ops[i].target)
                and self.ops[i].name not in self.uncast
                and not (self.ops[i].inputs and buffers.issuperset(v.name for v in self.ops[i].inputs))
            ] or inside
        strategies = marked.in_strategy is not None or marked.out_strategy is not None
        if len(inside) != 1:
            if not strategies:
                return
            kinds = ", ".join(self.ops[i].kind for i in inside) or "none"
            modules = [self.ops[i].module for i in inside]
            single = [
                f"{self.ops[i].module} ({self.ops[i].kind})"
                for i in inside
                if self.ops[i].module != name and modules.count(self.ops[i].module) == 1
            ]
            raise CaptureError(
                f"a mark names one operator; this one holds {len(inside)}: {kinds}",
                operator=name,
                source=marked.source,
                strategy=marked.in_strategy,
                legal="shard() on each operator by itself" + (": " + ", ".join(single)) * bool(single),
            )
        op, places = self.ops[inside[0]], self.places[inside[0]]
        # The weights of a module come after its inputs, in the order of the module.
        parameter_place = {name: place for place, name in enumerate(self.parameters)}
        names = [self.uncast.get(v.name, v).name for v in op.inputs]
        order = tuple(
            sorted(
                range(len(names)),
                key=lambda i: (places.get(i, len(names)), parameter_place.get(names[i], len(parameter_place)), i),
            )
        )
        path = op.name
        if name is not None:  # the first call gets the bare name
            path = self.unique(name) if marked in self.named else name
            self.named.add(marked)
        if not strategies:
            self.ops[inside[0]] = replace(op, name=path)
            return
        use = MarkUse(marked.in_strategy, marked.out_strategy, marked.source, order, marked.priority)
        self.ops[inside[0]] = replace(op, name=path, mark=use)

    def operator(self, node: torch.fx.Node, target: OpOverload[..., torch.Tensor]) -> None:
        space, _, name = schema_of(target).name.partition("::")
        placed = refused_collective(name, source_of(node)) if "c10d" in space else None
        if placed is not None:
            raise placed
        if space == "aten" and self.kwargs.get("generator") is not None:
            raise CaptureError(
                f"{target} draws from a torch.Generator, whose state a program neither keeps nor begins anew",
                operator=node.name,
                source=source_of(node) or None,
                legal="the same operator without generator=, which draws by the seed of the process; or the numbers as "
                "a buffer or an input",
            )
        written = written_names(target)
        args = tuple([self.taken(x) for x in self.args])
        kwargs = {name: self.taken(x) for name, x in self.kwargs.items()}
        if self.casting:
            args, kwargs, whole = self.cast(node, target, args, kwargs)
            first = len(self.ops)
            self.applied(node, target, written, args, kwargs)
            if whole:
                self.ops[first:] = [replace(op, target=under(op.target, self.casting)) for op in self.ops[first:]]
            return
        self.applied(node, target, written, args, kwargs)

    def taken(self, tree: object) -> object:
        """Nested arguments with values in place of nodes, which are noted in `tensor_nodes`."""
        if type(tree) is torch.fx.Node:
            found = self.cells[tree]
            if not isinstance(found, Cell):
                return found
            self.tensor_nodes.append(tree)
            return self.read(found)
        if isinstance(tree, (list, tuple)):
            return type(tree)([self.taken(branch) for branch in tree])
        return {name: self.taken(branch) for name, branch in tree.items()} if isinstance(tree, dict) else tree

    def applied(
        self,
        node: torch.fx.Node,
        target: OpOverload[..., torch.Tensor],
        written: Sequence[str],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        """Record an operator in its plain form: without writes into its arguments, without side effects."""
        if written:
            self.in_place(node, target, written, args, kwargs)
            return
        names = argument_names(target)
        named = dict(zip(names, args)) | kwargs
        silent = without_side_effects(target, named)
        if silent is not None:
            self.running_statistics(node, silent, named, dict(zip(names, self.args)) | self.kwargs)
            return
        recurrent = without_dropout(target, named)
        if recurrent is not None:
            plain, args, drops = recurrent
            self.cells[node] = (
                [Cell(v) for v in layer_by_layer(self.emit, plain, args, drops)]
                if drops
                else self.record(node, plain, args, {})
            )
            return
        cells = self.record(node, target, args, kwargs)
        if target is not aten.lift_fresh_copy.default:  # a copy, though the fake tensors may share memory
            self.find_views(node, target, args, kwargs, cells)
        first = self.args[0] if self.args else None
        if is_view(target) and isinstance(first, torch.fx.Node) and first in self.entries:
            self.entries[node] = self.entries[first]
        if not self.casting:
            self.steps.append((Step(node), len(self.ops) - 1))
        self.cells[node] = cells[0] if isinstance(self.nodes.made(node), torch.Tensor) else cells

    def emit(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Value]:
        """Append an operator that computes a part of the current node; its outputs."""
        assert self.node is not None and callable(target)
        metas = metas_made(target, args, kwargs)
        if metas is None:
            raise CaptureError(
                f"{target} cannot stand for a part of {self.node.target}",
                source=source_of(self.node) or None,
                legal="an operator that returns its result",
            )
        cells = self.record(self.node, target, args, kwargs, metas=metas, entered=False)
        return [cell.view.value for cell in all_tensors(cells)]

    def record(
        self,
        node: torch.fx.Node,
        target: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        further: Sequence[Value] = (),
        metas: Sequence[object] | None = None,
        entered: bool = True,
    ) -> list[Cell | None]:
        """Append an operator; the cells of its outputs, None for each that is no tensor.

        Args:
            further: values with the shapes and dtypes of outputs that the node does not have.
            metas: tensors with the shapes and dtypes of the outputs, where they are not those of the node.
            entered: True where the operator's inputs are those of the node.
        """
        metas = metas or tensors_of(self.nodes.made(node))
        shapes: list[tuple[object, ...]] = [tuple(m.shape) if isinstance(m, torch.Tensor) else (m,) for m in metas]
        if any([type(s) is not int and isinstance(s, _SYMBOLS) for shape in shapes for s in shape]):
            on = [tuple(v.shape) for v in values_in((args, kwargs))]
            raise CaptureError(
                f"what {target} gives, called on {on}, depends on the values of tensors",
                operator=node.name,
                source=source_of(node) or None,
                legal="shapes and numbers that do not depend on the values of tensors, such as "
                "torch.where(mask, a, b) in the place of a[mask]",
            )
        wish = target.__name__ if isinstance(target, Applied) else node.name
        flowing = target.differentiable if isinstance(target, Applied) else flows(target, args, kwargs, len(metas))
        name = self.unique(wish.rstrip("_") or wish)
        inputs = values_in((args, kwargs))
        grad = any(v.requires_grad for v in inputs) and target is not aten.detach.default
        outputs = tuple(
            Value(
                name if len(metas) + len(further) == 1 else f"{name}.{i}",
                tuple(m.shape),
                m.dtype,
                grad and flowing[i] and (m.dtype.is_floating_point or m.dtype.is_complex),
            )
            if isinstance(m, torch.Tensor)
            else None
            for i, m in enumerate(metas)
        )
        outputs += tuple(Value(f"{name}.{i}", v.shape, v.dtype) for i, v in enumerate(further, len(metas)))
        self.places.append(
            {i: self.entries[n] for i, n in enumerate(self.tensor_nodes) if n in self.entries} if entered else {}
        )
        number, seeded = len(self.drawing), torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        if seeded:
            self.drawing.append(name)
        self.ops.append(
            Op(
                name,
                target,
                args,
                kwargs,
                inputs,
                outputs,
                module_path(node, self.prefix),
                self.nodes.line(node),
                number=number if seeded else 0,
            )
        )
        return [Cell(v) if v is not None else None for v in outputs]


def _without_dead(graph: Graph) -> Graph:
    """The graph without operators that have neither a consumer nor a mark."""
    live = {v.name for v in values_in(graph.outputs)} | {v.name for v in graph.updates.values()}
    ops = []
    for op in reversed(graph.ops):
        if op.mark is not None or any(v is not None and v.name in live for v in op.outputs):
            ops.append(op)
            live.update(v.name for v in op.inputs)
    return graph.with_ops(tuple(reversed(ops)))
