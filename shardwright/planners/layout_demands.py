"""The cuts that the operators of a program would have if they followed the marks: layouts flow through factors.

    layout of a value -> factors of every operator that consumes or produces it -> layouts of its other values

The flow runs forwards and backwards until nothing new is found. Three terms:

    leading operand     the operand whose layout arrives: its dims decide the cuts of their factors
    basic               cuts that were asked for; the other operands add factors that the leading one does not have
    aggressive          cuts beyond what was asked for:
                        a partial sum is reduce-scattered to a dim of the output, instead of an all-reduce;
                        digits of replicas, which would repeat the work, cut a factor that the leading operand has not,
                        such as the columns of a product

Where operands contradict one another, each leads once: the operator is asked for several cuts, and cost decides
between them (`sharding_propagation`).

Example: a mark that cuts the rows of x in x @ w 4 ways leads with x: the factor of the rows is cut 4 ways, w is whole,
and so the rows of the output are cut 4 ways, which a pointwise operator after the product follows.

The order of the flow decides which demands count where an operator is asked for more than `MOST` cuts, and which
operands add to a leading one:

1. Marks come first, and are left unchanged. Where nothing is marked, the inputs lead: their layouts are those in which
   the batch is fed.
2. Marks of the highest priority, the lowest number, are followed to the end before the next priority. A later demand
   on an operator that basic propagation has reached must keep the cuts asked of it before; otherwise the demand is
   outranked, and goes no further.
3. Operators that pass layouts through (pointwise operators, views) come before products and reductions. Such
   operators contract nothing, so following sends nothing; products and reductions then know both operands when they
   are reached.
4. Basic demands on an operator come before aggressive ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..graph import Graph, Op, Value
from ..identity_tables import IdentityMap
from ..layout import Digit, Digits, Layout, beside, complement, digits_size, merge
from ..partition.local_program import Decision
from ..rules import Assignment, Bound

__all__ = ["Demand", "demands_of", "ranking", "within"]


#: Most demands on one operator found by basic propagation, and as many by aggressive propagation. Demands through a
#: parameter that the operator shares with a marked one are not counted.
MOST = 6


@dataclass(frozen=True)
class Demand:
    """The cuts that an operator would have if it followed a mark.

    Args:
        assignment: the digits of each factor.
        mark: the name of the marked operator.
        via: the operator that passed the layout on.
        aggressive: True where the cuts go beyond what was asked for.
        priority: the priority of the mark.
        outranked: True where a mark of higher priority asks for something else.
        settled: True where a marked operator fixes the layout of a parameter of this operator, which no priority
            changes.
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
    """An operator's input or output with a number."""

    op: Op
    index: int
    output: bool


@dataclass(frozen=True)
class _Offer:
    """A layout that an operator has for a value, or would have under a demand."""

    layout: Layout
    mark: str
    via: str
    aggressive: bool
    priority: int = 0


def demands_of(
    graph: Graph, decisions: Mapping[str, Decision], devices: int, input_placement: Sequence[Layout] = ()
) -> dict[str, tuple[Demand, ...]]:
    """The demands of the marks on every unmarked operator, without duplicates, in the order of the flow.

    Args:
        graph: the captured program.
        decisions: by operator, its rule bound to its shapes; for a marked operator, the decision of the mark.
        devices: the number of devices.
        input_placement: the layouts of the inputs, which are followed where no operator is marked. The mark of such a
            demand is ``input x``.

    Returns:
        By operator, its demands; the outranked ones are last.
    """
    return _Propagation(graph, decisions, devices).run(input_placement)


