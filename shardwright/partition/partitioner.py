"""The partitioner: the redistribution on each edge between operators, forward and backward.

1. Edges inside one program (`partition`). A value has one layout at its producer; each consumer needs a layout; a
   redistribution connects the two, and its transpose is the backward. The steps found here are priced, printed and
   run.

    gradient layout of a value      = its layout, sums completed
    gradient of input i of an op    = partial sums over the digits that the op uses and input i does not carry
    gradient of a parameter's cast  = stays the partial sum that its consumer leaves: the cast's backward widens each
    or view                           term exactly, and the terms are summed as the parameter is stored
    halos that an op reads          = a redistribution of its own after that of the layout; its backward sends the
                                      gradients of halos back, partial sums as they are

2. Edges between pipeline stages (`sent_layout`, `received_layout`, `sender`): the layout of a value on both sides.

    stages of one size      position p sends to position p; the layout is that of the producer's stage
    n to r·n devices        position q receives from q div r: the layout's strides times r; r neighbours hold the same
    r·n to n devices        position q receives from r·q, once each r neighbours hold the same

Example: 4 to 2 devices, r = 2: ranks 0 and 1 must hold the same slice; position 0 receives from 0, position 1 from 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..cluster import Cluster
from ..errors import PlanError
from ..graph import SEED, Graph, Op, Value, form_of, map_values
from ..identity_tables import IdentityCache, IdentityMap
from ..layout import Digit, Digits, Layout, beside
from ..redistribution import (
    CollectiveKind,
    Halo,
    Redistribution,
    halo_exchange,
    halo_reduce,
    redistribution,
    through,
    transpose,
)
from ..rules import Assignment, Bound, Rule, expand
from ..rules.registry import local_call
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
    output_layouts,
    ways_of_parameters,
)
from .padded_dims import Piece, pad
from .parameter_sharding import OptimizerParallel, ParameterSharding, stored_layouts

__all__ = [
    "Partitioner",
    "Use",
    "between",
    "brought",
    "completed_first",
    "neighbours",
    "partition",
    "received_layout",
    "sender",
    "sent_layout",
    "wanted_in_two",
]


# -- edges between pipeline stages


def neighbours(source: int, target: int) -> int:
    """The number of neighbouring ranks of the sending stage that must hold the same slice.

    Args:
        source: devices of the sending stage.
        target: devices of the receiving stage.

    Raises:
        PlanError: neither number divides the other.
    """
    if source % target and target % source:
        raise PlanError(
            f"a stage of {source} devices sends to one of {target}",
            legal="numbers of devices of which one divides the other",
        )
    return max(1, source // target)


def sent_layout(layout: Layout, shape: tuple[int, ...], same: int) -> Layout:
    """The layout in which a value leaves its stage, nearest to that of its producer.

    Args:
        layout: the layout in which it is produced.
        shape: its global shape.
        same: the number of neighbouring ranks that must hold the same slice.
    """
    layout = layout.without_partial()
    if any(size % cut for size, cut in zip(shape, layout.cuts)):
        return Layout.replicated(layout.devices, len(shape))
    return Layout.of(
        layout.devices, [[major for d in dim if (major := _above(d, same)) is not None] for dim in layout.dims or ()]
    )


def _above(digit: Digit, stride: int) -> Digit | None:
    """The part of a digit that distinguishes ranks at least `stride` apart; None where there is none."""
    if digit.stride >= stride:
        return digit
    if digit.span <= stride or stride % digit.stride or digit.size % (stride // digit.stride):
        return None
    return Digit(digit.size * digit.stride // stride, stride)


def received_layout(layout: Layout, source: int, target: int) -> Layout:
    """The layout of a value on the `target` devices of a stage that receives it from `source` devices.

    Args:
        layout: the layout on the sending stage, from `sent_layout`.
    """
    scale = lambda d: Digit(d.size, d.stride * target // source)
    return Layout.of(target, [[scale(d) for d in dim] for dim in layout.dims or ()])


def sender(position: int, source: int, target: int) -> int:
    """The position of the sending stage that sends a part to `position` of the receiving stage."""
    return position * source // target


def between(cluster: Cluster, rank: int, peer: int) -> tuple[Digit, ...]:
    """Digits that cross the levels of the cluster at which two ranks are in different units."""
    out, below = [], 1
    for level in cluster.levels:
        if rank // below % level.size != peer // below % level.size:
            out.append(Digit(level.size, below))
        below *= level.size
    return tuple(out)


class Use(NamedTuple):
    """One consumption of a value.

    Args:
        input_layout: the layout in which the consumer reads it.
        partial: the digits over which the gradient that comes back is a partial sum.
        halos: the elements beside its slice that the consumer reads.
    """

    input_layout: Layout
    partial: Digits
    operator: str
    cause: str = "conversion"
    halos: tuple[Halo, ...] = ()


@lru_cache(maxsize=1 << 16)
def completed_first(source: Layout, targets: tuple[Layout, ...]) -> bool:
    """True where a partial sum is completed by an all-reduce before it is redistributed to its consumers.

    False only where each consumer's own redistribution turns the sum into one reduce-scatter and these send less
    together.
    """
    finished = source.without_partial()
    each = [redistribution(source, input_layout) for input_layout in targets]
    for found in each:
        reducing = [step for step in found.steps if step.reduces]
        if [(step.kind, step.digits) for step in reducing] != [(CollectiveKind.REDUCE_SCATTER, source.partial)]:
            return True
    once = redistribution(source, finished).sent + sum(redistribution(finished, w).sent for w in targets)
    return once <= sum(found.sent for found in each)


def brought(source: Layout, input_layout: Layout) -> Redistribution:
    """The redistribution of a value to the one layout in which it is consumed."""
    if source.partial and not input_layout.partial and completed_first(source, (input_layout,)):
        return through(source, source.without_partial(), input_layout)
    return redistribution(source, input_layout)


def wanted_in_two(parameter: Value, one: tuple[Layout, Op], other: tuple[Layout, Op]) -> PlanError:
    """The error of two operators that need a parameter in different layouts."""
    (first, a), (second, b) = one, other
    marked = [op for op in (a, b) if op.mark is not None and op.mark.in_strategy is not None]
    return PlanError(
        f"the parameter {parameter.name!r} {parameter.shape} is wanted in two layouts: {a.name} ({a.source}) asks for "
        f"cuts {first.cuts} [{first}], {b.name} ({b.source}) for {second.cuts} [{second}]",
        operator=b.name,
        source=b.source or None,
        strategy=", ".join(f"{op.name} {op.mark.in_strategy!r}" for op in marked) or None,
        legal=f"one layout on both, e.g. {first.cuts} for the parameter in {b.name}",
    )


def partition(
    graph: Graph,
    decisions: dict[str, Decision],
    input_placement: InputPlacement,
    devices: int,
    batch_dims: dict[str, int],
    stored: dict[str, Layout] | None = None,
    hsdp: OptimizerParallel | None = None,
) -> LocalProgram:
    """The local program of a planned graph.

    Args:
        decisions: one per operator of the graph, by name.
        input_placement: layouts of inputs and results.
        batch_dims: value name -> dim that carries the batch.
        stored: parameter and buffer name -> its storage layout, where that is already fixed.
        hsdp: storage of the other parameters; None: the layout in which their operators consume them.

    Raises:
        PlanError: a parameter that two operators want in different layouts.
        SettingError: a `shard_size` that does not divide the replicas of a parameter.
    """
    return Partitioner(graph, decisions, input_placement, devices, batch_dims, dict(stored or {}), hsdp).run()


class Partitioner:
    """The state of one `partition`: emits the instructions of a program, value by value."""

    def __init__(
        self,
        graph: Graph,
        decisions: dict[str, Decision],
        input_placement: InputPlacement,
        devices: int,
        batch_dims: dict[str, int],
        stored: dict[str, Layout],
        hsdp: OptimizerParallel | None,
    ) -> None:
        self.graph, self.decisions, self.input_placement, self.devices, self.batch_dims = (
            graph,
            decisions,
            input_placement,
            devices,
            batch_dims,
        )
        self.stored, self.hsdp = stored, hsdp
        self.renamed: dict[str, Value] = {}
        self.cast: dict[str, Value] = {}  # parameters stored in another dtype, in the dtype of their consumers
        self.made: dict[str, PlacedValue] = {}
        self.completed: dict[str, PlacedValue] = {}
        self.moves: dict[tuple[object, ...], PlacedValue] = {}
        self.uses: dict[str, list[Use]] = {}
        self.uses_by: IdentityMap[Op, list[Use]] = IdentityMap()  # operator -> the use of each of its inputs
        self.widened: dict[
            str, Digits
        ] = {}  # cast or view of a parameter -> the partial sum of gradients that passes on
        self.out: list[Instruction] = []
        self.producer: dict[str, str] = {}  # value name -> the operator of the user's program that produced it
        self.names: set[str] = set()
        self.padded: dict[str, Value] = {}  # parameter -> the padded value that is stored
        #: Facts that equal layers share: how an input is read, which operators run as they are.
        self.shared = IdentityCache()
        self.notes: list[str] = []

    def run(self) -> LocalProgram:
        graph = self.graph
        work = [
            (decision, *piece)
            for op in graph.ops
            for decision in (self.decisions[op.name],)
            for piece in self.pieces(decision)
        ]
        outputs = [self.now(v) if isinstance(v, Value) else v for v in graph.outputs]
        updated = {n: self.now(v) for n, v in graph.updates.items()}
        if any(decision.bound.uneven for decision in self.decisions.values()):
            work = self.pad(work, outputs, updated)
        tensors = [v for v in outputs if isinstance(v, Value)]
        results = IdentityMap(
            zip(tensors, self.result_layouts([v for v in graph.outputs if isinstance(v, Value)]), strict=True)
        )
        self.collect(work, [(v, results[v]) for v in tensors])
        inputs = tuple(self.enter(v, layout) for v, layout in zip(graph.inputs, self.input_placement.inputs))
        used = {n: self.used(v) for n, v in graph.parameters.items()}
        stored = self.storage(used)
        parameters = {n: self.enter(self.padded.get(n, v), stored[n].layout) for n, v in graph.parameters.items()}
        buffers = {n: self.make(v, self.whole(v)) for n, v in graph.buffers.items()}
        constants = {
            n: self.make(Value(n, tuple(t.shape), t.dtype), Layout.replicated(self.devices, t.dim()))
            for n, t in graph.constants.items()
        }
        seed = self.make(SEED, Layout.replicated(self.devices, 1)) if SEED.name in self.uses else None
        for decision, op, rule, bound, assignment in work:
            self.compute(decision, op, rule, bound, assignment)
        returned = []
        for v in outputs:
            returned.append(self.obtain(v, Use(results[v], (), "output")) if isinstance(v, Value) else v)
        updates = {n: self.obtain(v, Use(self.whole(graph.updates[n]), (), n)) for n, v in updated.items()}
        notes = [d.note for d in self.decisions.values() if d.note] + self.notes
        notes += [
            f"the parameter {n!r} {graph.parameters[n].shape} is not cut over its replicas: {s.note}"
            for n, s in stored.items()
            if s.reported
        ]
        return LocalProgram(
            self.devices,
            inputs,
            parameters,
            buffers,
            constants,
            tuple(self.out),
            tuple(returned),
            updates,
            tuple(notes),
            stored,
            used,
            seed,
        )

    # -- preparing --

    def pieces(self, decision: Decision) -> list[tuple[Op, Rule, Bound, Assignment]]:
        """The operators that do the work of the decided one under its assignment: that one itself, or several."""
        op = decision.op
        if self.renamed and any(v.name in self.renamed for v in op.inputs):
            op = replace(
                op,
                inputs=tuple(map(self.now, op.inputs)),
                args=map_values(op.args, self.now),
                kwargs=map_values(op.kwargs, self.now),
            )
        rule, bound, assignment = decision.rule, decision.bound, decision.assignment
        expands = rule.expand
        if expands is None:
            return [(op, rule, bound, assignment)]
        call = form_of(op), op.micro, op.fast
        if self.shared.once(call, (rule, bound, assignment), lambda: expands(op, bound, assignment) is None):
            return [(op, rule, bound, assignment)]
        steps, renamed = expand(op, rule, bound, assignment)
        self.renamed.update(renamed)
        return steps

    def pad(self, work: list[Piece], outputs: list[object], updated: dict[str, Value]) -> list[Piece]:
        """The work on padded values, where cuts do not divide their dims.

        `outputs` and `updated` are changed in place: each entry becomes the value that stands for it after the
        padding.
        """
        graph = self.graph
        self.collect(work, [])
        parameters = [(v, self.stored.get(n) or self.used(v)) for n, v in graph.parameters.items()]
        self.uses.clear()
        sources = dict(zip((v.name for v in graph.inputs), self.input_placement.inputs))
        sources |= {v.name: self.whole(v) for v in graph.buffers.values()}
        sources |= {n: Layout.replicated(self.devices, t.dim()) for n, t in graph.constants.items()}
        places = [i for i, v in enumerate(outputs) if isinstance(v, Value)]
        layouts = self.result_layouts([graph.outputs[i] for i in places])
        wanted = [(v, layout) for v, layout in zip((v for v in outputs if isinstance(v, Value)), layouts)]
        wanted += [(v, self.whole(graph.updates[n])) for n, v in updated.items()]
        made = pad(work, sources, parameters, wanted, self.renamed)
        ends = iter(made.wanted)
        for i in places:
            outputs[i] = next(ends)
        updated.update(zip(updated, ends))
        self.renamed.update(made.outer_values)
        self.padded, self.notes = made.parameters, made.notes
        return made.work

    def result_layouts(self, values: list[Value]) -> list[Layout]:
        """The layouts in which results are returned."""
        producers = (
            {
                v.name: (d, k)
                for d in self.decisions.values()
                for k, v in enumerate(v for v in d.op.outputs if v is not None)
            }
            if self.input_placement.sends_to_next_stage
            else {}
        )
        layouts = [
            layout or self.output_layout(*producers[v.name], v)
            for v, layout in zip(values, output_layouts(values, self.devices, self.input_placement, self.batch_dims))
        ]
        changed = self.graph.changed  # an input that is changed in place is returned in the layout it was fed in
        return layouts[: len(layouts) - len(changed)] + [self.input_placement.inputs[i] for i in changed]

    def output_layout(self, decision: Decision, k: int, value: Value) -> Layout:
        """The layout in which a value goes on to another stage."""
        made = decision.output_layout(k) if decision.out is None else decision.out[k]
        return sent_layout(made, value.shape, self.input_placement.sends_to_next_stage[value.name])

    def now(self, value: Value) -> Value:
        return self.renamed.get(value.name, value)

    def whole(self, value: Value) -> Layout:
        return self.stored.get(value.name) or Layout.replicated(self.devices, len(value.shape))

    def collect(
        self, work: Sequence[tuple[Decision, Op, Rule, Bound, Assignment]], outputs: Sequence[tuple[Value, Layout]]
    ) -> None:
        """Record all uses of every value before any redistribution is emitted: sums are completed once, gathers
        shared."""
        self.widened.clear()
        ways = ways_of_parameters(self.graph, {name: d.rule for name, d in self.decisions.items()})
        for value, layout in reversed(outputs):
            self.uses.setdefault(value.name, []).append(Use(layout, (), "output"))
        for decision, op, _rule, bound, assignment in reversed(work):
            if decision.op.name in ways:
                self.widen(op, bound, assignment)
            mine = [self.use(decision, op, bound, assignment, i) for i in range(len(op.inputs))]
            self.uses_by[op] = mine
            for value, use in zip(reversed(op.inputs), reversed(mine)):
                self.uses.setdefault(value.name, []).append(use)
        for uses in self.uses.values():
            uses.reverse()

    def widen(self, op: Op, bound: Bound, assignment: Assignment) -> None:
        """Let the partial sum of a gradient pass a cast or view of a parameter, where all consumers leave the same
        one."""
        value, layout = op.output(0), bound.output_layout(0, assignment)
        ways = {(use.input_layout, use.partial) for use in self.uses.get(value.name, ())}
        if len(ways) == 1 and value.requires_grad:
            input_layout, partial = ways.pop()
            if input_layout == layout and partial and beside(self.devices, partial + assignment.used):
                self.widened[value.name] = partial
                self.uses[value.name] = [use._replace(partial=()) for use in self.uses[value.name]]

    def use(self, decision: Decision, op: Op, bound: Bound, assignment: Assignment, index: int) -> Use:
        def read() -> tuple[Layout, Digits, tuple[Halo, ...]]:
            layout = bound.input_layout(index, assignment)
            assert layout is not None
            return layout, tuple(sorted(bound.gradient_partial(index, assignment))), bound.halos(index, assignment)

        layout, partial, halos = self.shared.once(index, (bound, assignment), read)
        value = op.inputs[index]
        if not value.requires_grad or value.name in self.widened:
            partial = ()
        elif self.widened:
            passed = self.widened.get(op.outputs[0].name, ()) if op.outputs[0] is not None else ()
            partial = tuple(sorted((*partial, *passed)))
        return Use(layout, partial, decision.op.name, halos=halos)

    def storage(self, used: dict[str, Layout]) -> dict[str, ParameterSharding]:
        """The storage of each parameter: as already fixed, or as its consumers need it, cut further where
        `hsdp` is set."""
        settled = {n: ParameterSharding(self.stored[n]) for n in used if n in self.stored}
        settled |= {
            n: ParameterSharding(
                used[n],
                "it is padded" if self.hsdp is not None and used[n].replicas else None,
                self.hsdp is not None and bool(used[n].replicas),
            )
            for n in self.padded
            if n not in settled
        }
        unsettled = {n: layout for n, layout in used.items() if n not in settled}
        if self.hsdp is None:
            return settled | {n: ParameterSharding(layout) for n, layout in unsettled.items()}
        stored = {n: (self.graph.parameters[n], layout) for n, layout in unsettled.items()}
        return settled | stored_layouts(stored, self.hsdp)

    def used(self, parameter: Value) -> Layout:
        """The layout that all consumers of a parameter need."""
        uses = self.uses.get(parameter.name, [])
        layouts = {use.input_layout: use.operator for use in uses if use.operator != "output"}
        if len(layouts) > 1 and parameter.name in self.stored:
            return self.stored[parameter.name]
        if len(layouts) > 1:
            (first, a), (second, b) = list(layouts.items())[:2]
            raise wanted_in_two(parameter, (first, self.decisions[a].op), (second, self.decisions[b].op))
        return next(iter(layouts), self.whole(parameter))

    # -- emitting --

    def name(self, wish: str) -> str:
        candidate, count = wish, 1
        while candidate in self.names:
            candidate, count = f"{wish}~{count}", count + 1
        self.names.add(candidate)
        return candidate

    def make(self, value: Value, layout: Layout) -> PlacedValue:
        placed = PlacedValue(self.name(value.name), value, layout)
        self.made[value.name] = placed
        return placed

    def enter(self, value: Value, layout: Layout) -> PlacedValue:
        """A placed input, parameter or buffer; a parameter in its storage dtype, which a redistribution casts for
        its consumers."""
        if value.stored is not value:
            self.cast[value.name] = value
        return self.make(value.stored, layout)

    def compute(self, decision: Decision, op: Op, rule: Rule, bound: Bound, assignment: Assignment) -> None:
        open_ = self.open_through(decision, op, rule, assignment)
        got = []
        # A view of a parameter may be widened after its consumers were collected.
        uses = self.uses_by[op] if not self.widened else None
        for i, value in enumerate(op.inputs):
            use = self.use(decision, op, bound, assignment, i) if uses is None else uses[i]
            if open_ is not None:
                use = use._replace(input_layout=use.input_layout.with_partial(open_))
            got.append(self.obtain(value, use))
        local = local_call(op, rule, bound, assignment)
        feed = iter(got)
        args, kwargs = map_values((local.args, local.kwargs), lambda _: Ref(next(feed).name))
        outputs: list[PlacedValue | None] = []
        k = 0
        for output in op.outputs:
            if output is None:
                outputs.append(None)
                continue
            layout = bound.output_layout(k, assignment)
            assert layout is not None
            if open_ is not None:
                layout = layout.with_partial(open_ + layout.partial)
            outputs.append(self.make(output, layout))
            k += 1
        as_written = local.target is op.target and local.args is op.args and local.kwargs is op.kwargs
        self.out.append(LocalOp(op, local.target, tuple(args), kwargs, tuple(outputs), decision.op.name, as_written))
        self.producer.update((v.name, decision.op.name) for v in op.outputs if v is not None)
        for placed in outputs:
            if placed is not None and placed.layout.partial and placed.layout.reduction != "sum":
                self.extreme(placed, got[0], bound, decision.op.name)
        for value, layout in zip((v for v in decision.op.outputs if v is not None), decision.out or ()):
            final = self.now(value)
            if any(v is not None and v.name == final.name for v in op.outputs):
                use = Use(layout, (), decision.op.name, "operator")
                self.made[final.name] = self.convert(self.made[final.name], use)

    def open_through(self, decision: Decision, op: Op, rule: Rule, assignment: Assignment) -> Digits | None:
        """The digits of a partial sum that passes through a linear operator.

        All inputs have the same partial sum, and the operator's own cuts do not touch its digits. A decided partial
        sum does not pass into the inner operators of an expanded operator.
        """
        if decision.partial is not None and op.origin is None:
            return decision.partial or None
        if decision.partial is not None and any(
            self.now(v).name == w.name for v in decision.op.inputs for w in op.inputs
        ):
            return None
        if not rule.is_linear(op) or not op.inputs:
            return None
        layouts = [self.made[v.name].layout for v in op.inputs]
        first = layouts[0].partial
        if not first or any(layout.partial != first or layout.reduction != "sum" for layout in layouts):
            return None
        if any(v.name in self.completed for v in op.inputs) or not beside(self.devices, first + assignment.used):
            return None
        return first

    def extreme(self, placed: PlacedValue, operand: PlacedValue, bound: Bound, operator: str) -> None:
        """Complete a maximum or minimum at once: its gradient needs the winner."""
        layout = placed.layout.without_partial()
        target = PlacedValue(self.name(placed.name), placed.value, layout)
        output_dims = set(bound.outputs[0])
        dims = tuple(d for d, dim in enumerate(bound.inputs[0]) if dim not in output_dims or not dim)
        self.out.append(
            GlobalExtreme(
                placed,
                target,
                redistribution(placed.layout, layout),
                operand,
                dims,
                placed.layout.partial if placed.value.requires_grad else None,
                operator,
            )
        )
        self.made[placed.value.name] = target

    def obtain(self, value: Value, use: Use) -> PlacedValue:
        """The value in the layout of a use."""
        source = self.made[value.name]
        if source.layout.partial and not use.input_layout.partial and self.complete_first(value, source):
            if len({(u.input_layout, u.partial) for u in self.uses.get(value.name, ())}) == 1:
                return self.with_halos(self.convert(source, use, middle=source.layout.without_partial()), use)
            source = self.complete(value, source)
        return self.with_halos(self.convert(source, use), use)

    def with_halos(self, source: PlacedValue, use: Use) -> PlacedValue:
        """The value of a use with the halos that the use reads: all slices with their halos, one after the other."""
        if not use.halos:
            return source
        key = (source.name, use.halos, use.partial)
        if key not in self.moves:
            shape = list(source.value.shape)
            for halo in use.halos:
                shape[halo.dim] = halo.parts * halo.length
            value = replace(source.value, name=f"{source.value.name}.halo", shape=tuple(shape))
            target = PlacedValue(self.name(value.name), value, source.layout)
            gradient = source.layout.without_partial().with_partial(use.partial)
            self.out.append(
                Redistribute(
                    source,
                    target,
                    halo_exchange(source.layout, use.halos),
                    halo_reduce(gradient, use.halos) if value.requires_grad else None,
                    "conversion",
                    use.operator,
                )
            )
            self.moves[key] = target
        return self.moves[key]

    def complete(self, value: Value, source: PlacedValue) -> PlacedValue:
        if value.name not in self.completed:
            use = Use(source.layout.without_partial(), (), self.producer[value.name], "operator")
            self.completed[value.name] = self.convert(source, use)
        return self.completed[value.name]

    def complete_first(self, value: Value, source: PlacedValue) -> bool:
        """True where a sum is completed by an all-reduce before the redistributions of its uses."""
        uses = self.uses.get(value.name, [])
        return (
            value.name in self.completed
            or any(u.operator == "output" for u in uses)
            or completed_first(source.layout, tuple(dict.fromkeys(u.input_layout for u in uses)))
        )

    def convert(self, source: PlacedValue, use: Use, middle: Layout | None = None) -> PlacedValue:
        """The source redistributed for a use.

        Shared by (source, layout, digits of the gradient's sum): q, k and v then need one sum in the backward.
        """
        partial = use.partial
        if partial and source.layout != use.input_layout:
            uses = self.uses.get(source.value.name, ())
            if len({u.partial for u in uses if u.input_layout == use.input_layout}) > 1:
                # Uses of one layout that differ in the backward share the forward and sum their gradients separately.
                source = self.convert(source, Use(use.input_layout, (), use.operator, use.cause))
        key = (source.name, use.input_layout, partial)
        if key in self.moves:
            return self.moves[key]
        forward = (
            redistribution(source.layout, use.input_layout)
            if middle is None
            else through(source.layout, middle, use.input_layout)
        )
        backward = transpose(forward, partial) if source.value.requires_grad else None
        value = self.cast.get(source.value.name, source.value)
        if forward.is_identity and (backward is None or backward.is_identity) and value.dtype == source.value.dtype:
            target = source
        else:
            target = PlacedValue(self.name(source.name), value, use.input_layout)
            cause = "parameter" if source.value.name in self.graph.parameters else use.cause
            reshards = (
                cause == "parameter"
                and not forward.is_identity
                and self.hsdp is not None
                and self.hsdp.reshards_after_forward(source.value.name)
            )
            self.out.append(
                Redistribute(
                    source,
                    target,
                    forward,
                    backward,
                    cause,
                    use.operator,
                    self.producer.get(source.value.name, ""),
                    reshards,
                )
            )
        self.moves[key] = target
        return target
