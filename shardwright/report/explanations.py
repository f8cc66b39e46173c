"""The reasons for a plan, as text in a terminal: its most expensive operators, or one operator with its alternatives.

1. `costs` prints totals, bound and gap, the most expensive communications, layers, and operators (`DEAREST`).
2. `module` prints the operators of one module with their costs.
3. `explanation` prints one operator: its strategy and the cause of it, its share of the step, its best alternatives,
   and the memory limit or the neighbours that hold its strategy.

`tell` takes a name and prints what it means. `tables` prints all operators of a plan without reasons; the figures come
from `shardwright.operator_explanation`.

Example, lines of `explanation` for the first layer of ``Linear(16, 32), ReLU, Linear(32, 8)``, on 8 devices::

    0 (linear), model.py:6: ((8, 1), (1, 1), (1,))
    along the batch; held there by 1 (relu), by the result of 0 (linear): +5.71 us
    it costs 15 us of 90.7 us a step
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from rich.table import Table
from rich.text import Text

from ..operator_explanation import Alternative, Explanation, Holder, Share, explained, seconds_of
from ..partition.local_program import Decision
from ..pipeline.pipeline_plan import PipelinePlan
from ..planners.limited_alternatives import Row, row_above
from ..sharded_plan import Plan
from .console_tables import console_of, saying, show, table
from .description import describe, numbers_text
from .format import ROUNDING, size_text, time_text
from .operator_names import Found, OperatorNames
from .plan_diff import strategy_text
from .table_elements import legend, operators_table, rows
from .tables import explain, summary

__all__ = [
    "alternatives_table",
    "because",
    "cause",
    "costs",
    "decided",
    "difference",
    "explanation",
    "module",
    "next_best",
    "shares_table",
    "tell",
]

#: The number of operators that are shown.
DEAREST = 10

#: Columns of numbers, and those that give way where a table of costs is too wide.
NUMBERS, WRAPS = ("each", "times", "seconds", "part"), ("operator", "strategy")
SECONDS = ("forward", "backward", "counts")

#: The meaning of costs in tables, and of the parts of an operator's cost.
COSTS = (
    "Seconds of an operator: its computing, the redistributions of its inputs and weights, and the completion of its "
    "partial sums, forward and backward; they add up to the step."
)
SHARES = (
    "computing: on a device's slices; asked: redistribution of an input; handed on: redistribution of a result to its "
    "consumer, or completion of its partial sum; weights: from storage, and sums of gradients; counts: what is this "
    "operator's, the rest counts for the other end. all_gather(4@2): among the 4 ranks that differ in r // 2 % 4. "
    "held by: the operator at the other end of the value whose redistribution rises most, and by how much."
)

#: The largest relative difference between the search's price of a plan and its cost that is not mentioned.
UNEQUAL = 1e-6


def tell(
    plan: Plan | PipelinePlan,
    name: str | None = None,
    file: IO[str] | None = None,
    width: int | None = None,
    alternatives: int = 3,
    memory: float | None = None,
) -> None:
    """Print a plan as a table, the operators of one of its modules, or one operator with its alternatives.

    Args:
        plan: the plan.
        name: as `OperatorNames.find` takes it; None: the whole plan.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
        alternatives: their number.
        memory: bytes that a device may hold, for the alternatives; None: the limit of the plan's search.

    Raises:
        PlanError: as `OperatorNames.find`.
    """
    if name is None:
        explain(plan, file, width)
        return
    names = OperatorNames(plan)
    found = names.find(name)
    if len(found.operators) == 1:
        explanation_of_one = explained(plan, found.operators[0], alternatives, memory)
        explanation(explanation_of_one, file, width, names, found)
    else:
        module(plan, found, names, file, width)


def costs(plan: Plan | PipelinePlan, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print the cost of a plan: totals, bound and gap, the most expensive communications, layers and operators.

    Args:
        plan: the plan.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
    """
    summary(plan, file, width)
    names, console, staged = OperatorNames(plan), console_of(file, width), isinstance(plan, PipelinePlan)
    plans = _plans(plan)
    whole = sum(each.cost for each in plans.values())
    stage_of = {name: stage for stage, each in plans.items() for name in each.price.by_operator}
    spent = {name: seconds_of(plans[stage], (name,)) for name, stage in stage_of.items()}
    part = lambda seconds: f"{seconds / whole:.1%}" if whole else ""
    for number, each in plans.items():
        limit = None if each.found is None else each.found.limit
        if limit is not None:
            over = row_above(each.timeline, limit)
            which = f"stage {number}" if staged else "it"
            excess = "" if over is None else f", which it does not keep: {_row(over, names)}"
            saying(console, width)(f"{which} was searched within {size_text(limit)} a device{excess}")
    show(console, _layers(plan, spent, part))
    at = ("stages",) if staged else ()
    made = table("operator", *at, "strategy", "decided by", *NUMBERS, right=NUMBERS, wraps=WRAPS)
    text = lambda name: strategy_text(plans[stage_of[name]].decisions[name])
    known = lambda name: name in plans[stage_of[name]].decisions
    folded = names.folded(spent, lambda name: (text(name), time_text(spent[name])) if known(name) else name)
    folded.sort(key=lambda entry: -sum(map(spent.__getitem__, entry[1])))
    for path, group in folded[:DEAREST]:
        together = sum(map(spent.__getitem__, group))
        one = group[0]
        strategy, cause = (text(one), plans[stage_of[one]].decisions[one].cause) if known(one) else ("", "")
        stages = (numbers_text(stage_of[name] for name in group),) if staged else ()
        numbers = time_text(spent[one]), str(len(group)), time_text(together), part(together)
        cells = (path, *stages, strategy, cause, *numbers)
        made.add_row(*map(Text, cells))
    if folded[DEAREST:]:
        rest = [name for _, group in folded[DEAREST:] for name in group]
        together = sum(map(spent.__getitem__, rest))
        made.add_row(f"{len(rest)} others", *("" for _ in at), "", "", "", "", time_text(together), part(together))
    show(console, made)
    console.print(Text(COSTS + (" Seconds are those of one micro-batch." if staged else "")))