def ranking(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """The basic demands of the highest priority that cut anything; later demands may cut further, but not otherwise."""
    cutting = [d for d in demands if d.assignment.used and not d.aggressive and not d.outranked]
    first = min((d.priority for d in cutting), default=0)
    return tuple(d for d in cutting if d.priority == first)


def within(some: Assignment, all_: Assignment) -> bool:
    """True where `all_` cuts every factor at least as `some` does, by the same digits."""
    return all(not mine or _begins(theirs, mine) for mine, theirs in zip(some.digits, all_.digits))


def _begins(digits: Digits, start: Digits) -> bool:
    """True where `digits`, most major first, begin with `start`."""
    if digits[: len(start)] == start:
        return True
    head, k = start[:-1], len(start) - 1
    if digits[:k] != head or len(digits) <= k:
        return False
    mine, theirs = start[-1], digits[k]  # a longer digit begins with a shorter one where their major ends agree
    return theirs.span == mine.span and digits_size((theirs,)) % mine.size == 0


def passes_through(bound: Bound) -> bool:
    """True where an operator contracts nothing: every input factor that may be cut is a factor of every output."""
    output_factors = [{f for dim in dims for f in dim} for dims in bound.outputs]
    return all(
        f in names
        for names in output_factors
        for dims in bound.inputs
        for dim in dims
        for f in dim
        if bound.factors[f].splittable and bound.factors[f].size > 1
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """One way to cut operators of one form, and the layouts of their values under it.

    Args:
        inputs, outputs: the layouts, sums completed.
        scattered: by output, the layouts with its partial sum reduce-scattered.
    """

    assignment: Assignment
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    scattered: tuple[tuple[Layout, ...], ...]


class _Form:
    """Operators with the same factors and dims: each question is answered once for all of them."""

    def __init__(self, bound: Bound, devices: int) -> None:
        self.bound, self.devices = bound, devices
        self.contracts = not passes_through(bound)
        self.projected: dict[tuple[bool, int, Layout], dict[int, Digits]] = {}
        self.cuts: dict[tuple[Hashable, ...], _Cut | None] = {}
        self.known: dict[Assignment, _Cut] = {}

    def dims(self, output: bool, index: int) -> tuple[tuple[int, ...], ...]:
        return (self.bound.outputs if output else self.bound.inputs)[index]

    def project(self, output: bool, index: int, layout: Layout) -> dict[int, Digits]:
        key = (output, index, layout)
        if key not in self.projected:
            self.projected[key] = project(self.bound, self.dims(output, index), layout)
        return self.projected[key]

    def cut(self, digits: Mapping[int, Digits]) -> _Cut | None:
        """The legal cut by these digits; None where there is none."""
        key = tuple(digits.items())
        if key not in self.cuts:
            assignment = legal(self.bound, digits, self.devices) if digits else self.bound.whole(self.devices)
            self.cuts[key] = None if assignment is None else self.of(assignment)
        return self.cuts[key]

    def of(self, assignment: Assignment) -> _Cut:
        if assignment not in self.known:
            bound = self.bound
            input_layouts = [_fixed(bound.input_layout(i, assignment)) for i in range(len(bound.inputs))]
            output_layouts = [_fixed(bound.output_layout(k, assignment)) for k in range(len(bound.outputs))]
            self.known[assignment] = _Cut(
                assignment,
                tuple(input_layouts),
                tuple(layout.without_partial() for layout in output_layouts),
                tuple(map(tuple, map(_scattered, output_layouts, bound.out_shapes))),
            )
        return self.known[assignment]


class _Propagation:
    def __init__(self, graph: Graph, decisions: Mapping[str, Decision], devices: int) -> None:
        self.graph, self.devices, self.decisions = graph, devices, decisions
        forms: dict[tuple[Hashable, ...], _Form] = {}
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
        self.found: dict[str, IdentityMap[_Cut, Demand]] = {}
        self.outranked: dict[str, dict[str, Demand]] = {}  # by operator, then by mark
        self.priority = 0  # priority of the marks that are followed now
        self.counts: dict[tuple[str, bool], int] = {}
        # offers on their way: (True where the operator contracts, aggressive, number in the order of sending, port,
        # offer)
        self.waves: list[tuple[bool, bool, int, _Port, _Offer]] = []
        self.sent = 0

    def run(self, input_placement: Sequence[Layout]) -> dict[str, tuple[Demand, ...]]:
        if all(op.mark is None for op in self.graph.ops):
            for value, layout in zip(self.graph.inputs, input_placement):
                for port in self.ports.get(value.name, ()) if not layout.is_replicated else ():
                    self.send(port, _Offer(layout, f"input {value.name}", "", False))
            self.follow()
        for priority in sorted({op.mark.priority for op in self.graph.ops if op.mark is not None}):
            self.priority = priority
            for op in self.graph.ops:
                if op.mark is not None and op.mark.priority == self.priority:
                    self.begin(op)
            self.follow()
        return {name: (*found.values(), *self.outranked.get(name, {}).values()) for name, found in self.found.items()}

    def follow(self) -> None:
        """Let the offers that are on their way reach their operators, and all that follows from them."""
        while self.waves:
            *_, port, offer = heapq.heappop(self.waves)
            self.hear(port, offer)

    def begin(self, op: Op) -> None:
        """Send the layouts that a mark asks for."""
        decision = self.decisions[op.name]
        if op.name in self.marked:
            self.emit(op, self.forms[op.name].of(decision.assignment), op.name, False)
        elif decision.out is not None:  # the layout of the result is marked, the strategy is not
            for k, layout in enumerate(decision.out):
                self.send(_Port(op, k, True), _Offer(layout, op.name, op.name, False, self.priority))

    # -- layouts that an operator sends --

    def emit(self, op: Op, cut: _Cut, mark: str, aggressive: bool) -> None:
        """Send the layouts of all values of an operator under a cut."""
        for value, layout in zip(op.inputs, cut.inputs):
            self.offer(value, layout, op, mark, aggressive)
        out = self.decisions[op.name].out
        for k, value in enumerate(self.outputs[op.name]):
            self.offer(value, cut.outputs[k] if out is None else out[k], op, mark, aggressive)
            for layout in cut.scattered[k] if out is None else ():
                self.offer(value, layout, op, mark, True)

    def offer(self, value: Value, layout: Layout, sender: Op, mark: str, aggressive: bool) -> None:
        known = self.offers.setdefault(value.name, {})
        if self.heard_of(known.get(layout), aggressive) or (layout.is_replicated and value.name in self.parameters):
            return  # a weight that some operator wants whole says nothing about its other users
        offer = known[layout] = _Offer(layout, mark, sender.name, aggressive, self.priority)
        for port in self.ports[value.name]:
            if port.op is not sender and port.op.name not in self.marked:
                self.send(port, offer)

    def heard_of(self, earlier: _Offer | Demand | None, aggressive: bool) -> bool:
        """True where an offer or demand adds nothing. It adds something where the earlier one is aggressive, of a
        mark of higher priority, and the new one is basic."""
        return earlier is not None and (aggressive or not earlier.aggressive or earlier.priority == self.priority)

    def send(self, port: _Port, offer: _Offer) -> None:
        self.sent += 1
        heapq.heappush(self.waves, (self.forms[port.op.name].contracts, offer.aggressive, self.sent, port, offer))

    # -- layouts that an operator receives --

    def hear(self, port: _Port, offer: _Offer) -> None:
        """Ask the operator for the cuts with this operand leading."""
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
        # All users of a parameter share its layout. A mark's demand through a parameter is therefore always kept.
        value = (self.outputs[op.name] if port.output else op.inputs)[port.index]
        settled = value.name in self.parameters and offer.via in self.marked
        self.ask(op, digits, offer, offer.aggressive, settled)
        every = tuple(d for ds in digits.values() for d in ds)
        spare = complement(self.devices, every) if beside(self.devices, every) else ()
        if spare:
            for f, factor in enumerate(form.bound.factors):
                if f not in leading and f not in digits and factor.splittable and factor.size % digits_size(spare) == 0:
                    self.ask(op, {**digits, f: spare}, offer, True)

    def further(self, port: _Port, offer: _Offer, leading: set[int]) -> Iterator[dict[int, Digits]]:
        """The digits that the other operands have for factors that the leading operand lacks, from offers no more
        aggressive than its own."""
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
                            projected = form.project(output, i, other.layout)
                            yield {f: digits for f, digits in projected.items() if f not in leading}

    def ask(self, op: Op, digits: Mapping[int, Digits], offer: _Offer, aggressive: bool, settled: bool = False) -> None:
        """Add a demand, if it is legal and new, and fewer than `MOST` are there."""
        cut, found = self.forms[op.name].cut(digits), self.found.setdefault(op.name, IdentityMap())
        if cut is None:
            return
        first = () if settled else ranking(found.values())
        if first and first[0].priority < self.priority and not any(within(d.assignment, cut.assignment) for d in first):
            self.outranked.setdefault(op.name, {}).setdefault(
                offer.mark, Demand(cut.assignment, offer.mark, offer.via, aggressive, self.priority, True)
            )
            return
        if self.heard_of(found.get(cut), aggressive):
            return
        heard = self.counts.get((op.name, aggressive), 0)
        if not settled:
            if heard >= MOST:
                return
            self.counts[op.name, aggressive] = heard + 1
        found[cut] = Demand(cut.assignment, offer.mark, offer.via, aggressive, self.priority, settled=settled)
        self.emit(op, cut, offer.mark, aggressive)


def project(bound: Bound, dims: tuple[tuple[int, ...], ...], layout: Layout) -> dict[int, Digits]:
    """The digits of an operand's factors under a layout: of each dim's digits, major first, as many as its factors
    take."""
    out: dict[int, Digits] = {}
    for dim, digits in zip(dims, layout.dims or ()):
        if digits and dim:
            out |= _taken(bound, dim, digits)
    return out


def _taken(bound: Bound, dim: tuple[int, ...], digits: Digits) -> dict[int, Digits]:
    taken: dict[int, Digits] = {}
    majors: list[Digit] = []
    for digit in digits:
        for part in range(digit.size, 1, -1):
            if digit.size % part == 0:
                major = Digit(part, digit.stride * (digit.size // part))
                shares = bound.spread(dim, merge((*majors, major)))
                if shares is not None and all(_takes(bound, f, ds) for f, ds in shares.items()):
                    taken = shares
                    majors.append(major)
                    break
        if len(majors) == 0 or majors[-1].stride != digit.stride:
            break
    return taken


def _takes(bound: Bound, factor: int, digits: Digits) -> bool:
    f = bound.factors[factor]
    return f.splittable and (f.pads or f.size % digits_size(digits) == 0)


def legal(bound: Bound, digits: Mapping[int, Digits], devices: int) -> Assignment | None:
    """The assignment of these digits, without those of the last factors that make it illegal; None where nothing is
    left."""
    remaining = {f: ds for f, ds in digits.items() if ds}
    while remaining:
        assignment = bound.cut_by(devices, remaining)
        if beside(devices, assignment.used) and bound.is_consistent(assignment):
            return assignment
        remaining.popitem()
    return None


def _fixed(layout: Layout | None) -> Layout:
    """A layout of an assignment, which fixes it."""
    assert layout is not None
    return layout


def _scattered(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """The layouts with the partial sum reduce-scattered to one dim or another; none where no sum is partial."""
    if not layout.partial or layout.reduction != "sum" or layout.dims is None:
        return
    for d, size in enumerate(shape):
        dims = [merge((*digits, *layout.partial)) if i == d else digits for i, digits in enumerate(layout.dims)]
        if size % digits_size(dims[d]) == 0:
            yield Layout.of(layout.devices, dims)
