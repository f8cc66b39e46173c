"""sharding_propagation: a few operators are marked, the others follow, and where demands meet, the cheaper one wins.

    options(operator) = what the marks ask of it (`demands`), and what `semi_auto` would do
    choice            = argmin of the energy of all options together (`energy`, `exact`)

A marked operator has one option. One that no mark reaches is cut along the batch. Of the others, all that the marks
ask is weighed at once: a conflict is decided by the seconds of the whole step, and the operator's note says who lost
it, and the price of each. As what `semi_auto` does is among the options, the plan is not dearer than that of the same
marks there; where the two are near, their programs are compared.

Where marks have several priorities, what a mark above the lowest priority asks of an operator is followed whatever it
costs: its options are what such marks ask, and what cuts it further.

A search weighs everything that the rules allow; this weighs what follows from the marks: a handful an operator, so that
the time grows with the operators alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ..cluster import Cluster
from ..cost.cost_model import CostModel
from ..errors import PlanError, SettingError
from ..graph import Graph, Op, Value
from ..layout import Digit, Digits, Layout, beside, complement, digits_size, merge, overlap
from ..partition.local_program import Decision, Decisions, InputPlacement, SearchResult
from ..partition.parameter_sharding import OptimizerParallel
from ..rules import Assignment, Bound
from ..sharded_plan import Plan
from ..solver.solve import solve
from .graph_problem import CostGraph, Search
from .search_space import OperatorTable, Strategy, options_of, strategy_of
from .semi_auto import semi_auto

__all__ = ["Demand", "demands_of", "path_from_mark", "ranking", "sharding_propagation", "within"]


# ----------------------------------------------------------------------------------------------------
# How the operators of a program would be cut if they followed the marks: layouts that flow through factors.
#
#     layout of a value -> factors of every operator that reads or makes it -> layouts of its other values
#
# and so on, forwards and backwards, until nothing new is found. The leading operand says how its dims are cut; what the
# operator has of further factors, the others add (*basic*: they do not contradict one another). Where they do, each
# leads
# once, and the operator is asked for several cuts: which of them it gets is decided elsewhere, by cost. *Aggressive* is
# what goes beyond what was asked for:
#
#     an open sum may be left as slices       its digits cut a dim of the output further: reduce-scatter, not all-reduce
#     digits that would repeat the work       cut a factor that the leading operand has not, such as a product's columns
#
# Marks come first, and are left alone. Those of the highest priority, the lowest number, are followed to the end before
# the next are heard: what these ask of an operator that basic propagation has reached must leave it cut as it was asked
# to be, or is outranked, and goes no further. Then comes what passes layouts through: pointwise operators and views,
# which contract nothing, so that following sends nothing and decides nothing. Products and reductions so have heard
# both sides when they are reached. For one operator, basic comes before aggressive. This order decides who is heard
# where an operator is asked for more than `MOST` cuts, and whom a leading operand is joined by.
# ----------------------------------------------------------------------------------------------------

#: How many cuts one operator is asked for at most, of those found by basic propagation, and as many by aggressive; not
#: counting those by which it shares a parameter with a marked one.
MOST = 6


@dataclass(frozen=True)
class Demand:
    """How an operator would be cut if it followed a mark.

    Args:
        assignment: which digits would cut which factor.
        mark: the name of the marked operator that it comes from.
        via: the operator that handed it on.
        aggressive: it goes beyond what was asked for.
        priority: of the mark.
        outranked: a mark of higher priority asks for something else.
        settled: a marked operator lays out a parameter of this one so, which no priority changes.
    """

    assignment: Assignment
    mark: str
    via: str
    aggressive: bool = False
    priority: int = 0
    outranked: bool = False
    settled: bool = False


@dataclass(frozen=True)
class _Port:
    """Where an operator touches a value: as its input or output of that number."""

    op: Op
    index: int
    output: bool


@dataclass(frozen=True)
class _Offer:
    """A layout that some operator has a value in, or would have."""

    layout: Layout
    mark: str
    via: str
    aggressive: bool
    priority: int = 0


def demands_of(graph: Graph, decisions: Mapping[str, Decision], devices: int) -> dict[str, tuple[Demand, ...]]:
    """What the marks ask of every operator that has none: none twice, in the order in which they are heard.

    Args:
        decisions: of every operator, its rule bound to its shapes; of marked ones, what the mark says.
    """
    return _Propagation(graph, decisions, devices).run()


def ranking(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """Those of the highest priority among the basic demands to be cut: others may cut further, but not otherwise."""
    cutting = [d for d in demands if d.assignment.used and not d.aggressive and not d.outranked]
    first = min((d.priority for d in cutting), default=0)
    return tuple(d for d in cutting if d.priority == first)


def within(some: Assignment, all_: Assignment) -> bool:
    """Whether an assignment cuts every factor at least as another does, by the same digits."""
    return all(not mine or _begins(theirs, mine) for mine, theirs in zip(some.digits, all_.digits))


def _begins(digits: Digits, start: Digits) -> bool:
    """Whether `digits`, most major first, begin with `start`."""
    if digits[: len(start)] == start:
        return True
    head, k = start[:-1], len(start) - 1
    if digits[:k] != head or len(digits) <= k:
        return False
    mine, theirs = start[-1], digits[k]  # a longer digit begins with a shorter one where their major ends agree
    return theirs.span == mine.span and digits_size((theirs,)) % mine.size == 0


def passes_through(bound: Bound) -> bool:
    """Whether an operator contracts nothing, so that what its inputs have its outputs can have."""
    kept = [{f for dim in dims for f in dim} for dims in bound.outputs]
    return all(
        f in names
        for names in kept
        for dims in bound.inputs
        for dim in dims
        for f in dim
        if bound.factors[f].splittable and bound.factors[f].size > 1
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to cut operators of one form, and what values then lie in.

    Args:
        inputs, outputs: the layouts, sums completed.
        scattered: by output, those with its open sum left as slices.
    """

    assignment: Assignment
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    scattered: tuple[tuple[Layout, ...], ...]


