"""A plan reused at other sizes of the model's inputs: the same operators with the same strategies.

A new size needs no search of its own where each cut of the earlier plan divides it as it divided the old one:

    gcd(old size, devices) = gcd(new size, devices)      for every dim of every value that is not empty

On 4 devices, after a plan for a batch of 8 rows:

    16 rows     gcd(8, 4) = gcd(16, 4) = 4: the plan is reused
    6 rows      gcd(6, 4) = 2: a new search, because 4 does not divide 6

A batch of 8 after one of 6 is searched anew too: the batch can be cut further than before. So is an empty batch, which
has no parts, and a model in which other parameters are tied than before. A bound that a search has
proved holds for its own sizes alone; the reused plan has none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import Form, Graph, Op, form_of
from ..partition.local_program import Decisions, PortableDecisions
from ..rules import Bound
from ..sharded_plan import Plan

__all__ = ["at_other_sizes"]


def at_other_sizes(
    plan: Plan, graph: Graph, devices: int, *, on_missing_rule: str = "error", uneven: bool = False
) -> Decisions | None:
    """The strategies of a plan on the graph of the same model at other sizes.

    Args:
        plan: the earlier plan.
        graph: the captured program at the other sizes.
        devices: the number of devices.
        on_missing_rule, uneven: the settings that the planner was given.

    Returns:
        The decisions; None where the plan does not fit.
    """
    if plan.devices != devices or len(plan.graph.ops) != len(graph.ops):
        return None
    alike: dict[tuple[Form, Form], bool] = {}  # equal layers have operators of one form
    for mine, theirs in zip(plan.graph.ops, graph.ops):
        if (mine.name, mine.target, mine.mark) != (theirs.name, theirs.target, theirs.mark):
            return None
        if _parameters(plan.graph, mine) != _parameters(graph, theirs):
            return None
        forms = form_of(mine), form_of(theirs)
        if forms not in alike:
            alike[forms] = _alike(mine, theirs, devices)
        if not alike[forms]:
            return None
    found = plan.found
    if found is not None:
        sizes = ", ".join(str(list(v.shape)) for v in plan.graph.inputs)
        note = f"strategies are those of the plan for inputs of {sizes}: nothing was searched"
        found = replace(found, bound=None, notes=(*found.notes, note) if note not in found.notes else found.notes)
    earlier = Decisions(plan.decisions, plan.batch_dims, found, plan.hsdp)
    made = PortableDecisions.of(earlier).onto(graph, devices, on_missing_rule=on_missing_rule, uneven=uneven)
    bound = {  # equal layers share their bound rules
        (id(mine), id(d.bound), id(d.assignment)): (mine, d)
        for name, d in made.decisions.items()
        for mine in (plan.decisions[name].bound,)
    }
    if not all(_of_one_form(mine, d.bound) and d.bound.is_consistent(d.assignment) for mine, d in bound.values()):
        return None
    return made


def _parameters(graph: Graph, op: Op) -> list[str]:
    """The names of the parameters that an operator reads."""
    return [v.name for v in op.inputs if v.name in graph.parameters]


def _of_one_form(mine: Bound, theirs: Bound) -> bool:
    """True where two bindings of an operator differ in the sizes of factors alone. A view of a dim of one row, for
    instance, has fewer factors."""
    return (len(mine.factors), mine.inputs, mine.outputs) == (len(theirs.factors), theirs.inputs, theirs.outputs)


def _alike(mine: Op, theirs: Op, devices: int) -> bool:
    """True where two captures of an operator differ in sizes alone, and in no size that matters to its cuts."""
    for a, b in zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs)):
        if (a is None) != (b is None):
            return False
        if a is None or b is None or a.shape == b.shape:
            continue
        if len(a.shape) != len(b.shape) or any(
            x != y and (0 in (x, y) or math.gcd(x, devices) != math.gcd(y, devices)) for x, y in zip(a.shape, b.shape)
        ):
            return False
    return len(mine.inputs) == len(theirs.inputs) and len(mine.outputs) == len(theirs.outputs)
