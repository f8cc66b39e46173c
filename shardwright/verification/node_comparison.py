"""A plan's program compared with the captured graph, node by node: produced values and their gradients.

reference   the captured graph on whole tensors, operator by operator, in plain torch (`Reference`)
program     the plan's local program on all ranks; after each node the ranks' slices are assembled and compared with
            the reference (`Comparison`)

The difference of two tensors is max |a − b| / max(|a|, |b|, floor). The floor of an operator's result is the size of
its terms, of which rounding is a fraction: for a product Σ |x| |w|, for other operators their inputs. Example: the sum
of 1e8, 1 and −1e8 in float32 is 0 or 1, depending on the order; relative to 1e8 the two agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..accelerators import sum_type
from ..errors import ShardwrightError
from ..graph import SEED, Graph, Op, Value, map_values
from ..identity_tables import IdentitySet
from ..layout import Layout
from ..partition.local_program import InputPlacement, Instruction, LocalOp, PlacedValue, Redistribute, made_by
from ..redistribution import Halo
from ..rules import expand, find_rule, has_rule
from ..rules.random_operators import run_on_one
from ..runtime.local.local_executor import LocalExecutor
from ..runtime.local.shards import ReplicasDiffer, assemble
from ..runtime.lowering import Node, lower
from ..sharded_plan import Plan
from .value_precision import Allowed, Precision
from .verify_report import FirstDifference, Worst

__all__ = ["Comparison", "Reference", "call", "difference", "largest", "worst"]


def _wide(x: Tensor) -> Tensor:
    """A tensor in float64, on the host where its device has no such numbers; a complex one as it is."""
    x = x.detach() if sum_type(x.device) == torch.float64 else x.detach().cpu()
    return x if x.is_complex() else x.double()


def largest(x: Tensor) -> float:
    """The largest finite magnitude in a tensor; 0 where there is none."""
    if x.numel() == 0:
        return 0.0
    size = _wide(x).abs().double()  # bools have no abs
    most = size.max().item()
    if math.isfinite(most):
        return most
    return size.nan_to_num(0.0, 0.0, 0.0).max().item()


def difference(reference: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The largest difference of two tensors, relative to the largest value of either (and at least to `floor`).

    NaN agrees with NaN, and an infinity with an equal one. The result is infinite where shapes differ, or where just
    one element is NaN.
    """
    if reference.shape != other.shape:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    a, b = _wide(reference), _wide(other)
    apart = (a - b).abs().max().item()
    if not math.isfinite(apart):  # elements are infinite or NaN: those that agree do not count
        same = (a == b) | (a.isnan() & b.isnan())
        apart = (a - b).abs().masked_fill(same, 0.0).max().item()
    if apart == 0.0 or not math.isfinite(apart):
        return 0.0 if apart == 0.0 else math.inf
    return apart / max(largest(a), largest(b), floor)


def worst(
    reference: Mapping[str, Tensor | None],
    other: Mapping[str, Tensor | None],
    precision: Callable[[str], Precision | None],
    allowed: Allowed,
    floor: float = 0.0,
) -> Worst:
    """The pair of tensors of one name that differs most, as a multiple of its tolerance. A missing gradient counts as
    zero.

    Args:
        reference, other: tensors by name.
        precision: maps a name to the precision of its tensor; None: nothing is rounded.
        allowed: the tolerance of each precision.
        floor: tensors smaller than this fraction of the largest tensor are measured relative to that fraction.
    """
    floating = [x for x in reference.values() if x is not None and x.is_floating_point()]
    floor *= max(map(largest, floating), default=0.0)
    found = Worst(tolerance=allowed.tolerance(None))
    for name, x in reference.items():
        y = other.get(name)
        if x is None and y is None:
            continue
        if x is None:
            assert y is not None
            x = torch.zeros_like(y)
        y = torch.zeros_like(x) if y is None else y
        decided = precision(name)
        this = Worst(difference(x, y, floor), allowed.tolerance(decided), name, decided)
        found = this if not found.tensor or this.excess() > found.excess() else found
    return found