class _Form:
    """What operators have in common whose factors and dims are alike: each question is answered once for them all."""

    def __init__(self, bound: Bound, devices: int) -> None:
        self.bound, self.devices = bound, devices
        self.contracts = not passes_through(bound)
        self.projected: dict[tuple[bool, int, Layout], dict[int, Digits]] = {}
        self.cuts: dict[tuple, _Cut | None] = {}
        self.known: dict[Assignment, _Cut] = {}

    def dims(self, output: bool, index: int) -> tuple[tuple[int, ...], ...]:
        return (self.bound.outputs if output else self.bound.inputs)[index]

    def project(self, output: bool, index: int, layout: Layout) -> dict[int, Digits]:
        key = (output, index, layout)
        if key not in self.projected:
            self.projected[key] = project(self.bound, self.dims(output, index), layout)
        return self.projected[key]

    def cut(self, digits: Mapping[int, Digits]) -> _Cut | None:
        """The legal cut by these digits; None where none is."""
        key = tuple(digits.items())
        if key not in self.cuts:
            assignment = legal(self.bound, digits, self.devices) if digits else self.bound.whole(self.devices)
            self.cuts[key] = None if assignment is None else self.of(assignment)
        return self.cuts[key]

    def of(self, assignment: Assignment) -> _Cut:
        if assignment not in self.known:
            bound = self.bound
            wanted = [bound.input_layout(i, assignment) for i in range(len(bound.inputs))]
            left = [bound.output_layout(k, assignment) for k in range(len(bound.outputs))]
            self.known[assignment] = _Cut(
                assignment,
                tuple(wanted),
                tuple(layout.without_partial() for layout in left),
                tuple(map(tuple, map(_scattered, left, bound.out_shapes))),
            )
        return self.known[assignment]


