"""The reasons for a plan, as text in a terminal: its most expensive operators, or one operator with its alternatives.

1. `costs` prints totals, bound and gap, the most expensive communications, and the `DEAREST` most expensive operators.
2. `explanation` prints one operator: its strategy and the cause of it, its share of the step, its best alternatives,
   and the memory limit or the neighbours that hold its strategy.

`tables` prints all operators of a plan without reasons; the figures come from `shardwright.explain`.
"""

from __future__ import annotations

import math
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..explain import Alternative, Explanation, Holder, Row, row_above
from ..pipeline.pipeline_plan import PipelinePlan
from ..sharded_plan import Plan
from .format import size_text, time_text
from .plan_diff import strategy_text
from .tables import summary

__all__ = ["costs", "explanation"]

#: The number of operators that are shown.
DEAREST = 10

#: The largest relative difference between the search's price of a plan and its cost that is not mentioned.
UNEQUAL = 1e-6


def costs(plan: Plan | PipelinePlan, file: IO[str] | None = None) -> None:
    """Print the cost of a plan: totals, bound and gap, the most expensive communications and operators.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
    """
    summary(plan, file)
    plans = {stage.number: stage.plan for stage in plan.stages} if isinstance(plan, PipelinePlan) else {0: plan}
    staged = isinstance(plan, PipelinePlan)
    whole = sum(each.cost for each in plans.values())
    part = lambda seconds: f"{seconds / whole:.1%}" if whole else ""
    spent = sorted(
        ((seconds, stage, name) for stage, each in plans.items() for name, seconds in each.price.by_operator.items()),
        key=lambda entry: (-entry[0], entry[1:]),
    )
    table = _table(
        "operator",
        *(("stage",) if staged else ()),
        "op",
        "strategy",
        "decided by",
        "seconds",
        "part",
        "called at",
        right=("stage", "seconds", "part"),
    )
    for seconds, stage, name in spent[:DEAREST]:
        decision, at = plans[stage].decisions.get(name), (str(stage),) if staged else ()
        if decision is None:  # redistributions of outputs and buffers, which are no operator
            table.add_row(name, *at, "", "", "", time_text(seconds), part(seconds), "")
        else:
            table.add_row(
                *map(
                    Text,
                    (
                        name,
                        *at,
                        decision.op.kind,
                        strategy_text(decision),
                        decision.cause,
                        time_text(seconds),
                        part(seconds),
                        decision.op.source,
                    ),
                )
            )
    if spent[DEAREST:]:
        seconds = sum(each for each, *_ in spent[DEAREST:])
        table.add_row(
            f"{len(spent) - DEAREST} others",
            *(("",) if staged else ()),
            "",
            "",
            "",
            time_text(seconds),
            part(seconds),
            "",
        )
    console = _console(file)
    for number, each in plans.items():
        limit = None if each.found is None else each.found.limit
        if limit is not None:
            over = row_above(each.timeline, limit)
            which = f"stage {number}" if staged else "it"
            console.print(
                Text(
                    f"{which} was searched within {size_text(limit)} a device"
                    + ("" if over is None else f", which it does not keep: {_row(over)}")
                )
            )
    console.print(table)
    if staged:
        console.print(Text("seconds are those of one micro-batch"))