class Reference:
    """The captured graph on whole tensors, one operator after the other.

    Attributes:
        values: by value name, the tensor.
        scales: by value name, the floor of its relative difference.
        outputs: the results of the graph.
    """

    def __init__(self, graph: Graph, state: dict[str, Tensor], inputs: Sequence[Tensor], seed: Tensor) -> None:
        self.graph = graph
        self.values: dict[str, Tensor] = {}
        self.scales: dict[str, float] = {}
        for name, value in (*graph.parameters.items(), *graph.buffers.items()):
            self.values[value.name] = (
                state[name].detach().to(value.dtype, copy=True).requires_grad_(value.requires_grad)
            )
        self.values.update((name, t) for name, t in graph.constants.items())
        self.values.update((v.name, t) for v, t in zip(graph.inputs, inputs, strict=True))
        self.values[SEED.name] = seed
        for op in graph.ops:
            outs = call(op, self.values)
            scale = self.terms(op)
            for made, out in zip(op.outputs, outs):
                if made is None:
                    continue
                if any(out is x for x in self.values.values()):
                    out = out.view_as(out)  # a tensor of its own, so that each has its own gradient
                if out.requires_grad:
                    out.retain_grad()
                self.values[made.name] = out
                self.scales[made.name] = max(scale, largest(out))
        self.outputs = [self.values[o.name] if isinstance(o, Value) else o for o in graph.outputs]

    def terms(self, op: Op) -> float:
        """The size of an operator's terms, of which rounding is a fraction: for a product Σ |x| |w|, for others their
        inputs."""
        rule, floating = find_rule(op), [v for v in dict.fromkeys(op.inputs) if v.dtype.is_floating_point]
        if rule is None or not rule.is_product(op):
            return max((largest(self.values[v.name]) for v in floating), default=0.0)
        with torch.no_grad():
            return max(
                map(largest, call(op, self.values | {v.name: self.values[v.name].abs() for v in floating})), default=0.0
            )

    def gradient(self, name: str) -> Tensor | None:
        return self.values[name].grad


def call(op: Op, values: dict[str, Tensor]) -> Sequence[Any]:
    """The outputs of an operator on whole tensors."""
    if torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ()) and has_rule(op):
        return run_on_one(op, values)
    args, kwargs = (map_values(tree, lambda v: values[v.name]) for tree in (op.args, op.kwargs))
    out = op.target(*args, **kwargs)
    return out if isinstance(out, (tuple, list)) else (out,)


