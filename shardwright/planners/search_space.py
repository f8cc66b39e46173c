"""The strategies that a search considers for an operator, and the price of each.

    a strategy = each axis of the rank to one splittable factor of the operator, or to none (replicas)

The axes are digits that together are the whole rank: its prime digits where there are few, else larger digits that
keep to the cluster's levels. A linear operator may also pass a partial sum through. The options are all strategies that
the rules allow under these axes, and no others; but halos are exchanged only where the batch cannot be cut so
(`Bound.halos_may_pay`).

Example: 8 devices in one level have the axes 2 @ 4, 2 @ 2, 2 @ 1; a matmul has 3 factors, so at most 4³ = 64
strategies.

The file has three parts:

1. Prices of edges (`EdgeCosts`): the redistributions from a value's producer to its consumers, and of its gradient
   back. The partitioner finds them by the same calls, and none depends on the value's shape.
2. Prices of operators (`op_cost`): one operator under one strategy, partitioned alone, with its inputs in the layouts
   that it needs and its outputs without consumers. Redistribution of its inputs belongs to part 1.
3. Options (`options_of`, `options_among`).

`operator_memory` has the tensors that an operator saves under a strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from ..cost.cost_model import CostModel
from ..errors import LayoutError, ShardwrightError
from ..graph import SEED, Graph, Master, Op, Value, map_values
from ..identity_tables import IdentityCache, IdentityMap
from ..layout import Digit, Digits, Layout, beside
from ..partition.local_program import (
    Decision,
    GlobalExtreme,
    InputPlacement,
    Instruction,
    LocalOp,
    PlacedValue,
    Redistribute,
    description,
)
from ..partition.partitioner import Partitioner, Use, brought
from ..redistribution import Redistribution, transpose
from ..rules import Assignment, Bound, Rule, expand

__all__ = [
    "EdgeCosts",
    "OpCost",
    "OperatorTable",
    "Strategy",
    "assignments",
    "kind_of_call",
    "op_cost",
    "options_among",
    "options_of",
    "prime_axes",
    "prime_factors",
    "redistributions_of",
    "strategy_of",
]


# -- prices of edges --


@lru_cache(maxsize=1 << 16)
def casts_of(source: Layout, uses: frozenset[Use]) -> int:
    """The number of casts of a parameter that is stored in another dtype, to serve all its uses by one operator."""
    if len(uses) < 2:
        return len(uses)
    partitioner = _served(source, uses, True, Master(torch.float64, torch.float32))
    return sum(move.casts for move in partitioner.out if isinstance(move, Redistribute))


@lru_cache(maxsize=1 << 20)
def redistributions_of(
    source: Layout, uses: frozenset[Use], gradient: bool
) -> tuple[tuple[Redistribution, bool], ...] | None:
    """The redistributions that serve all uses of a value, each with True for a redistribution of the gradient.

    Args:
        source: the layout of the value.
        uses: the uses to serve.
        gradient: True where the value has a gradient.

    Returns:
        The redistributions; None where a use cannot be served, because it needs a partial sum of a value without
        one.
    """
    if len(uses) == 1 and (use := next(iter(uses))).operator != "output":
        return _alone(*_sorted(source, use), gradient)
    try:
        partitioner = _served(source, uses, gradient)
    except LayoutError:
        return None
    out: list[tuple[Redistribution, bool]] = []
    for move in partitioner.out:
        if isinstance(move, Redistribute):
            both = (move.forward, False), (move.backward, True)
            out += [(c, back) for c, back in both if c is not None and not c.is_identity]
    return tuple(out)


def _served(source: Layout, uses: frozenset[Use], gradient: bool, master: Master | None = None) -> Partitioner:
    """A partitioner that has served all uses of one value.

    Raises:
        LayoutError: a use cannot be served.
    """
    dims = len(source.dims or ())
    value = Value("value", (0,) * dims, torch.float32, gradient, master)
    partitioner = Partitioner(
        Graph((value,), {}, {}, {}, (), ()), {}, InputPlacement((), False), source.devices, {}, {}, None
    )
    partitioner.enter(value, source)
    partitioner.producer[value.name] = "producer"
    wanted = sorted(uses, key=lambda use: (str(use.input_layout), use.partial))
    partitioner.uses[value.name] = list(wanted)
    for use in wanted:
        partitioner.obtain(value, use)
    return partitioner


def _sorted(source: Layout, use: Use) -> tuple[Layout, Use]:
    """The same delivery with the tensor's dims in one order, and without dims that are whole on both sides.

    The bytes, collectives and digits of a redistribution do not depend on the order of the dims, so many pairs of
    layouts have one price. A device count that is no power of two is left unchanged: there, several ways may be
    equally short.
    """
    target, devices = use.input_layout, source.devices
    if devices & (devices - 1):
        return source, use
    pairs = sorted((pair for pair in zip(source.dims or (), target.dims or ()) if pair[0] or pair[1]), key=_number)
    return (
        Layout.of(devices, (a for a, _ in pairs), source.partial, source.reduction),
        Use(Layout.of(devices, (b for _, b in pairs), target.partial, target.reduction), use.partial, use.operator),
    )


@lru_cache(maxsize=1 << 16)
def _number(pair: tuple[Digits, Digits]) -> tuple[tuple[int, int], ...]:
    """The sort key of a dim."""
    return tuple((d.size, d.stride) for digits in pair for d in (*digits, Digit(0, 1)))


@lru_cache(maxsize=1 << 18)
def _alone(source: Layout, use: Use, gradient: bool) -> tuple[tuple[Redistribution, bool], ...] | None:
    """The same as `redistributions_of` for one use, without a partitioner."""
    try:
        forward = brought(source, use.input_layout)
    except LayoutError:
        return None
    both = ((forward, False), (transpose(forward, use.partial), True)) if gradient else ((forward, False),)
    return tuple((c, back) for c, back in both if not c.is_identity)


@lru_cache(maxsize=1 << 10)
def _terms(
    sources: tuple[Layout, ...], uses: tuple[frozenset[Use], ...], gradient: bool
) -> tuple[tuple[tuple[Redistribution, bool], ...], np.ndarray, np.ndarray, np.ndarray]:
    """The sums in a table of prices, which depend on no size.

    Args:
        sources, uses, gradient: the layouts, the sets of uses, and whether the value has a gradient.

    Returns:
        The distinct redistributions; the place among them of each term; the cell of each term; and the cells that
        cannot be served. Cell ``i * len(uses) + j`` is that of layout i and set j.
    """
    place: dict[tuple[Redistribution, bool], int] = {}
    # Most cells share their redistributions with others.
    places: IdentityMap[tuple[tuple[Redistribution, bool], ...], list[int]] = IdentityMap()
    terms: list[int] = []
    cells: list[int] = []
    forbidden = []
    for i, source in enumerate(sources):
        for j, some in enumerate(uses):
            cell = i * len(uses) + j
            found = redistributions_of(source, some, gradient) if some else ()
            if found is None:
                forbidden.append(cell)
                continue
            known = places.get(found)
            if known is None:
                known = places[found] = [place.setdefault(each, len(place)) for each in found]
            terms += known
            cells += [cell] * len(found)
    return tuple(place), np.array(terms, np.int32), np.array(cells, np.int32), np.array(forbidden, int)


class EdgeCosts:
    """Prices of deliveries in seconds, and costs of operators; each is computed once.

    Args:
        costs: the prices.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.known: dict[tuple[Hashable, ...], np.ndarray] = {}
        self.op_costs: dict[Hashable, dict[Strategy, OpCost]] = {}  # by kind of operator

    def price(self, source: Layout, uses: Iterable[Use], value: Value, parameter: bool = False) -> float:
        """Seconds to serve uses of a value that lies in `source`; infinite where that is impossible."""
        return float(self.table((source,), (frozenset(uses),), value, parameter)[0, 0])

    def table(
        self, sources: tuple[Layout, ...], uses: tuple[frozenset[Use], ...], value: Value, parameter: bool = False
    ) -> np.ndarray:
        """The prices of a value in each of the layouts for each of the sets of uses.

        Args:
            sources: the layouts.
            uses: the sets of uses.
            value: the value; its size, dtypes and gradient matter.
            parameter: True for a parameter, whose gradient is summed together with others. A set of its uses takes a
                cast where it is stored in another dtype.

        Returns:
            Seconds, shape (layouts, sets); infinite where a set cannot be served.
        """
        key = (sources, uses, value.nbytes, value.requires_grad, parameter, value.master)
        if key not in self.known:
            found, redistributions, cells, forbidden = _terms(sources, uses, value.requires_grad)
            price = self.costs.stored if parameter else self.costs.redistribution
            forward, backward = value.numel * value.dtype.itemsize, value.numel * value.sums.itemsize
            prices = np.array([price(c, backward if back else forward) for c, back in found])
            out = (
                np.bincount(cells, weights=prices[redistributions], minlength=len(sources) * len(uses))
                if len(cells)
                else np.zeros(len(sources) * len(uses))
            )
            if parameter and value.master is not None:
                out += [
                    self.costs.cast(value, source) * (1 + value.requires_grad) * casts_of(source, some)
                    for source in sources
                    for some in uses
                ]
            out[forbidden] = np.inf
            self.known[key] = out.reshape(len(sources), len(uses))
        return self.known[key]