def explanation(said: Explanation, file: IO[str] | None = None) -> None:
    """Print the cost of an operator, its best alternatives and the reasons that hold its strategy.

    Args:
        said: the explanation, of `shardwright.explain.explained`.
        file: the file to print to; None: standard output.
    """
    console, decision, cost = _console(file), said.decision, said.plan.cost
    say = lambda text: console.print(Text(text))
    op = decision.op
    say(
        f"{op.name} ({op.kind}){f', {op.module}' if op.module else ''}{f', {op.source}' if op.source else ''}: "
        f"{strategy_text(decision)}"
    )
    say(_decided(said))
    say(
        f"it costs {time_text(said.seconds)} of {time_text(cost)} "
        + ("a step" if said.stage is None else f"that stage {said.stage} takes with one micro-batch")
    )
    table = _table("what", "value", "other end", "forward", "backward", "sends", right=("forward", "backward"))
    for share in said.shares:
        table.add_row(
            *map(
                Text,
                (
                    share.what,
                    share.value,
                    share.other,
                    time_text(share.forward),
                    time_text(share.backward),
                    ", ".join(share.sends),
                ),
            )
        )
    console.print(table)
    if said.over is not None:
        say(f"this plan itself does not fit: {_row(said.over)}")
    if said.missing is not None:
        say(f"no alternatives: {said.missing}")
        return
    if abs(said.cost - cost) > UNEQUAL * cost:
        say(f"the search prices this plan at {time_text(said.cost)}: what is sent once for several is paid by each")
    if math.isinf(said.least):
        say("no plan in which it keeps this strategy fits")
    elif said.least < said.cost * (1 - UNEQUAL):
        say(f"the best plan in which it keeps this strategy takes {time_text(said.least)}")
    if not said.alternatives:
        say("there is no other way to cut it")
        return
    total = "in all" if said.exact else "at least in all"
    table = _table("alternative", total, "more", "alone", "held by", right=(total, "more", "alone"))
    for other in said.alternatives:
        table.add_row(
            *map(
                Text,
                (strategy_text(other.decision), _total(other), _more(other, said.cost), _alone(other), _held(other)),
            )
        )
    console.print(table)
    for other in said.alternatives:
        if other.refused:
            say(f"{strategy_text(other.decision)} does not fit: {other.refused}")
    whole = "step" if said.stage is None else "stage with one micro-batch"
    anew = "chosen anew"
    if said.limit is not None:
        anew += f" within {size_text(said.limit)} a device, with what is recomputed and how parameters are stored"
    say(
        f"in all: the whole {whole}, when everything else is {anew}; alone: when nothing else changes. "
        f"Among {said.strategies} strategies, one line for each way to cut."
    )
    tried, others = said.tried
    if tried < others:
        say(f"Of {others} other ways to cut, the {tried} that cost least without the limit were searched within it.")
    if not all(other.proved for other in said.alternatives):
        say("from ... to: no plan within the limit takes less than the one, and one was found that takes the other.")


def _total(other: Alternative) -> str:
    """The time of a whole step with an alternative."""
    if math.isinf(other.total):
        return "does not fit"
    if other.proved or other.bound is None:
        return time_text(other.total)
    return f"from {time_text(other.bound)} to {time_text(other.total)}"


def _more(other: Alternative, cost: float) -> str:
    return f"{other.more / cost:+.2%}" if cost and not math.isinf(other.more) else ""


def _decided(said: Explanation) -> str:
    """The cause of an operator's strategy, and the reasons that hold it."""
    decision, op = said.decision, said.decision.op
    if decision.cause == "mark":
        where = f" at {op.mark.source}" if op.mark is not None and op.mark.source else ""
        return f"marked{where}: the mark holds it there, whatever it costs"
    words = {
        "search": "the search decided",
        "batch": "along the batch",
        "follow": "it follows its input",
        "whole": "whole on every device",
        "propagated": f"it follows {'' if decision.origin.startswith('input ') else 'the mark on '}{decision.origin}",
    }
    text = words.get(decision.cause, decision.cause)
    by = [] if said.held is None else [_memory(said.held)]
    by += [] if said.holder is None else [_holder(said.holder)]
    return f"{text}; held there by {', and by '.join(by)}" if by else text


def _memory(held: Alternative) -> str:
    """The strategy that an operator would have without the memory limit."""
    assert held.over is not None and held.aside is not None
    return (
        f"memory: without the limit {strategy_text(held.decision)} would do, in all {time_text(held.aside)}, but "
        f"then {_row(held.over)}"
    )


def _held(other: Alternative) -> str:
    """The reasons that keep an operator from another strategy."""
    words = []
    if other.over is not None and other.aside is not None:
        words.append(f"memory: in all {time_text(other.aside)} without the limit, but {_row(other.over)}")
    elif other.row is not None:
        words.append(f"memory, alone: {_row(other.row)}")
    return "; ".join([*words, *([] if other.holder is None else [_holder(other.holder)])])


def _row(row: Row) -> str:
    above = f"{size_text(row.held - row.limit)} above {size_text(row.limit)}"
    return f"{row.moment} would hold {size_text(row.held)}, {above}"


def _holder(holder: Holder) -> str:
    more = "which cannot be" if math.isinf(holder.more) else f"+{time_text(holder.more)}"
    if not holder.value:
        return f"its own work and what it is fed: {more}"
    if not holder.operators:
        return f"the parameter {holder.value}: {more}"
    who = [f"{o} (marked)" if o in holder.marked else o for o in holder.operators]
    others = ", ".join(who[:3]) + (f" and {len(who) - 3} more" if len(who) > 3 else "")
    return f"{others}, by {holder.value}: {more}"


def _alone(other: Alternative) -> str:
    if math.isinf(other.alone):
        return "cannot be"
    sign, large = "-" if other.alone < 0 else "+", "" if other.row is None else ", does not fit"
    return f"{sign}{time_text(abs(other.alone))}{large}"


def _console(file: IO[str] | None) -> Console:
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=200)


def _table(*columns: str, right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table