class Comparison:
    """One program of a plan next to the reference.

    Args:
        plan: the plan of the program.
        reference: the captured graph on the same inputs.
        allowed: the largest difference allowed of each tensor.
        dtype: the dtype of the run.
        plans: operator of the reference -> its plan, where the program is one stage of several; None: `plan` for all.

    Attributes:
        found: the first difference of the forward, or None.
        last: the last node that ran.
    """

    def __init__(
        self,
        plan: Plan,
        reference: Reference,
        allowed: Allowed,
        dtype: torch.dtype,
        plans: Mapping[str, Plan] | None = None,
    ) -> None:
        self.plan, self.graph, self.reference = plan, reference.graph, reference
        self.allowed, self.dtype = allowed, dtype
        self.plans = dict.fromkeys(plan.decisions, plan) if plans is None else plans
        self.ops = {op.name: op for op in self.graph.ops}
        self.original = _originals(plan)
        self.padded = {
            self.original[i.value.name]: torch.Size(i.value.shape)
            for i in _instances(plan)
            if i.value.name in self.original
        }
        self.found: FirstDifference | None = None
        self.last: Node | None = None
        self.made: dict[str, tuple[Sequence[Tensor], Layout]] = {}  # value name -> shards that retain their gradients
        self.seen: set[Tensor] = set()  # shards that retain their gradients

    def failed(self, body: LocalExecutor, error: Exception) -> FirstDifference | None:
        """The operator that raised an error: the one after the last that ran."""
        nodes = [n for n in body.lowered.nodes if n.op == "call_function"]
        at = nodes.index(self.last) + 1 if self.last is not None else 0
        if at >= len(nodes):
            return None
        instruction, _ = _of(nodes[at])
        return self.at(
            instruction, "forward", math.inf, self.ops.get(instruction.operator), f"{type(error).__name__}: {error}"
        )

    def at(
        self,
        instruction: Instruction,
        phase: str,
        apart: float,
        op: Op | None,
        message: str = "",
        precision: Precision | None = None,
    ) -> FirstDifference:
        part = "conversion" if isinstance(instruction, Redistribute) else "operator"
        if op is None:  # the redistribution of a result of the model: named after its producer
            op = self.ops.get(getattr(instruction, "producer", ""))
        made = instruction.target.value.name if not isinstance(instruction, LocalOp) else instruction.op.name
        name, kind, source = (op.name, op.kind, op.source) if op is not None else (instruction.operator, "", "")
        allowed, decided = self.decided(precision)
        return FirstDifference(
            name, kind, source, phase, part, self.original.get(made, made), apart, self.dtype, message, allowed, decided
        )

    def decided(self, precision: Precision | None) -> tuple[float, Precision | None]:
        """The largest difference allowed of a tensor of this precision, and the precision."""
        return self.allowed.tolerance(precision), precision

    def differs(self, apart: float, precision: Precision | None) -> bool:
        """True where a difference is larger than this precision allows."""
        return apart > self.allowed.tolerance(precision)

    # -- forward --

    def record(self, node: Node, shards: Any) -> None:
        self.last = node
        instruction, placed = _of(node)
        if placed is None:
            return
        if isinstance(instruction, Redistribute) and instruction.forward.exchanges_halos:
            self.record_halos(instruction, shards)
            return
        name = self.original.get(placed.value.name)
        if name is None or name not in self.reference.values:
            return  # an intermediate value of an operator that was expanded into several
        if self.found is None:
            apart, message = self.compare(name, shards, placed.layout)
            precision = self.allowed.value(name)
            if self.differs(apart, precision):
                self.found = self.at(
                    instruction, "forward", apart, self.ops.get(instruction.operator), message, precision
                )
        self.keep(name, shards, instruction, placed)

    def record_halos(self, instruction: Redistribute, shards: Sequence[Tensor]) -> None:
        """Compare what each rank reads with the elements of the reference that it should read."""
        source = instruction.source
        name, layout = self.original.get(source.value.name), source.layout
        if self.found is not None or name not in self.reference.values or layout.partial:
            return
        whole, precision = self.reference.values[name].detach(), self.allowed.value(name)
        if tuple(whole.shape) != layout.padded(whole.shape):
            return  # elements beyond the true shape are undefined
        halos = [step.halo for step in instruction.forward.steps if step.halo is not None]
        for rank, shard in enumerate(shards):
            expected = read_with_halos(whole, layout, halos, rank)
            apart = difference(expected, shard.detach(), self.reference.scales.get(name, 0.0))
            if self.differs(apart, precision):
                message = f"the elements that rank {rank} reads beside its slice"
                self.found = self.at(
                    instruction, "forward", apart, self.ops.get(instruction.operator), message, precision
                )
                return

    def compare(self, name: str, shards: Sequence[Tensor], layout: Layout) -> tuple[float, str]:
        try:
            whole = assemble([s.detach() for s in shards], layout, check=True)
        except ReplicasDiffer as error:
            return math.inf, str(error)
        except (RuntimeError, ShardwrightError) as error:
            return math.inf, f"the slices do not fit together: {error}"
        reference = self.reference.values[name]
        whole = self.true(name, whole)
        message = (
            ""
            if whole.shape == reference.shape
            else f"it has the shape {tuple(whole.shape)} instead of {tuple(reference.shape)}"
        )
        return difference(reference, whole, self.reference.scales.get(name, 0.0)), message

    def keep(self, name: str, shards: Sequence[Tensor], instruction: object, placed: PlacedValue) -> None:
        """Make the shards of an operator's result retain their gradients."""
        if isinstance(instruction, Redistribute) or (
            isinstance(instruction, LocalOp) and placed.layout.reduction != "sum"
        ):
            return  # the gradient of a partial maximum is split among ranks: that of the completed one is compared
        if not shards[0].requires_grad or shards[0] in self.seen:
            return
        self.seen.update(shards)
        for shard in shards:
            shard.retain_grad()
        self.made[name] = shards, placed.layout.without_partial()

    def true(self, name: str, whole: Tensor) -> Tensor:
        """A value without the padding of dims that their cuts do not divide."""
        size, padded = self.reference.values[name].shape, self.padded.get(name)
        return whole[tuple(slice(s) for s in size)] if padded is not None and whole.shape == padded else whole

    # -- backward --

    def gradients(self, message: str = "") -> FirstDifference | None:
        """The value, the last in program order, whose gradient differs; None: all agree.

        Args:
            message: the error of the backward, if any.
        """
        for op in reversed(self.graph.ops):
            for value in op.outputs:
                if value is not None and value.name in self.made:
                    shards, layout = self.made[value.name]
                    apart, why = self.compare_gradient(value.name, [s.grad for s in shards], layout)
                    if self.differs(apart, self.allowed.gradient(value.name)):
                        return self.blame(value.name, apart, why or message)
        return None

    def parameters(self, state: Mapping[str, Tensor], message: str = "") -> FirstDifference | None:
        """The parameter whose gradient differs, that of the last operator first; None: all agree.

        Args:
            state: parameters by the graph's names, with the gradients of the program.
            message: the error of the backward, if any.
        """
        position = {
            name: max((self.graph.ops.index(op) for op, _ in uses), default=-1)
            for name, uses in self.graph.consumers().items()
        }
        for name, value in sorted(self.graph.parameters.items(), key=lambda item: -position.get(item[1].name, -1)):
            if value.requires_grad:
                whole = Layout.replicated(1, len(value.shape))
                apart, why = self.compare_gradient(value.name, [state[name].grad], whole)
                if self.differs(apart, self.allowed.gradient(value.name)):
                    return self.blame(value.name, apart, why or message)
        return None

    def buffers(
        self, state: Mapping[str, Tensor], after_step: Mapping[str, Tensor] | None = None
    ) -> FirstDifference | None:
        """The first buffer whose value after the step differs, with its first consumer; None: all agree.

        Args:
            state: buffers by the graph's names, after the step.
            after_step: the expected values of some buffers, in place of those of the reference.
        """
        for name, value in self.graph.buffers.items():
            after = self.reference.values[self.graph.updates[name].name if name in self.graph.updates else value.name]
            after = (after_step or {}).get(name, after)
            apart = difference(after, state[name], self.reference.scales.get(value.name, 0.0))
            precision = self.allowed.value(self.graph.updates.get(name, value).name)
            if self.differs(apart, precision):
                op = self.graph.consumers()[value.name][0][0]
                return FirstDifference(
                    op.name,
                    op.kind,
                    op.source,
                    "forward",
                    "operator",
                    name,
                    apart,
                    self.dtype,
                    "a buffer, after the step",
                    *self.decided(precision),
                )
        return None

    def compare_gradient(self, name: str, gradients: list[Tensor | None], layout: Layout) -> tuple[float, str]:
        expected = self.reference.gradient(name)
        if all(g is None for g in gradients):
            return (0.0 if expected is None or not largest(expected) else math.inf), ""
        shape = next(g for g in gradients if g is not None)
        try:
            whole = assemble([torch.zeros_like(shape) if g is None else g for g in gradients], layout, check=True)
        except ReplicasDiffer as error:
            return math.inf, str(error)
        whole = self.true(name, whole)
        # The terms of a gradient may cancel. Rounding is relative to the terms, which are as large as the gradients of
        # the consumers' outputs.
        made_of = [
            self.reference.gradient(v.name)
            for op, _ in self.graph.consumers().get(name, ())
            for v in op.outputs
            if v is not None
        ]
        floor = max((largest(g) for g in made_of if g is not None), default=0.0)
        return difference(torch.zeros_like(whole) if expected is None else expected, whole, floor), ""

    def blame(self, name: str, apart: float, message: str) -> FirstDifference:
        """The consumer that gives a value a wrong gradient: an operator that does so when run alone, else a
        redistribution."""
        users = [op for op, _ in self.graph.consumers().get(name, ())][::-1]
        assert users, f"a gradient of {name}, which nothing uses"
        guilty = next((op for op in users if self.differs(self.alone(op), self.allowed.alone(op))), None)
        if guilty is None:
            converted = {
                i.operator
                for plan in IdentitySet(self.plans.values())
                for i in plan.backward
                if isinstance(i, Redistribute)
                and i.backward is not None
                and i.backward.steps
                and self.original.get(i.source.value.name, i.source.value.name) == name
            }
            users = [op for op in users if op.name in converted] or users
            if len(users) > 1:
                message = "; ".join(filter(None, (message, "or for " + ", ".join(o.name for o in users[1:]))))
        op = guilty or users[0]
        return FirstDifference(
            op.name,
            op.kind,
            op.source,
            "gradient",
            "operator" if guilty else "conversion",
            name,
            apart,
            self.dtype,
            message,
            *self.decided(self.allowed.gradient(name)),
        )

    def alone(self, op: Op) -> float:
        """The error of the gradients of one operator's inputs, when the operator gets the right gradients of its
        outputs."""
        plan, seed = self.plans[op.name], self.reference.values[SEED.name]
        decision, inputs = plan.decisions[op.name], tuple(dict.fromkeys(op.inputs))
        outputs = tuple(v for v in op.outputs if v is not None)
        graph = Graph(inputs, {}, {}, {}, (op,), outputs)
        wanted = [decision.input_layout(op.inputs.index(v)) for v in inputs]
        input_placement = InputPlacement(
            tuple(
                w if w.padded(v.shape) == v.shape else Layout.replicated(w.devices, len(v.shape))
                for w, v in zip(wanted, inputs)
            ),
            False,
        )
        planned = Plan(graph, plan.devices, plan.mode, input_placement, {op.name: decision}, {})

        def gradients(run: Callable[[list[Tensor]], Sequence[Tensor]]) -> list[Tensor | None]:
            arguments = [self.reference.values[v.name].detach().clone().requires_grad_(v.requires_grad) for v in inputs]
            pairs = [
                (out, self.reference.gradient(v.name))
                for v, out in zip(outputs, run(arguments))
                if out.requires_grad and self.reference.gradient(v.name) is not None
            ]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [g for _, g in pairs])
            return [x.grad for x in arguments]

        def plain(arguments: list[Tensor]) -> Sequence[Tensor]:
            outs = call(op, {v.name: x for v, x in zip(inputs, arguments)} | {SEED.name: seed})
            return [out for out, v in zip(outs, op.outputs) if v is not None]

        expected = gradients(plain)
        try:
            program = LocalExecutor(lower(planned))
            seeds = [seed] if planned.program.seed is not None else []
            got = gradients(lambda arguments: program(*seeds, *arguments))
        except Exception:  # an operator with a wrong rule raises anything: it is the guilty one
            return math.inf
        arrived = [self.reference.gradient(v.name) for v in outputs]
        floor = max((largest(g) for g in arrived if g is not None), default=0.0)
        return max(
            (
                difference(a, torch.zeros_like(a) if b is None else b, floor)
                for a, b in zip(expected, got)
                if a is not None
            ),
            default=0.0,
        )