# -- prices of operators --


@dataclass(frozen=True)
class OpCost:
    """An operator's part of a program.

    Attributes:
        input_uses: by tensor input, the uses that are made of it; an input that is passed twice has its uses at its
            first place alone.
        output_layouts: by tensor output, its layout, partial sums included.
        forward, backward: seconds of the operator and of the redistributions inside it.
        made: bytes that a rank produces in the forward.
        program: the instructions of the operator alone.
        inputs: by tensor input, the placed value that the instructions consume.
        outputs: by tensor output, the placed value that they produce.
    """

    input_uses: tuple[frozenset[Use], ...]
    output_layouts: tuple[Layout, ...]
    forward: float
    backward: float
    made: int
    program: tuple[Instruction, ...] = ()
    inputs: tuple[PlacedValue, ...] = ()
    outputs: tuple[PlacedValue, ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def kind_of_call(op: Op) -> Hashable:
    """The properties that calls of one cost share: the operator, its plain arguments, its shapes and dtypes."""
    position = {v.name: i for i, v in reversed(list(enumerate(op.inputs)))}
    args = map_values((op.args, sorted(op.kwargs.items())), lambda v: f"#{position[v.name]}")
    return (
        op.target,
        repr(args),
        tuple((v.shape, v.dtype, v.requires_grad) for v in op.inputs),
        tuple(v and (v.shape, v.dtype, v.requires_grad) for v in op.outputs),
    )


def op_cost(decision: Decision, costs: CostModel) -> OpCost:
    """The cost of a decision, priced by a `CostModel`. The decision names the partial sums that pass through
    (`partial`).

    Raises:
        ShardwrightError: the operator cannot be worked out under this assignment.
    """
    op, devices = decision.op, decision.assignment.devices
    inputs = {v.name: v for v in op.inputs}
    graph = Graph(tuple(inputs.values()), {}, {}, {}, (op,), ())
    partitioner = Partitioner(graph, {op.name: decision}, InputPlacement((), False), devices, {}, {}, None)
    work = [(decision, *piece) for piece in partitioner.pieces(decision)]
    partitioner.collect(work, [])
    input_uses = {
        name: frozenset(
            Use(u.input_layout.with_partial(decision.partial) if decision.partial else u.input_layout, u.partial, "")
            for u in partitioner.uses.get(name, ())
        )
        for name in inputs
    }
    if SEED.name in partitioner.uses:
        partitioner.make(SEED, Layout.replicated(devices, 1))
    for name, value in inputs.items():
        targets = sorted((u.input_layout for u in input_uses[name]), key=str)
        partitioner.make(value, targets[0] if targets else Layout.replicated(devices, len(value.shape)))
    placed = {name: _padded(made) for name, made in partitioner.made.items()}
    placed_names = {made.name for made in placed.values()}
    known: dict[str, PlacedValue] = {i.name: i for i in placed.values()}
    for piece in work:
        partitioner.compute(*piece)
    forward = backward = 0.0
    made = 0
    instructions = tuple(map(_on_padded, partitioner.out) if decision.bound.uneven else partitioner.out)
    for i in instructions:
        results = [o for o in i.outputs if o is not None] if isinstance(i, LocalOp) else [i.target]
        known.update((o.name, o) for o in results)
        if isinstance(i, LocalOp) or i.source.name not in placed_names or i.forward.exchanges_halos:
            forward += costs.forward(i, known)
            if any(o.value.requires_grad for o in results):
                backward += costs.backward(i, known)
            made += sum(o.local_bytes for o in results)
    returned = tuple(_padded(partitioner.made[partitioner.now(v).name]) for v in op.outputs if v is not None)
    once: dict[str, frozenset[Use]] = dict(input_uses)
    return OpCost(
        tuple(once.pop(v.name, frozenset()) for v in op.inputs),
        tuple(i.layout for i in returned),
        forward,
        backward,
        made,
        instructions,
        tuple(placed[v.name] for v in op.inputs),
        returned,
    )


def _padded(placed: PlacedValue) -> PlacedValue:
    """A placed value whose shape is padded to the layout's cuts."""
    shape = placed.layout.padded(placed.value.shape)
    return placed if shape == placed.value.shape else replace(placed, value=replace(placed.value, shape=shape))


def _on_padded(instruction: Instruction) -> Instruction:
    """An instruction with all its values padded to their layouts' cuts."""
    if isinstance(instruction, LocalOp):
        return replace(instruction, outputs=tuple(o and _padded(o) for o in instruction.outputs))
    source, target = _padded(instruction.source), _padded(instruction.target)
    if isinstance(instruction, GlobalExtreme):
        return replace(instruction, source=source, target=target, operand=_padded(instruction.operand))
    return replace(instruction, source=source, target=target)


#: Most axes that a search assigns: an operator has up to (factors + 1) to this power strategies.
MOST_AXES = 3


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors, smallest first."""
    out, p = [], 2
    while p * p <= number:
        while number % p == 0:
            out.append(p)
            number //= p
        p += 1
    return (*out, number) if number > 1 else tuple(out)


def prime_axes(devices: int, sizes: Sequence[int] = (), most: int = MOST_AXES) -> Digits:
    """Digits that together are the rank, most major first.

    Args:
        devices: the number of devices.
        sizes: sizes of the cluster's levels, from the inside out; empty: one level.
        most: most axes. With more primes than that, the two smallest of the level with most axes are joined, of the
            outermost such level: near devices keep finer cuts.
    """
    levels: list[list[int]] = []
    rest = devices
    for size in sizes:
        share = math.gcd(size, rest)
        levels.append(list(prime_factors(share)))
        rest //= share
    levels.append(list(prime_factors(rest)))
    levels = [level for level in levels if level]
    while sum(map(len, levels)) > most and any(len(level) > 1 for level in levels):
        level = max(reversed(levels), key=len)
        level.sort()
        level[:2] = [level[0] * level[1]]
    while len(levels) > 1 and sum(map(len, levels)) > most:
        levels[-2:] = [[levels[-2][0] * levels[-1][0]]]
    out, stride = [], 1
    for level in levels:
        for size in sorted(level):
            out.append(Digit(size, stride))
            stride *= size
    return tuple(reversed(out))


def assignments(bound: Bound, devices: int, axes: Digits) -> Iterator[Assignment]:
    """The legal ways to give axes to factors, but for halos that cannot pay; the first gives none."""
    factors = [i for i, f in enumerate(bound.factors) if f.splittable and f.size > 1]
    for chosen in product((None, *factors), repeat=len(axes)):
        digits: dict[int, Digits] = {}
        for factor, axis in zip(chosen, axes):
            if factor is not None:
                digits[factor] = (*digits.get(factor, ()), axis)
        assignment = bound.cut_by(devices, digits)
        ways = ((f, axis.size) for f, axis in zip(chosen, axes) if f is not None)
        if bound.divides(assignment) and bound.is_consistent(assignment) and bound.halos_may_pay(assignment, ways):
            yield assignment


class Strategy(NamedTuple):
    """The choice for one operator: a `Decision` without the operator.

    Attributes:
        assignment: the digits of each factor.
        partial: the digits of the partial sum that passes through.
        out: the output layouts that a mark settles; None: no mark does.
    """

    assignment: Assignment
    partial: Digits = ()
    out: tuple[Layout, ...] | None = None


@dataclass(frozen=True)
class OperatorTable:
    """The operators of a graph with their rules.

    Args:
        graph: the captured program.
        devices: the number of devices.
        rules: by operator, its rule, binding and note.
        kinds: by operator, the properties that it shares with operators of the same cost.
    """

    graph: Graph
    devices: int
    rules: dict[str, tuple[Rule, Bound, str | None]]
    kinds: dict[str, Hashable]

    @classmethod
    def of(cls, graph: Graph, devices: int, on_missing_rule: str = "error", uneven: bool = False) -> OperatorTable:
        """The table of a graph.

        Raises:
            MissingRuleError: as `local_program.description`.
        """
        return cls(
            graph,
            devices,
            {op.name: description(op, on_missing_rule, devices, uneven) for op in graph.ops},
            {op.name: kind_of_call(op) for op in graph.ops},
        )

    def decided(self, op: Op, strategy: Strategy, cause: str) -> Decision:
        """The strategy of an operator as a decision."""
        rule, bound, note = self.rules[op.name]
        return Decision(op, rule, bound, strategy.assignment, strategy.out, cause, note, strategy.partial)


def strategy_of(decision: Decision) -> Strategy:
    """A decision as a strategy that others may have; an undecided partial sum that passes through is none."""
    return Strategy(decision.assignment, decision.partial or (), decision.out)


def options_of(
    described: OperatorTable,
    axes: Digits,
    fixed: Mapping[str, Decision] = {},
    outs: Mapping[str, tuple[Layout, ...]] = {},
    known: Iterable[Mapping[str, Decision]] = (),
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every operator under these axes. Operators that are alike have the same tuple.

    Args:
        described: the operators.
        axes: the digits to assign.
        fixed: operators that a mark decides.
        outs: by operator, the output layouts that marks settle.
        known: plans whose strategies are to be among the options, so that no search does worse than they.
    """
    cuts: dict[tuple[Hashable, ...], tuple[Assignment, ...]] = {}

    def all_of(op: Op, bound: Bound) -> tuple[Assignment, ...]:
        form = (bound.factors, bound.inputs, bound.outputs)
        if form not in cuts:
            cuts[form] = tuple(assignments(bound, described.devices, axes))
        return cuts[form]

    return options_among(described, all_of, fixed, outs, known)


def options_among(
    described: OperatorTable,
    among: Callable[[Op, Bound], tuple[Assignment, ...]],
    fixed: Mapping[str, Decision] = {},
    outs: Mapping[str, tuple[Layout, ...]] = {},
    known: Iterable[Mapping[str, Decision]] = (),
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every operator, of the assignments that a function gives.

    Args:
        among: the assignments of an operator. Operators that are to have the same strategies need one object, not
            equal ones.
        described, fixed, outs, known: as `options_of`.
    """
    known = tuple(known)
    partial_of: dict[str, frozenset[Digits]] = {}  # value -> the digits of partial sums of its possible layouts
    once = IdentityCache().once
    out: dict[str, tuple[Strategy, ...]] = {}
    for op in described.graph.ops:
        rule, bound, _ = described.rules[op.name]
        passing = frozenset() if op.name in fixed else _passing(op, rule, partial_of)
        additional = (
            (strategy_of(fixed[op.name]),)
            if op.name in fixed
            else tuple(dict.fromkeys(strategy_of(plan[op.name]) for plan in known if op.name in plan))
        )
        brought = outs.get(op.name)
        mine_of = () if op.name in fixed else among(op, bound)

        def strategies() -> tuple[tuple[Strategy, ...], tuple[frozenset[Digits], ...]]:
            mine = tuple(dict.fromkeys((*(Strategy(a, (), brought) for a in mine_of), *additional)))
            if op.name not in fixed:
                mine = _with_passing(described, op, mine, passing)
            return mine, tuple(
                frozenset(_partial_digits(bound, s, k) for s in mine) - {()} for k in range(len(bound.outputs))
            )

        key = (described.kinds[op.name], passing, additional, op.name in fixed, brought)
        out[op.name], results = once(key, (mine_of,), strategies)
        partial_of.update((v.name, digits) for v, digits in zip((v for v in op.outputs if v is not None), results))
    return out


def _passing(op: Op, rule: Rule, partial_of: dict[str, frozenset[Digits]]) -> frozenset[Digits]:
    """The digits of the partial sums that may pass through: those that all inputs may have."""
    if not rule.is_linear(op) or not op.inputs:
        return frozenset()
    return frozenset.intersection(*(partial_of.get(v.name, frozenset()) for v in op.inputs))


def _with_passing(
    described: OperatorTable, op: Op, strategies: tuple[Strategy, ...], passing: frozenset[Digits]
) -> tuple[Strategy, ...]:
    """The strategies, and each plain one that also passes one of these partial sums through: possible where the
    operator runs as itself."""
    if not passing:
        return strategies
    rule, bound, _ = described.rules[op.name]
    plain = [s for s in strategies if not s.partial and s.out is None and _is_plain(op, rule, bound, s.assignment)]
    more = [
        s._replace(partial=digits)
        for digits in sorted(passing, key=str)
        for s in plain
        if beside(described.devices, digits + s.assignment.used)
    ]
    return tuple(dict.fromkeys((*strategies, *more)))


def _is_plain(op: Op, rule: Rule, bound: Bound, assignment: Assignment) -> bool:
    """True where the operator runs as itself, and is not worked out as other operators."""
    try:
        steps, _ = expand(op, rule, bound, assignment)
    except ShardwrightError:
        return False
    return len(steps) == 1 and steps[0][0] is op


def _partial_digits(bound: Bound, strategy: Strategy, index: int) -> Digits:
    """The digits of an output's partial sum."""
    if strategy.out is not None:
        return ()
    layout = bound.output_layout(index, strategy.assignment)
    assert layout is not None
    if layout.reduction != "sum":
        return ()
    return layout.with_partial(strategy.partial + layout.partial).partial
