"""Graphs of one rank's own shapes: `hybrid_parallel`, and batch norms under data parallel.

1. hybrid_parallel (`own_programs`): each rank runs the user's program on its own part, as written; the user's
   collectives (`sw.ops`) join the ranks. Shapes are those of one rank.

    a value:                           one tensor x_r a rank, in the layout of partial sums over all digits: an
                                       all-reduce gives their sum
    an ordinary parameter:             p on every rank; its gradient is the sum over ranks of their gradients
    a layerwise parameter:             w_r, a slice of the tensor stacked along a first dim that all digits cut
    a loss:                            the mean over ranks of their losses

So the collectives of `sw.ops` are redistributions between layouts, and their transposes are their gradients.

2. Batch norms under data parallel (`with_own_statistics`): each device normalises by the statistics of its own part
   of the batch.

    output of part p = (x_p − mean_p) / √(variance_p + eps) · weight + bias
    running statistics: next = (1 − momentum) · old + momentum · mean over the parts of their statistics

Running statistics thus stay equal on all devices. They are the average of the parts' own running statistics (unbiased
variances; not the variance of the whole batch, which also contains the distance between the parts' means). The
statistics of all layers are averaged in one all-reduce at the end of the forward, instead of one per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..errors import SettingError, StrategyError
from ..graph import SEED, Graph, Op, Value, map_values, values_in
from ..layout import Digit, Digits, Layout
from ..ops import COLLECTIVES
from ..redistribution import CollectiveKind, Placement, redistribution
from ..rules import Assignment, Bound, Rule, bound_rule, expand, find_rule, whole_rule
from ..rules.normalization import batch_norm, own_batch_norm, running_averages
from ..rules.registry import local_call
from ..torch_private import pytree, schema_of
from .local_program import (
    Decision,
    GlobalExtreme,
    InputPlacement,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    Ref,
    description,
    find_batch_dims,
    place_inputs,
)
from .parameter_sharding import ParameterSharding

__all__ = [
    "OwnPrograms",
    "decided",
    "local_inputs",
    "own_programs",
    "place_whole_inputs",
    "with_own_statistics",
    "with_stacked",
]

aten = torch.ops.aten


@dataclass(frozen=True)
class OwnPrograms:
    """Facts that a graph of one rank's shapes does not contain.

    Attributes:
        parameters: names of the parameters that each rank has for itself (layerwise).
        loss: True where the model returns a loss.
    """

    parameters: frozenset[str]
    loss: bool


def local_inputs(
    args: tuple[object, ...], kwargs: dict[str, object], devices: int, dataset: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Whole inputs in the shapes that one rank is fed, as meta tensors.

    Raises:
        SettingError: a batch that the devices do not divide, or another setting that does not fit.
    """
    if dataset == "full_batch":
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values = tuple(
        Value(f"input {i}", tuple(x.shape), x.dtype) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)
    )
    layouts = iter(place_inputs(Graph(values, {}, {}, {}, (), ()), devices, dataset).inputs)
    made = [
        torch.empty(next(layouts).local_shape(x.shape), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        if isinstance(x, torch.Tensor)
        else x
        for x in leaves
    ]
    return pytree.tree_unflatten(made, spec)


def place_whole_inputs(graph: Graph, devices: int, dataset: object) -> InputPlacement:
    """The placement of the whole batch on ranks that each are fed a `graph` of their own shapes."""
    if dataset == "full_batch":
        return place_inputs(graph, devices, dataset)
    if dataset == "data_parallel":
        return InputPlacement(
            tuple(
                Layout.from_cuts(devices, (devices,) + (1,) * (len(v.shape) - 1))
                if v.shape
                else Layout.replicated(devices, 0)
                for v in graph.inputs
            ),
            True,
        )
    if not isinstance(dataset, (tuple, list)) or len(dataset) != len(graph.inputs):
        return place_inputs(graph, devices, dataset)  # raises the error
    layouts = tuple(entry if isinstance(entry, Layout) else Layout.from_cuts(devices, entry) for entry in dataset)
    return InputPlacement(layouts, any(not layout.is_replicated for layout in layouts))


def with_stacked(graph: Graph, devices: int, programs: OwnPrograms) -> Graph:
    """The graph with each layerwise parameter in its storage shape: all ranks' parameters stacked along a first
    dim."""
    return replace(
        graph,
        parameters={
            n: replace(v, shape=(devices, *v.shape)) if n in programs.parameters else v
            for n, v in graph.parameters.items()
        },
    )


def decided(graph: Graph, devices: int) -> dict[str, Decision]:
    """A decision per operator: the operator as written, on every rank."""
    out = {}
    for op in graph.ops:
        described = whole_rule(op)
        bound = bound_rule(op, described)
        out[op.name] = Decision(op, described, bound, bound.whole(devices), cause="own")
    return out


def own_programs(graph: Graph, devices: int, input_placement: InputPlacement, programs: OwnPrograms) -> LocalProgram:
    """The program that every rank runs on its own tensors."""
    return _Programs(graph, devices, input_placement, programs).run()


class _Programs:
    def __init__(self, graph: Graph, devices: int, input_placement: InputPlacement, programs: OwnPrograms) -> None:
        self.graph, self.devices, self.input_placement, self.programs = graph, devices, input_placement, programs
        self.all: Digits = (Digit(devices, 1),) if devices > 1 else ()
        self.made: dict[str, PlacedValue] = {}  # by value name
        self.renamed: dict[str, Value] = {}
        self.out: list[Instruction] = []
        self.seed: PlacedValue | None = None

    def run(self) -> LocalProgram:
        graph = self.graph
        inputs = tuple(self.placed_input(v, layout) for v, layout in zip(graph.inputs, self.input_placement.inputs))
        parameters = {n: self.parameter(v) for n, v in graph.parameters.items()}
        buffers = {n: self.enter(PlacedValue(n, v, self.whole(v))) for n, v in graph.buffers.items()}
        constants = {
            n: self.enter(PlacedValue(n, Value(n, tuple(t.shape), t.dtype), Layout.replicated(self.devices, t.dim())))
            for n, t in graph.constants.items()
        }
        for op in graph.ops:
            if op.target in COLLECTIVES:
                self.collective(op)
            else:
                self.compute(op)
        outputs = tuple(self.result_of(v) if isinstance(v, Value) else v for v in graph.outputs)
        updates = {n: self.updated(v) for n, v in graph.updates.items()}
        stored = {n: ParameterSharding(i.layout) for n, i in parameters.items()}
        return LocalProgram(
            self.devices,
            inputs,
            parameters,
            buffers,
            constants,
            tuple(self.out),
            outputs,
            updates,
            (),
            stored,
            {n: i.layout for n, i in parameters.items()},
            self.seed,
        )

    # -- layouts --

    def whole(self, value: Value) -> Layout:
        return Layout.replicated(self.devices, len(value.shape))

    def apart(self, value: Value) -> Layout:
        """The layout of a value that differs from rank to rank."""
        return self.whole(value).with_partial(self.all)

    def stacked(self, value: Value) -> tuple[Value, Layout]:
        """All ranks' tensors as one, along a new first dim."""
        whole = Value(value.name, (self.devices, *value.shape), value.dtype, value.requires_grad)
        return whole, Layout.of(self.devices, (self.all,) + ((),) * len(value.shape))

    # -- inputs and parameters --

    def enter(self, placed: PlacedValue) -> PlacedValue:
        self.made[placed.value.name] = placed
        return placed

    def placed_input(self, value: Value, layout: Layout) -> PlacedValue:
        shape = tuple(size * cut for size, cut in zip(value.shape, layout.cuts))
        placed = self.enter(PlacedValue(value.name, Value(value.name, shape, value.dtype, value.requires_grad), layout))
        self.made[value.name] = PlacedValue(value.name, value, placed.layout)
        if value.requires_grad and layout.replicas:
            self.summed(placed, layout, value)
        return placed

    def summed(self, source: PlacedValue, layout: Layout, value: Value) -> None:
        """Sum the gradients of a replicated tensor: each rank uses its replica differently."""
        target = PlacedValue(f"{source.name}~own", value, self.apart(value))
        gradient = redistribution(layout.with_partial(layout.replicas), layout)
        self.out.append(
            Redistribute(
                source,
                target,
                redistribution(layout, layout),
                gradient,
                "parameter" if source.name in self.graph.parameters else "conversion",
                source.name,
            )
        )
        self.made[value.name] = target

    def parameter(self, value: Value) -> PlacedValue:
        if value.name in self.programs.parameters:
            placed = PlacedValue(
                value.name, value.stored, Layout.of(self.devices, (self.all,) + ((),) * (len(value.shape) - 1))
            )
            value = replace(value, shape=value.shape[1:])
            made = self.call(
                aten.select.int,
                (Ref(value.name), 0, 0),
                f"{value.name}~own",
                value.stored,
                self.apart(value),
                (placed,),
            )
            if value.stored is not value:
                self.call(
                    aten.to.dtype,
                    (Ref(made.name), value.dtype),
                    f"{value.name}~cast",
                    value,
                    self.apart(value),
                    (made,),
                )
            return placed
        placed = self.enter(PlacedValue(value.name, value.stored, self.whole(value)))
        if value.requires_grad and self.all:
            self.summed(placed, placed.layout, value)
        elif value.stored is not value:
            target = self.enter(PlacedValue(f"{value.name}~cast", value, placed.layout))
            same = redistribution(target.layout, target.layout)
            self.out.append(
                Redistribute(placed, target, same, same if value.requires_grad else None, "parameter", value.name)
            )
        return placed

    # -- operators --

    def call(
        self,
        target: Callable[..., object],
        args: tuple[object, ...],
        name: str,
        value: Value,
        layout: Layout,
        reads: tuple[PlacedValue, ...],
        operator: str = "",
    ) -> PlacedValue:
        """Add an internal operator; its output stands for `value` from here on."""
        made = PlacedValue(name, value, layout)
        op = Op(name, target, (), {}, tuple(i.value for i in reads), (value,), origin=operator or value.name)
        self.out.append(LocalOp(op, target, args, {}, (made,), operator or value.name))
        self.made[value.name] = made
        return made

    def compute(self, op: Op) -> None:
        steps: list[tuple[Op, tuple[Rule, Bound, Assignment] | None]] = [(op, None)]
        described = find_rule(op)
        if described is not None and described.expand is not None:  # e.g. random operators, which share one stream
            bound = bound_rule(op, described)
            made, renamed = expand(self.swapped(op), described, bound, bound.whole(self.devices))
            self.renamed.update(renamed)
            steps = [(step, (rule, of_step, assignment)) for step, rule, of_step, assignment in made]
        for step, cut in steps:
            step = self.swapped(step)
            if any(v.name == SEED.name for v in step.inputs) and self.seed is None:
                self.seed = self.enter(PlacedValue(SEED.name, SEED, self.whole(SEED)))
            local = step if cut is None else local_call(step, *cut)
            args, kwargs = pytree.tree_map(
                lambda leaf: Ref(self.made[leaf.name].name) if isinstance(leaf, Value) else leaf,
                (local.args, local.kwargs),
            )
            alike = all(self.made[v.name].layout.is_replicated for v in step.inputs)
            outputs = tuple(
                None
                if v is None
                else self.enter(
                    PlacedValue(v.name, v, self.whole(v) if alike and not v.requires_grad else self.apart(v))
                )
                for v in step.outputs
            )
            self.out.append(LocalOp(step, local.target, tuple(args), kwargs, outputs, op.name))

    def swapped(self, op: Op) -> Op:
        if not any(v.name in self.renamed for v in op.inputs):
            return op
        now = lambda leaf: self.renamed.get(leaf.name, leaf) if isinstance(leaf, Value) else leaf
        args, kwargs, inputs = pytree.tree_map(now, (op.args, op.kwargs, op.inputs))
        return replace(op, args=args, kwargs=kwargs, inputs=inputs)

    def collective(self, op: Op) -> None:
        op = self.swapped(op)
        x, value = self.made[op.inputs[0].name], op.outputs[0]
        assert value is not None
        group = tuple(Digit(size, stride) for size, stride in zip(op.args[-2], op.args[-1]))
        if any(self.devices % digit.span for digit in group):
            raise SettingError(
                f"a group over {group} does not fit {self.devices} devices",
                **op.where,
                legal=f"a Layout of {self.devices} devices",
            )
        before, after, terms = self.between(op, group, len(value.shape))
        forward = redistribution(before, after)
        backward = (
            redistribution(after.with_partial(group) if terms else after, before.without_partial())
            if value.requires_grad
            else None
        )
        if before.partial and op.args[1] in ("max", "min"):
            x = self.extreme(op, x, value, before.without_partial().with_partial(group, op.args[1]))
            if backward is None:
                return
            forward = redistribution(after, after)  # the gradients of all ranks are still to be summed
            source = PlacedValue(x.name, value, after)
        else:
            source = PlacedValue(x.name, _of_all(op.inputs[0], before), before)
        target = PlacedValue(value.name, value, self.apart(value))
        self.out.append(Redistribute(source, target, forward, backward, "operator", op.name, op.name))
        self.made[value.name] = target

    def extreme(self, op: Op, x: PlacedValue, value: Value, before: Layout) -> PlacedValue:
        """Add a maximum or minimum over the ranks of a group. Its gradient expects that of all ranks."""
        source = PlacedValue(x.name, op.inputs[0], before)
        name = f"{value.name}~extreme" if value.requires_grad else value.name
        target, after = PlacedValue(name, value, self.apart(value)), before.without_partial()
        backward = before.partial if value.requires_grad else None
        self.out.append(GlobalExtreme(source, target, redistribution(before, after), source, (), backward, op.name))
        self.made[value.name] = target
        return target

    def between(self, op: Op, group: Digits, dims: int) -> tuple[Layout, Layout, bool]:
        """The source and target layouts of a collective, and True where the gradients of its output are partial
        sums."""

        def cut(dim: int) -> Layout:
            return Layout.of(self.devices, [group if d == dim else () for d in range(dims)])

        whole = Layout.replicated(self.devices, dims)
        kind = CollectiveKind.named(schema_of(op.target).name.split("::")[1])
        # Between the tensor and the group stand the dims: the one to be cut, then the one to be joined.
        before = cut(op.args[-3]) if kind.source is Placement.SHARD else whole.with_partial(group)
        after = cut(op.args[1]) if kind.target is Placement.SHARD else whole
        return before, after, kind.target is Placement.REPLICA

    # -- outputs --

    def mean(self, value: Value, name: str) -> PlacedValue:
        """The mean over ranks, on each rank; the gradient of each rank's term is its share of the mean's gradient."""
        x = self.made[value.name]
        total = PlacedValue(f"{name}~sum", value, self.whole(value))
        back = redistribution(self.whole(value), self.whole(value)) if value.requires_grad else None
        self.out.append(
            Redistribute(
                PlacedValue(x.name, value, self.apart(value)),
                total,
                redistribution(self.apart(value), self.whole(value)),
                back,
                "operator",
                name,
                name,
            )
        )
        return self.call(
            aten.div.Scalar,
            (Ref(total.name), float(self.devices)),
            f"{name}~mean",
            value,
            self.whole(value),
            (total,),
            name,
        )

    def result_of(self, value: Value) -> PlacedValue:
        value = self.renamed.get(value.name, value)
        x = self.made[value.name]
        if x.layout.is_replicated or not self.all:
            return x
        if self.programs.loss and not value.shape:
            return self.mean(value, value.name)
        whole, layout = self.stacked(value)
        whole = replace(whole, name=f"{value.name}~out")
        return self.call(aten.unsqueeze.default, (Ref(x.name), 0), whole.name, whole, layout, (x,), value.name)

    def updated(self, value: Value) -> PlacedValue:
        value = self.renamed.get(value.name, value)
        x = self.made[value.name]
        if x.layout.is_replicated or not self.all:
            return x
        if value.dtype.is_floating_point:
            return self.mean(value, value.name)
        target = PlacedValue(f"{value.name}~one", value, self.whole(value))  # a count, equal on all ranks
        self.out.append(
            Redistribute(
                PlacedValue(x.name, value, self.whole(value)),
                target,
                redistribution(target.layout, target.layout),
                None,
                "conversion",
                value.name,
            )
        )
        return target


def _of_all(value: Value, layout: Layout) -> Value:
    """The value of all ranks' slices in `layout`, given one rank's slice."""
    shape = tuple(size * cut for size, cut in zip(value.shape, layout.cuts))
    return Value(value.name, shape, value.dtype, value.requires_grad)


# -- batch norms under data parallel

_Layer = tuple[Op, Value]  # the batch norm, and the sums over the parts that it produces: [2, channels]


def with_own_statistics(graph: Graph, devices: int, on_missing_rule: str = "error") -> Graph:
    """The graph in which every batch norm that trains along the batch normalises `devices` parts of it separately.

    A batch norm stays as it is where its batch dim is not the batch, or where the devices do not divide the batch.

    Raises:
        StrategyError: a part would have one value a channel, which has no variance.
    """
    if devices == 1 or not any(map(_trains, graph.ops)):
        return graph
    batch_dims = find_batch_dims(graph, {op.name: description(op, on_missing_rule, devices)[1] for op in graph.ops})
    changed: dict[str, Value] = {}  # name of the plain operator's new running statistics -> the value that replaces it
    read = {v.name for op in graph.ops for v in op.inputs}
    layers: list[_Layer] = []
    ops = []
    for op in graph.ops:
        op = _swapped(op, changed)
        if not _trains(op) or batch_dims.get(op.inputs[0].name) != 0 or op.inputs[0].shape[0] % devices:
            ops.append(op)
            continue
        local_op, stats = _with_local_statistics(op, devices)
        ops.append(local_op)
        if any(v is not None and v.name in read for v in op.outputs[1:]):  # e.g. by a second call of the same layer
            ops += _averaged([(op, stats)], f"{op.name}.running_statistics", devices, changed)
        elif len(op.outputs) == 3:
            layers.append((op, stats))
    counted = [layer for layer in layers if layer[0].argument("tracked") is not None]
    untracked = [layer for layer in layers if layer[0].argument("tracked") is None]
    groups = [[layer] for layer in counted]
    groups += [
        [layer for layer in untracked if layer[1].dtype == dtype]
        for dtype in dict.fromkeys(stats.dtype for _, stats in untracked)
    ]
    for number, group in enumerate(groups):
        ops += _averaged(group, f"running_statistics{f'_{number}' if number else ''}", devices, changed)
    now = lambda tree: map_values(tree, lambda v: changed.get(v.name, v))
    return replace(graph, ops=tuple(ops), outputs=now(graph.outputs), updates=now(graph.updates))


def _trains(op: Op) -> bool:
    return op.target is batch_norm or (op.target is aten.batch_norm.default and op.argument("training"))


def _with_local_statistics(op: Op, devices: int) -> tuple[Op, Value]:
    """The operator on parts, and the sums of the parts' statistics that it produces."""
    x, mean = op.inputs[0], op.argument("running_mean")
    if x.numel // x.shape[1] == devices:
        raise StrategyError(
            f"on {devices} devices each would normalise by the statistics of one value a channel of {x.shape}",
            **op.where,
            legal="a larger batch, or sync_batch_norm=True",
        )
    dtype = mean.dtype if mean is not None else torch.float64 if x.dtype == torch.float64 else torch.float32
    weight, bias, eps, cudnn = map(op.argument, ("weight", "bias", "eps", "cudnn_enabled"))
    stats = Value(f"{op.name}.statistics", (2, x.shape[1]), dtype)
    inputs = tuple(v for v in (x, weight, bias) if v is not None)
    return replace(
        op,
        target=own_batch_norm,
        args=(x, weight, bias, devices, dtype, eps, cudnn),
        kwargs={},
        inputs=inputs,
        outputs=(op.outputs[0], stats),
    ), stats


def _swapped(op: Op, changed: dict[str, Value]) -> Op:
    if not any(v.name in changed for v in op.inputs):
        return op
    args, kwargs = map_values((op.args, op.kwargs), lambda v: changed.get(v.name, v))
    return replace(op, args=args, kwargs=kwargs, inputs=values_in((args, kwargs)))


def _averaged(group: list[_Layer], name: str, devices: int, changed: dict[str, Value]) -> list[Op]:
    """The operators that produce the new running statistics of several layers."""
    made, stats = [], tuple(s for _, s in group)
    seen = stats[0]
    if len(group) > 1:
        seen = Value(f"{name}.seen", (2, sum(s.shape[1] for s in stats)), seen.dtype)
        made.append(Op(seen.name, aten.cat.default, (list(stats), 1), {}, stats, (seen,)))
    old = [op.argument(which) for op, _ in group for which in ("running_mean", "running_var")]
    tracked = [op.argument("tracked") for op, _ in group if op.argument("tracked") is not None]
    momenta = [0.0 if math.isnan(op.argument("momentum")) else op.argument("momentum") for op, _ in group]
    new = tuple(Value(f"{name}.{i}", v.shape, v.dtype) for i, v in enumerate(old))
    changed.update((v.name, n) for v, n in zip((v for op, _ in group for v in op.outputs[1:]), new) if v is not None)
    made.append(
        Op(name, running_averages, (seen, old, tracked, momenta, [1 / devices] * 2), {}, (seen, *old, *tracked), new)
    )
    return made