class _Propagation:
    def __init__(self, graph: Graph, decisions: Mapping[str, Decision], devices: int) -> None:
        self.graph, self.devices, self.decisions = graph, devices, decisions
        forms: dict[tuple, _Form] = {}
        self.forms: dict[str, _Form] = {}
        for name, decision in decisions.items():
            bound = decision.bound
            key = (bound.factors, bound.inputs, bound.outputs, bound.in_shapes, bound.out_shapes, bound.reduction)
            if key not in forms:
                forms[key] = _Form(bound, devices)
            self.forms[name] = forms[key]
        self.marked = {op.name for op in graph.ops if op.mark is not None and op.mark.in_strategy is not None}
        self.parameters = set(graph.parameters)
        self.outputs = {op.name: tuple(v for v in op.outputs if v is not None) for op in graph.ops}
        self.ports: dict[str, list[_Port]] = {}
        for op in graph.ops:
            for i, value in enumerate(op.inputs):
                self.ports.setdefault(value.name, []).append(_Port(op, i, False))
            for k, value in enumerate(self.outputs[op.name]):
                self.ports.setdefault(value.name, []).append(_Port(op, k, True))
        self.offers: dict[str, dict[Layout, _Offer]] = {}
        self.found: dict[str, dict[int, Demand]] = {}
        self.outranked: dict[str, dict[str, Demand]] = {}  # by operator, then by mark
        self.priority = 0  # of the marks that are followed now
        self.counts: dict[tuple[str, bool], int] = {}
        # offers on their way: (to one that contracts, aggressive, in the order in which they were sent, to whom, what)
        self.waves: list[tuple[bool, bool, int, _Port, _Offer]] = []
        self.sent = 0

    def run(self) -> dict[str, tuple[Demand, ...]]:
        for self.priority in sorted({op.mark.priority for op in self.graph.ops if op.mark is not None}):
            for op in self.graph.ops:
                if op.mark is not None and op.mark.priority == self.priority:
                    self.begin(op)
            while self.waves:
                *_, port, offer = heapq.heappop(self.waves)
                self.hear(port, offer)
        return {name: (*found.values(), *self.outranked.get(name, {}).values()) for name, found in self.found.items()}

    def begin(self, op: Op) -> None:
        """The layouts that a mark asks for."""
        decision = self.decisions[op.name]
        if op.name in self.marked:
            self.emit(op, self.forms[op.name].of(decision.assignment), op.name, False)
        elif decision.out is not None:  # its result is marked, how it works is not
            for k, layout in enumerate(decision.out):
                self.send(_Port(op, k, True), _Offer(layout, op.name, op.name, False, self.priority))

    # -- what an operator says --

    def emit(self, op: Op, cut: _Cut, mark: str, aggressive: bool) -> None:
        """The layouts of all values of an operator that is cut so."""
        for value, layout in zip(op.inputs, cut.inputs):
            self.offer(value, layout, op, mark, aggressive)
        out = self.decisions[op.name].out
        for k, value in enumerate(self.outputs[op.name]):
            self.offer(value, cut.outputs[k] if out is None else out[k], op, mark, aggressive)
            for layout in cut.scattered[k] if out is None else ():
                self.offer(value, layout, op, mark, True)

    def offer(self, value: Value, layout: Layout, sender: Op, mark: str, aggressive: bool) -> None:
        known = self.offers.setdefault(value.name, {})
        if self.heard_of(known.get(layout), aggressive) or layout.is_replicated and value.name in self.parameters:
            return  # a weight that some operator wants whole tells its other users nothing
        offer = known[layout] = _Offer(layout, mark, sender.name, aggressive, self.priority)
        for port in self.ports[value.name]:
            if port.op is not sender and port.op.name not in self.marked:
                self.send(port, offer)

    def heard_of(self, earlier: _Offer | Demand | None, aggressive: bool) -> bool:
        """Whether an offer or demand is no news; it is where marks of higher priority made it but aggressively."""
        return earlier is not None and (aggressive or not earlier.aggressive or earlier.priority == self.priority)

    def send(self, port: _Port, offer: _Offer) -> None:
        self.sent += 1
        heapq.heappush(self.waves, (self.forms[port.op.name].contracts, offer.aggressive, self.sent, port, offer))

    # -- what an operator hears --

    def hear(self, port: _Port, offer: _Offer) -> None:
        """The cuts that an operator would have if this operand led."""
        op, form = port.op, self.forms[port.op.name]
        digits = dict(form.project(port.output, port.index, offer.layout))
        if not digits and not offer.layout.is_replicated:
            return
        leading = {f for dim in form.dims(port.output, port.index) for f in dim}
        for further in self.further(port, offer, leading):
            taken, added = ([d for ds in some.values() for d in ds] for some in (digits, further))
            if added and beside(self.devices, (*taken, *added)):
                digits |= further
                break
        # A parameter that a mark lays out has that layout for all its users: they are asked whatever else they are.
        value = (self.outputs[op.name] if port.output else op.inputs)[port.index]
        settled = value.name in self.parameters and offer.via in self.marked
        self.ask(op, digits, offer, offer.aggressive, settled)
        taken = tuple(d for ds in digits.values() for d in ds)
        spare = complement(self.devices, taken) if beside(self.devices, taken) else ()
        if spare:
            for f, factor in enumerate(form.bound.factors):
                if f not in leading and f not in digits and factor.splittable and factor.size % digits_size(spare) == 0:
                    self.ask(op, {**digits, f: spare}, offer, True)

    def further(self, port: _Port, offer: _Offer, leading: set[int]) -> Iterator[dict[int, Digits]]:
        """What the other operands say, no more aggressively, of the factors that the leading one has not."""
        op, form = port.op, self.forms[port.op.name]
        for output, values in ((False, op.inputs), (True, self.outputs[op.name])):
            for i, value in enumerate(values):
                if (
                    (i, output) != (port.index, port.output)
                    and value.name in self.offers
                    and not leading.issuperset(f for dim in form.dims(output, i) for f in dim)
                ):
                    for other in self.offers[value.name].values():
                        if other.aggressive <= offer.aggressive:
                            said = form.project(output, i, other.layout)
                            yield {f: digits for f, digits in said.items() if f not in leading}

    def ask(self, op: Op, digits: Mapping[int, Digits], offer: _Offer, aggressive: bool, settled: bool = False) -> None:
        """One more demand, if it is legal, new, and there is room."""
        cut, found = self.forms[op.name].cut(digits), self.found.setdefault(op.name, {})
        if cut is None:
            return
        first = () if settled else ranking(found.values())
        if first and first[0].priority < self.priority and not any(within(d.assignment, cut.assignment) for d in first):
            self.outranked.setdefault(op.name, {}).setdefault(
                offer.mark, Demand(cut.assignment, offer.mark, offer.via, aggressive, self.priority, True)
            )
            return
        if self.heard_of(found.get(id(cut)), aggressive):
            return
        heard = self.counts.get((op.name, aggressive), 0)
        if not settled:
            if heard >= MOST:
                return
            self.counts[op.name, aggressive] = heard + 1
        found[id(cut)] = Demand(cut.assignment, offer.mark, offer.via, aggressive, self.priority, settled=settled)
        self.emit(op, cut, offer.mark, aggressive)


