"""Which strategies a search considers for an operator.

    a strategy = each atom of the rank to one splittable factor of the operator, or to none (repeated there)

Atoms are digits that together are the whole rank: its prime digits where there are few, else larger ones that keep to
the cluster's levels. An operator through which open sums pass may also let one through. Everything that the rules allow
under these atoms is there; nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ..errors import ShardwrightError
from ..graph import Graph, Op
from ..layout import Digit, Digits, Layout, beside
from ..rules import Assignment, Bound, Rule, expand
from .decision import Decision, description
from .footprint import kind_of_call

__all__ = ["Described", "Strategy", "assignments", "atoms_of", "options_among", "options_of",
           "prime_factors", "strategy_of"]

#: How many atoms a search assigns at most: the strategies of an operator are (factors + 1) to this power.
MOST_ATOMS = 3


def prime_factors(number: int) -> tuple[int, ...]:
    """The prime factors, smallest first."""
    out, p = [], 2
    while p * p <= number:
        while number % p == 0:
            out.append(p)
            number //= p
        p += 1
    return (*out, number) if number > 1 else tuple(out)


def atoms_of(devices: int, sizes: Sequence[int] = (), most: int = MOST_ATOMS) -> Digits:
    """Digits that together are the rank, most major first.

    Args:
        devices: how many.
        sizes: of the cluster's levels, from the inside out; empty: one level.
        most: how many atoms at most. Primes of one level are joined, of the level that then has most atoms, the
            innermost last: what is near is cut finer.
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


def assignments(bound: Bound, devices: int, atoms: Digits) -> Iterator[Assignment]:
    """Every legal way to give atoms to factors; that which gives none is the first."""
    factors = [i for i, f in enumerate(bound.factors) if f.splittable and f.size > 1]
    for chosen in product((None, *factors), repeat=len(atoms)):
        digits: dict[int, Digits] = {}
        for factor, atom in zip(chosen, atoms):
            if factor is not None:
                digits[factor] = (*digits.get(factor, ()), atom)
        assignment = bound.cut_by(devices, digits)
        if bound.divides(assignment) and bound.is_consistent(assignment):
            yield assignment


class Strategy(NamedTuple):
    """What may be decided of one operator: a `Decision` without the operator."""

    assignment: Assignment
    open: Digits = ()
    out: tuple[Layout, ...] | None = None


@dataclass(frozen=True)
class Described:
    """The operators of a graph with what is known of them.

    Args:
        rules: by operator, its rule, binding and note.
        kinds: by operator, what it has in common with those that cost alike.
    """

    graph: Graph
    devices: int
    rules: dict[str, tuple[Rule, Bound, str | None]]
    kinds: dict[str, Hashable]

    @classmethod
    def of(cls, graph: Graph, devices: int, on_missing_rule: str = "error", uneven: bool = False) -> Described:
        """Look every operator up.

        Raises:
            MissingRuleError: as `decision.description`.
        """
        return cls(graph, devices, {op.name: description(op, on_missing_rule, devices, uneven) for op in graph.ops},
                   {op.name: kind_of_call(op) for op in graph.ops})

    def decided(self, op: Op, strategy: Strategy, cause: str) -> Decision:
        """The strategy of an operator as a decision."""
        rule, bound, note = self.rules[op.name]
        return Decision(op, rule, bound, strategy.assignment, strategy.out, cause, note, strategy.open)


def strategy_of(decision: Decision) -> Strategy:
    """A decision as a strategy that others may have; what it lets through unsaid is nothing."""
    return Strategy(decision.assignment, decision.open or (), decision.out)


def options_of(described: Described, atoms: Digits, fixed: Mapping[str, Decision] = {},
               outs: Mapping[str, tuple[Layout, ...]] = {}, known: Iterable[Mapping[str, Decision]] = ()
               ) -> dict[str, tuple[Strategy, ...]]:
    """The strategies of every operator under these atoms. Operators that are alike have the same tuple.

    Args:
        fixed: operators that a mark decides.
        outs: the layouts to which marks bring the outputs of operators.
        known: plans whose strategies are to be among the options, so that no search does worse than they.
    """
    cuts: dict[tuple, tuple[Assignment, ...]] = {}

    def all_of(op: Op, bound: Bound) -> tuple[Assignment, ...]:
        form = (bound.factors, bound.inputs, bound.outputs)
        if form not in cuts:
            cuts[form] = tuple(assignments(bound, described.devices, atoms))
        return cuts[form]
    return options_among(described, all_of, fixed, outs, known)