def read_with_halos(whole: Tensor, layout: Layout, halos: Sequence[Halo], rank: int) -> Tensor:
    """The elements of a whole tensor that a rank reads."""
    index, fill = list(layout.slice(whole.shape, rank)), [(0, 0)] * whole.dim()
    for halo in halos:
        part = layout.position(halo.dim, rank)
        reads, begin = halo.reads(part), halo.begins(part)
        index[halo.dim] = slice(reads.start, reads.stop)
        before = reads.start - begin
        fill[halo.dim] = before, halo.length - len(reads) - before
    amounts = [n for both in reversed(fill) for n in both]
    return torch.nn.functional.pad(whole[tuple(index)], amounts, value=halos[0].fill)


def _of(node: Node) -> tuple[Instruction, PlacedValue | None]:
    """The instruction of a program's node, and its value; None for a node whose value is a tuple of outputs."""
    instruction = node.meta.get("instruction")
    if instruction is None:
        instruction = node.all_input_nodes[0].meta["instruction"]
    return instruction, node.meta.get("instance")


def _instances(plan: Plan) -> Iterator[PlacedValue]:
    """The parameters of a program and all values that its operators produce."""
    yield from plan.program.parameters.values()
    for instruction in plan.program.instructions:
        yield from made_by(instruction)


def _originals(plan: Plan) -> dict[str, str]:
    """Name of a value in the local program -> its name in the captured graph."""
    out = {v.name: v.name for v in plan.graph.sources()} | {name: name for name in plan.graph.constants}
    for decision in plan.decisions.values():
        _, renamed = expand(decision.op, decision.rule, decision.bound, decision.assignment)
        for old in (v.name for v in decision.op.outputs if v is not None):
            out.setdefault(renamed[old].name if old in renamed else old, old)
    return out