def _plans(plan: Plan | PipelinePlan) -> dict[int, Plan]:
    return {stage.number: stage.plan for stage in plan.stages} if isinstance(plan, PipelinePlan) else {0: plan}


def _layers(plan: Plan | PipelinePlan, spent: Mapping[str, float], part: Callable[[float], str]) -> Table:
    """The cost of layers, a row for those of one block; operators outside of blocks together."""
    made = table("part of the model", "each", "times", "seconds", "part", right=NUMBERS)
    rest = dict(spent)
    for block in describe(plan).blocks:
        each = [sum(rest.pop(name, 0.0) for name in operators) for operators in block.operators]
        ends = sorted({time_text(seconds) for seconds in (min(each), max(each))})
        one = " to ".join(ends if each and min(each) == max(each) else [time_text(min(each)), time_text(max(each))])
        one = ends[0] if len(ends) == 1 else one
        made.add_row(*map(Text, (block.title, one, str(len(each)), time_text(sum(each)), part(sum(each)))))
    remaining = sum(rest.values())
    made.add_row(*map(Text, ("all else, such as the loss", "", str(len(rest)), time_text(remaining), part(remaining))))
    return made


def module(
    plan: Plan | PipelinePlan, found: Found, names: OperatorNames, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Print the operators of a module: their strategies, layouts, traffic and costs.

    Args:
        plan: the plan.
        found: the module.
        names: the operators' paths.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
    """
    console = console_of(file, width)
    say = saying(console, width)
    for number, each in _plans(plan).items():
        inside = [name for name in found.operators if name in each.decisions]
        if not inside:
            continue
        alike = f", one of {found.alike} that are split alike" if found.alike > 1 else ""
        where = f" of stage {number}, one micro-batch" if isinstance(plan, PipelinePlan) else " of a step"
        cost = f"{time_text(seconds_of(each, inside))} of {time_text(each.cost)}{where}"
        say(f"{found.path}{alike}: {len(inside)} operators, {cost}")
        show(console, operators_table(rows(each, each.collectives(0), names, only=set(inside)), console))
        made = table("operator", "decided by", "seconds", "part", right=("seconds", "part"))
        for name in sorted(inside, key=lambda name: -seconds_of(each, (name,)))[:DEAREST]:
            seconds = seconds_of(each, (name,))
            share = f"{seconds / each.cost:.1%}" if each.cost else ""
            made.add_row(*map(Text, (names.text(name), each.decisions[name].cause, time_text(seconds), share)))
        show(console, made)
    console.print(Text(f"{legend(names)} {COSTS}"))


def explanation(
    answer: Explanation,
    file: IO[str] | None = None,
    width: int | None = None,
    names: OperatorNames | None = None,
    found: Found | None = None,
) -> None:
    """Print the cost of an operator, its best alternatives and the reasons that hold its strategy.

    Args:
        answer: the explanation, of `shardwright.operator_explanation.explained`.
        file: the file to print to; None: standard output.
        width: of tables, in characters; None: the terminal's, or 100 where there is none.
        names: the paths of operators; None: those of the explanation's plan.
        found: the name by which the operator was found; None: its own path.
    """
    console, decision, cost = console_of(file, width), answer.decision, answer.plan.cost
    names = names or OperatorNames(answer.plan)
    say = saying(console, width)
    op = decision.op
    inside = op.module if op.module and not names.paths.get(op.name, "").startswith(op.module) else ""
    place = "".join(f", {part}" for part in (inside, op.source) if part)
    say(f"{names.text(op.name)}{place}: {strategy_text(decision)}")
    if found is not None and found.alike > 1:
        say(f"{found.path}: the first of {found.alike} operators that are split alike")
    say(decided(answer, names))
    step = "a step" if answer.stage is None else f"that stage {answer.stage} takes with one micro-batch"
    say(f"it costs {time_text(answer.seconds)} of {time_text(cost)} {step}")
    if (following := next_best(answer, names)) is not None:
        say(following)
    show(console, shares_table(answer.shares, names))
    if answer.over is not None:
        say(f"this plan itself does not fit: {_row(answer.over, names)}")
    if answer.missing is not None:
        say(f"no alternatives: {answer.missing}")
        return
    if abs(answer.cost - cost) > UNEQUAL * cost:
        say(f"the search prices this plan at {time_text(answer.cost)}: what is sent once for several is paid by each")
    if math.isinf(answer.least):
        say("no plan in which it keeps this strategy fits")
    elif answer.least < answer.cost * (1 - UNEQUAL):
        which, more = ("the best plan", "") if answer.exact else ("every plan", " or more")
        say(f"{which} in which it keeps this strategy takes {time_text(answer.least)}{more}")
    if not answer.alternatives:
        say("there is no other way to cut it")
        return
    show(console, alternatives_table(answer, names))
    for other in answer.alternatives:
        if other.refused:
            say(f"{strategy_text(other.decision)} does not fit: {other.refused}")
    whole = "step" if answer.stage is None else "stage with one micro-batch"
    anew = "chosen anew"
    if answer.limit is not None:
        anew += f" within {size_text(answer.limit)} a device, with what is recomputed and how parameters are stored"
    console.print(
        Text(
            f"in all: the whole {whole}, when everything else is {anew}; alone: when nothing else changes. "
            f"Among {answer.strategies} strategies, one line for each way to cut. {SHARES}"
        )
    )
    if not answer.exact:
        unlimited = "" if answer.bound is None else f", none below that of all plans, {time_text(answer.bound)}"
        say(f"at least: proved lower bounds{unlimited}; no plan with these strategies was searched.")
    tried, considered = answer.tried
    if tried < considered:
        say(
            f"Of {considered} other ways to cut, the {tried} that cost least without the limit were searched within it."
        )
    if not all(other.proved for other in answer.alternatives):
        say("from ... to: no plan within the limit takes less than the one, and one was found that takes the other.")


def shares_table(shares: Iterable[Share], names: OperatorNames) -> Table:
    """The cost of an operator, a row for each part."""
    made = table("part of the cost", "value", "other end", "forward", "backward", "counts", "sends", right=SECONDS)
    for share in shares:
        cells = (
            *(share.what, _value(share.value, names), names.path(share.other)),
            *map(time_text, (share.forward, share.backward, share.own)),
            ", ".join(share.sends),
        )
        made.add_row(*map(Text, cells))
    return made


def alternatives_table(answer: Explanation, names: OperatorNames) -> Table:
    """The best alternatives of an operator, a row each."""
    total, more = ("in all", "more") if answer.exact else ("in all, at least", "more, at least")
    made = table("alternative", total, more, "alone", "held by", right=(total, more, "alone"))
    for other in answer.alternatives:
        cells = (strategy_text(other.decision), _total(other), _more(other), _alone(other))
        made.add_row(*map(Text, (*cells, _reasons(other, names))))
    return made


def next_best(answer: Explanation, names: OperatorNames) -> str | None:
    """The sentence about the best alternative: its difference in time, and the reason against it.

    An alternative is called better only where a plan with it was found that takes less.
    """
    fitting = [other for other in answer.alternatives if not math.isinf(other.total)]
    if answer.missing is not None or not fitting:
        return None
    best = min(fitting, key=lambda other: (not answer.is_better(other), other.total, other.alone))
    better = answer.is_better(best)
    most = "" if answer.exact and best.proved else "at most " if answer.exact else "at least "
    per = "a step" if answer.stage is None else "a micro-batch"
    proved = "" if answer.exact else ", not proved to be reached"
    alone = "impossible" if math.isinf(best.alone) else difference(best.alone)
    label = "better by the search" if better else "next best" if best.more >= 0 or answer.exact else "perhaps better"
    text = f"{label}: {strategy_text(best.decision)}, {most}{difference(best.more)} {per} if all else is chosen anew"
    text += f"{proved}, {alone} if nothing else changes"
    return text + (f", since {because(best.holder, names)}" if best.holder is not None else "")


def difference(seconds: float) -> str:
    """A difference of seconds with its sign: ``+1.33 ms``."""
    if abs(seconds) < ROUNDING:
        return "+0 us"
    return f"{'-' if seconds < 0 else '+'}{time_text(abs(seconds))}"


def because(holder: Holder, names: OperatorNames) -> str:
    """The reason why an alternative alone costs more, as a sentence."""
    more = "cannot be" if math.isinf(holder.more) else f"takes {difference(holder.more)}"
    if not holder.value:
        return f"its own work, and what it is fed, {more}"
    if not holder.operators:
        return f"the redistribution of {_value(holder.value, names)} {more}"
    if shared := _shared(holder, names):
        return f"the redistribution of {shared}, {more}"
    return (
        f"the redistribution of {_theirs(holder, names)} between it and {_ends(holder.operators, holder, names)} {more}"
    )


def _theirs(holder: Holder, names: OperatorNames) -> str:
    """The value of a holder, beside the operators at its other end."""
    return "its result" if names.producers.get(holder.value) in holder.operators else _value(holder.value, names)


def _shared(holder: Holder, names: OperatorNames) -> str:
    """A value that another operator has produced and that others read as well, in words; "": it is none."""
    producer = names.producers.get(holder.value)
    consumers = [o for o in holder.operators if o != producer]
    if producer not in holder.operators or not consumers:
        return ""
    read = "reads" if len(consumers) == 1 else "read"
    return f"the result of {_ends([producer], holder, names)}, which {_ends(consumers, holder, names)} {read} too"


def _ends(operators: Sequence[str], holder: Holder, names: OperatorNames) -> str:
    """Operators at the other end of a value; marked ones say so."""
    holders = [names.path(o) + " (marked)" * (o in holder.marked) for o in operators]
    return ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")


def _value(value: str, names: OperatorNames) -> str:
    """A value: a parameter's or an input's name, or the operator that produces it."""
    found = names.value(value)
    return f"the {found}" if found.startswith("result of ") else found


def _total(other: Alternative) -> str:
    """The time of a whole step with an alternative."""
    if math.isinf(other.total):
        return "does not fit"
    if other.proved or other.bound is None:
        return time_text(other.total)
    return f"from {time_text(other.bound)} to {time_text(other.total)}"


def _more(other: Alternative) -> str:
    return "" if math.isinf(other.more) else difference(other.more)


def decided(answer: Explanation, names: OperatorNames) -> str:
    """The cause of an operator's strategy, and the reasons that hold it."""
    text = cause(answer.decision, names)
    if answer.decision.cause == "mark":
        return text
    by = [] if answer.unlimited is None else [_memory(answer.unlimited, names)]
    by += [] if answer.holder is None else [_holder(answer.holder, names)]
    return f"{text}; held there by {', and by '.join(by)}" if by else text


def cause(decision: Decision, names: OperatorNames) -> str:
    """The cause of an operator's strategy."""
    op = decision.op
    if decision.cause == "mark":
        where = f" at {op.mark.source}" if op.mark is not None and op.mark.source else ""
        return f"marked{where}: the mark holds it there, whatever it costs"
    origin = names.path(decision.origin)
    texts = {
        "search": "the search decided",
        "batch": "along the batch",
        "follow": "it follows its input",
        "whole": "whole on every device",
        "propagated": f"it follows {'' if origin.startswith('input ') else 'the mark on '}{origin}",
    }
    return texts.get(decision.cause, decision.cause)


def _memory(unlimited: Alternative, names: OperatorNames) -> str:
    """The strategy that an operator would have without the memory limit."""
    assert unlimited.over is not None and unlimited.aside is not None
    return (
        f"memory: without the limit {strategy_text(unlimited.decision)} would do, in all "
        f"{time_text(unlimited.aside)}, but then {_row(unlimited.over, names)}"
    )


def _reasons(other: Alternative, names: OperatorNames) -> str:
    """The reasons that keep an operator from another strategy."""
    reasons = []
    if other.over is not None and other.aside is not None:
        reasons.append(f"memory: in all {time_text(other.aside)} without the limit, but {_row(other.over, names)}")
    elif other.row is not None:
        reasons.append(f"memory, alone: {_row(other.row, names)}")
    return "; ".join([*reasons, *([] if other.holder is None else [_holder(other.holder, names)])])


def _row(row: Row, names: OperatorNames) -> str:
    half, of, operator = row.moment.partition(" of ")
    above = f"{size_text(row.allocated - row.limit)} above {size_text(row.limit)}"
    return f"{half}{of}{names.path(operator)} would hold {size_text(row.allocated)}, {above}"


def _holder(holder: Holder, names: OperatorNames) -> str:
    more = "which cannot be" if math.isinf(holder.more) else f"+{time_text(holder.more)}"
    if not holder.value:
        return f"its own work and what it is fed: {more}"
    value = _value(holder.value, names)
    if not holder.operators:
        return f"{'' if value.startswith('the result') else 'the parameter '}{value}: {more}"
    shared = _shared(holder, names)
    return f"{shared or f'{_ends(holder.operators, holder, names)}, by {_theirs(holder, names)}'}: {more}"


def _alone(other: Alternative) -> str:
    if math.isinf(other.alone):
        return "cannot be"
    return difference(other.alone) + ("" if other.row is None else ", does not fit")