def options_among(described: Described, among: Callable[[Op, Bound], tuple[Assignment, ...]],
                  fixed: Mapping[str, Decision] = {}, outs: Mapping[str, tuple[Layout, ...]] = {},
                  known: Iterable[Mapping[str, Decision]] = ()) -> dict[str, tuple[Strategy, ...]]:
    """As `options_of`, of the assignments that a function gives to an operator: those of operators that are to have
    the same strategies are one object."""
    known = tuple(known)
    opened: dict[str, frozenset[Digits]] = {}    # value -> the digits of sums in which it may be left open
    alike: dict[tuple, tuple[tuple[Strategy, ...], tuple[frozenset[Digits], ...]]] = {}
    kept: list[tuple[Assignment, ...]] = []      # so that no two of them have one id
    out: dict[str, tuple[Strategy, ...]] = {}
    for op in described.graph.ops:
        rule, bound, _ = described.rules[op.name]
        passing = frozenset() if op.name in fixed else _passing(op, rule, opened)
        given = (strategy_of(fixed[op.name]),) if op.name in fixed else \
            tuple(dict.fromkeys(strategy_of(plan[op.name]) for plan in known if op.name in plan))
        brought = outs.get(op.name)
        mine_of = () if op.name in fixed else among(op, bound)
        kept.append(mine_of)
        key = (described.kinds[op.name], passing, given, op.name in fixed, brought, id(mine_of))
        if key not in alike:
            mine = tuple(dict.fromkeys((*(Strategy(a, (), brought) for a in mine_of), *given)))
            if op.name not in fixed:
                mine = _with_passing(described, op, mine, passing)
            left = tuple(frozenset(_left(bound, s, k) for s in mine) - {()} for k in range(len(bound.outputs)))
            alike[key] = mine, left
        out[op.name], left = alike[key]
        opened.update((v.name, digits) for v, digits in zip((v for v in op.outputs if v is not None), left))
    return out


def _passing(op: Op, rule: Rule, opened: dict[str, frozenset[Digits]]) -> frozenset[Digits]:
    """The digits of the sums that may pass through: those that all its inputs may have open."""
    if not rule.is_linear(op) or not op.inputs:
        return frozenset()
    return frozenset.intersection(*(opened.get(v.name, frozenset()) for v in op.inputs))


def _with_passing(described: Described, op: Op, strategies: tuple[Strategy, ...], passing: frozenset[Digits]
                  ) -> tuple[Strategy, ...]:
    """The strategies, and those of them that let one of these sums through: which an operator can that runs as itself."""
    if not passing:
        return strategies
    rule, bound, _ = described.rules[op.name]
    plain = [s for s in strategies if not s.open and s.out is None and _is_plain(op, rule, bound, s.assignment)]
    more = [s._replace(open=digits) for digits in sorted(passing, key=str) for s in plain
            if beside(described.devices, digits + s.assignment.used)]
    return tuple(dict.fromkeys((*strategies, *more)))


def _is_plain(op: Op, rule: Rule, bound: Bound, assignment: Assignment) -> bool:
    """Whether the operator runs as itself, not as others into which it is worked out."""
    try:
        steps, _ = expand(op, rule, bound, assignment)
    except ShardwrightError:
        return False
    return len(steps) == 1 and steps[0][0] is op


def _left(bound: Bound, strategy: Strategy, index: int) -> Digits:
    """The digits of the sum in which an output is left open."""
    if strategy.out is not None:
        return ()
    layout = bound.output_layout(index, strategy.assignment)
    assert layout is not None
    if layout.reduction != "sum":
        return ()
    return layout.with_partial(strategy.open + layout.partial).partial
