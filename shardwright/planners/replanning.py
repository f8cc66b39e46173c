"""A plan reused at other sizes of the model's inputs: the same operators, with the same strategies.

A batch of 16 rows after one of 8, or 512 tokens after 2,048, need no search of their own where each cut of the
earlier plan divides the new sizes just as it did the old ones:

    gcd(old size, devices) = gcd(new size, devices)      for every dim of every value

A batch of 6 rows after one of 8 on 4 devices is planned anew: 4 no longer divides it. So is a batch of 8 after one of
6, which could be cut further than it was. A bound that a search has proved holds for its own sizes alone, and is
dropped.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import Graph, Op
from ..partition.local_program import Decisions, PortableDecisions
from ..rules import Bound
from ..sharded_plan import Plan

__all__ = ["at_other_sizes"]


def at_other_sizes(
    plan: Plan, graph: Graph, devices: int, *, on_missing_rule: str = "error", uneven: bool = False
) -> Decisions | None:
    """The strategies of a plan on the graph of the same model at other sizes; None where they do not fit.

    Args:
        graph: of the other sizes.
        on_missing_rule, uneven: as the planner was given them.
    """
    if (
        plan.devices != devices
        or len(plan.graph.ops) != len(graph.ops)
        or not all(_alike(mine, theirs, devices) for mine, theirs in zip(plan.graph.ops, graph.ops))
    ):
        return None
    found = plan.found
    if found is not None:
        sizes = ", ".join(str(list(v.shape)) for v in plan.graph.inputs)
        note = f"strategies are those of the plan for inputs of {sizes}: nothing was searched"
        found = replace(found, bound=None, notes=(*found.notes, note) if note not in found.notes else found.notes)
    earlier = Decisions(plan.decisions, plan.carries, found, plan.hsdp)
    made = PortableDecisions.of(earlier).onto(graph, devices, on_missing_rule=on_missing_rule, uneven=uneven)
    if not all(
        _of_one_form(plan.decisions[name].bound, d.bound) and d.bound.is_consistent(d.assignment)
        for name, d in made.decisions.items()
    ):
        return None
    return made


def _of_one_form(mine: Bound, theirs: Bound) -> bool:
    """True where two descriptions of an operator differ in the sizes of factors alone: a dim of one row, say, is none
    in a view."""
    return (len(mine.factors), mine.inputs, mine.outputs) == (len(theirs.factors), theirs.inputs, theirs.outputs)


def _alike(mine: Op, theirs: Op, devices: int) -> bool:
    """Whether two captures of an operator differ in sizes alone, and in none that matters to its cuts."""
    if (mine.name, mine.target, mine.mark) != (theirs.name, theirs.target, theirs.mark):
        return False
    for a, b in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs)):
        if (a is None) != (b is None):
            return False
        if a is None or a.shape == b.shape:
            continue
        if len(a.shape) != len(b.shape) or any(
            x != y and math.gcd(x, devices) != math.gcd(y, devices) for x, y in zip(a.shape, b.shape)
        ):
            return False
    return len(mine.inputs) == len(theirs.inputs) and len(mine.outputs) == len(theirs.outputs)