def project(bound: Bound, dims: tuple[tuple[int, ...], ...], layout: Layout) -> dict[int, Digits]:
    """The digits of the factors of an operand in a layout: as many of each dim's, major first, as its factors take."""
    out: dict[int, Digits] = {}
    for dim, digits in zip(dims, layout.dims or ()):
        if digits and dim:
            out |= _taken(bound, dim, digits)
    return out


def _taken(bound: Bound, dim: tuple[int, ...], digits: Digits) -> dict[int, Digits]:
    taken: dict[int, Digits] = {}
    kept: list[Digit] = []
    for digit in digits:
        for part in range(digit.size, 1, -1):
            if digit.size % part == 0:
                major = Digit(part, digit.stride * (digit.size // part))
                shares = bound.spread(dim, merge((*kept, major)))
                if shares is not None and all(_takes(bound, f, ds) for f, ds in shares.items()):
                    taken = shares
                    kept.append(major)
                    break
        if len(kept) == 0 or kept[-1].stride != digit.stride:
            break
    return taken


def _takes(bound: Bound, factor: int, digits: Digits) -> bool:
    f = bound.factors[factor]
    return f.splittable and (f.pads or f.size % digits_size(digits) == 0)


def legal(bound: Bound, digits: Mapping[int, Digits], devices: int) -> Assignment | None:
    """The assignment of these digits, less those of the last factors with which it would not be legal; None where
    nothing is left."""
    left = {f: ds for f, ds in digits.items() if ds}
    while left:
        assignment = bound.cut_by(devices, left)
        if beside(devices, assignment.used) and bound.is_consistent(assignment):
            return assignment
        left.popitem()
    return None


def _scattered(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """A layout with its open sum left as slices, along one dim or another; none where no sum is open."""
    if not layout.partial or layout.reduction != "sum" or layout.dims is None:
        return
    for d, size in enumerate(shape):
        dims = [merge((*digits, *layout.partial)) if i == d else digits for i, digits in enumerate(layout.dims)]
        if size % digits_size(dims[d]) == 0:
            yield Layout.of(layout.devices, dims)


#: Where the energies of this plan and of `semi_auto`'s are nearer than so, their programs are priced: in them more is
#: shared than in the energy.
NEAR = 0.9

#: What is preferred among strategies of one cost: what was asked for, more than was asked for, the batch, nothing cut.
_BASIC, _AGGRESSIVE, _ALONG, _WHOLE = range(4)


def sharding_propagation(
    graph: Graph,
    devices: int,
    fed: InputPlacement,
    *,
    costs: Any = None,
    on_missing_rule: str = "error",
    stored: dict[str, Layout] | None = None,
    uneven: bool = False,
    hsdp: OptimizerParallel | None = None,
) -> Decisions:
    """Decide every operator.

    Args:
        costs: a `Costs`: what a step takes; None: on the default cluster of so many devices.
        on_missing_rule: "error", or "replicate" to run an operator without a rule whole.
        stored: layouts of parameters that are settled already.
        uneven: dims that their cuts do not divide are padded, where that can be.
        hsdp: how the other parameters are stored.

    Raises:
        SettingError: no operator is marked.
        StrategyError, LayoutError, MissingRuleError: as in `semi_auto`.
    """
    if not any(map(_marked, graph.ops)):
        raise SettingError(
            "sharding_propagation follows marks, and no operator of the model has one",
            legal="a mark on one operator, such as sw.shard(torch.matmul, ((2, 4), (4, 1))), or a "
            'search: parallel_mode="dynamic_programming"',
        )
    given = dict(on_missing_rule=on_missing_rule, stored=stored, uneven=uneven)
    along, carries = semi_auto(graph, devices, fed, **given)
    asked = demands_of(graph, along, devices)
    heard = {name: tuple(d for d in demands if not d.outranked) for name, demands in asked.items()}
    lowest = max(op.mark.priority for op in graph.ops if _marked(op))
    bound_to = {
        name: first for name, demands in heard.items() if (first := ranking(demands)) and first[0].priority < lowest
    }
    search = Search.of(graph, devices, fed, costs or CostModel(Cluster.of(None, devices), devices), hsdp=hsdp, **given)
    made = search.energy(_options(search.described, along, heard, bound_to))
    try:
        solution = solve(made.problem)
    except PlanError:
        try:  # a priority cannot be kept where other users of a parameter want it otherwise
            made = search.energy(_options(search.described, along, heard, {}))
            solution = solve(made.problem)
        except PlanError:  # marks that contradict one another: the router says which
            return Decisions(along, carries)
    marks = {name: decision for name, decision in along.items() if _settled(decision.op)}
    decisions = _labelled(graph, made.decisions(solution.states, marks, "search"), along, heard)
    decisions = _with_losers(made, solution.states, decisions, asked, bound_to)
    count = sum(map(len, made.options.values()))
    found = SearchResult(solution.cost, None, len(decisions), count, solution.notes)
    if bound_to or solution.cost < NEAR * made.cost({name: strategy_of(decision) for name, decision in along.items()}):
        return Decisions(decisions, carries, found)

    def price(chosen: dict[str, Decision]) -> float:
        try:
            return search.costs.plan(Plan(graph, devices, "semi_auto", fed, chosen, carries, stored, hsdp)).total
        except PlanError:  # a parameter in two layouts
            return math.inf

    ours, theirs = price(decisions), price(along)
    if theirs < ours:
        said = (
            f"no operator follows a mark: that would take {ours * 1e6:.4g} µs a step, along the batch it takes "
            f"{theirs * 1e6:.4g} µs"
        )
        first = next(decision for decision in along.values() if _marked(decision.op))
        along[first.op.name] = replace(first, note="; ".join(filter(None, (first.note, said))))
        return Decisions(along, carries, replace(found, cost=theirs))
    return Decisions(decisions, carries, found)


def _options(
    described: OperatorTable,
    along: Mapping[str, Decision],
    asked: Mapping[str, tuple[Demand, ...]],
    bound_to: Mapping[str, tuple[Demand, ...]],
) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every operator, the preferred first: of those that cost the same the solver takes the first.
    Operators that are alike have the same tuple.

    Whole is one only where nothing else may be, or where the other users of a parameter might want it so.

    Args:
        bound_to: operators that must follow their marks -> the demands of which their cuts must hold one.
    """
    graph, consumers = described.graph, described.graph.consumers()
    several = {op.name for name in graph.parameters for op, _ in consumers.get(name, ()) if len(consumers[name]) > 1}
    settled = {name for name, decision in along.items() if _settled(decision.op)}
    outs = {name: decision.out for name, decision in along.items() if decision.out is not None}
    ranks = {
        name: {decision.assignment: _ALONG} if _follows(decision.assignment, bound_to.get(name)) else {}
        for name, decision in along.items()
    }
    for name, demands in asked.items():
        first = bound_to.get(name)
        ranks[name] |= {
            d.assignment: _WHOLE if not d.assignment.used else _AGGRESSIVE if d.aggressive else _BASIC
            for d in demands
            if d.settled or _follows(d.assignment, first)
        }
    for name in several - settled - bound_to.keys():
        ranks[name].setdefault(along[name].bound.whole(described.devices), _WHOLE)
    same: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
    out = {}
    for name, strategies in options_of(described, (), {}, outs, _plans(along, asked)).items():
        known = ranks[name]
        kept = sorted((s for s in strategies if s.assignment in known), key=lambda s: (known[s.assignment], str(s)))
        out[name] = same.setdefault(tuple(kept), tuple(kept))
    return out


def _follows(assignment: Assignment, demands: tuple[Demand, ...] | None) -> bool:
    """Whether an operator that is cut so is cut as one of these asks; None: nothing has to be."""
    return demands is None or any(within(d.assignment, assignment) for d in demands)


def path_from_mark(decisions: Mapping[str, Decision], name: str) -> tuple[str, ...]:
    """The operators through which a propagated one got its cuts: from the marked one to itself."""
    out = [name]
    while decisions[out[-1]].via:
        out.append(decisions[out[-1]].via)
    return tuple(reversed(out))


def _marked(op: Op) -> bool:
    """Whether a mark says how an operator works, or in what layout its result is."""
    return _settled(op) or op.mark is not None and op.mark.out_strategy is not None


def _settled(op: Op) -> bool:
    """Whether a mark says how an operator works."""
    return op.mark is not None and op.mark.in_strategy is not None


def _plans(along: Mapping[str, Decision], asked: Mapping[str, tuple[Demand, ...]]) -> Iterator[dict[str, Decision]]:
    """The options of all operators, as plans: `semi_auto`'s, then what each operator is asked for first, second, …"""
    yield dict(along)
    for row in zip_longest(*(tuple((name, d.assignment) for d in demands) for name, demands in asked.items())):
        yield {
            name: replace(along[name], assignment=assignment)
            for name, assignment in (entry for entry in row if entry is not None)
        }


# -- who asked --


def _labelled(
    graph: Graph, decisions: dict[str, Decision], along: Mapping[str, Decision], asked: Mapping[str, tuple[Demand, ...]]
) -> dict[str, Decision]:
    """The decisions with the mark that each comes from: of the highest priority, the nearest from which values lie
    alike up to there, those that lie wholly alike before those that do in part.

    Where no such chain is left, because those on the way went with another mark, it is the one that asked; an operator
    that is cut as none asked is as `semi_auto` has it.
    """
    touching: dict[str, list[tuple[Op, int, bool]]] = {}
    for op in graph.ops:
        for value, index, output in _ports(op):
            touching.setdefault(value.name, []).append((op, index, output))
    by_name = {op.name: op for op in graph.ops}
    nearest: dict[str, tuple[str, str]] = {}
    # (priority, links where only some digits are alike, links, place in the program), operator, its mark, who told it
    reached = [
        (op.mark.priority, 0, 0, place, op.name, op.name, "") for place, op in enumerate(graph.ops) if _marked(op)
    ]
    heapq.heapify(reached)
    while reached:
        priority, partly, links, place, name, mark, via = heapq.heappop(reached)
        if name in nearest:
            continue
        nearest[name] = mark, via
        for value, index, output in _ports(by_name[name]):
            mine = _layout(decisions[name], index, output)
            for other, i, made in touching[value.name]:
                if other.name in nearest or _marked(other):
                    continue
                theirs = _layout(decisions[other.name], i, made)
                if _alike(mine, theirs):
                    same = mine.dims == theirs.dims
                    heapq.heappush(reached, (priority, partly + (not same), links + 1, place, other.name, mark, name))
    out = {}
    for name, decision in decisions.items():
        demand = next((d for d in asked.get(name, ()) if d.assignment == decision.assignment), None)
        if _settled(decision.op):
            out[name] = decision
        elif name in nearest:
            out[name] = replace(decision, cause="propagated", origin=nearest[name][0], via=nearest[name][1])
        elif demand is not None:
            out[name] = replace(decision, cause="propagated", origin=demand.mark)
        else:
            cut = any(decision.assignment.digits)
            note = along[name].note if decision.assignment == along[name].assignment else decision.note
            out[name] = replace(decision, cause="batch" if cut else "whole", note=note)
    return out


def _ports(op: Op) -> Iterator[tuple[Value, int, bool]]:
    """What an operator touches: values with the number of the input, or output."""
    yield from ((v, i, False) for i, v in enumerate(op.inputs))
    yield from ((v, k, True) for k, v in enumerate(v for v in op.outputs if v is not None))


def _layout(decision: Decision, index: int, output: bool) -> Layout:
    if not output:
        return decision.wanted(index)
    return decision.out[index] if decision.out is not None else decision.left(index)


def _alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts of a value have digits in common: on a dim, or of a sum that is left as slices of one."""
    assert one.dims is not None and other.dims is not None
    return any(
        overlap(a, b) or overlap(one.partial, b) or overlap(a, other.partial) for a, b in zip(one.dims, other.dims)
    )


# -- who lost --


def _with_losers(
    found: CostGraph,
    states: Sequence[int],
    decisions: dict[str, Decision],
    asked: Mapping[str, tuple[Demand, ...]],
    bound_to: Mapping[str, tuple[Demand, ...]],
) -> dict[str, Decision]:
    """The decisions, with a note where marks that did not get their way asked for something else."""
    prices = _Prices(found, states)
    out = dict(decisions)
    for name, decision in decisions.items():
        if _settled(decision.op):
            continue
        bound, won = decision.bound, decision.assignment
        lost: dict[str, Demand] = {}
        first = ranking(asked.get(name, ()))
        kept = _follows(won, bound_to.get(name))
        for demand in asked.get(name, ()):
            mine = demand.mark == decision.origin or demand.aggressive and not demand.outranked
            if (not mine or not kept and demand in first) and not within(demand.assignment, won):
                lost.setdefault(demand.mark, demand)
        if lost:
            who = f"{decision.origin} asks for" if decision.origin else f"{decision.cause}:"
            said = [f"{name}: {who} {_cuts(bound, won)}, {prices.text(name, won)}: taken"]
            for mark, demand in lost.items():
                why = prices.text(name, demand.assignment)
                if demand.outranked:
                    why = f"after {first[0].mark}: priority {demand.priority} against {first[0].priority}"
                elif not kept and demand in first:
                    why = f"which other users of a parameter do not allow, in spite of its priority {demand.priority}"
                said.append(f"{mark} asks for {_cuts(bound, demand.assignment)}, {why}")
            out[name] = replace(decision, note="; ".join(([decision.note] if decision.note else []) + said))
    return out


def _cuts(bound: Bound, assignment: Assignment) -> str:
    """A strategy in cuts; where another of the same cuts might be meant, the reader finds the digits in the plan."""
    return str(bound.in_strategy(assignment))


class _Prices:
    """What strategies of one operator cost with all the others as they are: its own time and that of the conversions
    around it, values that several read delivered as is best then."""

    def __init__(self, found: CostGraph, states: Sequence[int]) -> None:
        self.found, self.states = found, states
        self.edges: dict[int, list[tuple[int, Any]]] = {}
        for (i, j), table in found.problem.edges.items():
            self.edges.setdefault(i, []).append((j, table))
            self.edges.setdefault(j, []).append((i, table.T))
        self.dependent = {*found.parameters.values(), *found.shared.values()}

    def text(self, name: str, assignment: Assignment) -> str:
        """The least price of the strategies with this assignment."""
        options = self.found.options[name]
        node = self.found.operators[name]
        seconds = min(
            (self.price(node, s) for s, strategy in enumerate(options) if strategy.assignment == assignment),
            default=float("inf"),
        )
        return f"{seconds * 1e6:.4g} µs" if seconds < float("inf") else "which its other users do not allow"

    def price(self, node: int, state: int) -> float:
        total = float(self.found.problem.costs[node][state])
        for other, table in self.edges.get(node, ()):
            if other not in self.dependent:
                total += float(table[state, self.states[other]])
                continue
            free = self.found.problem.costs[other] + table[state]
            for third, between in self.edges[other]:
                if third != node:
                    free = free + between[:, self.states[third]]
            total += float(free.min())
        return total
