"""Measured seconds beside those that a plan promises, as values and as text.

1. `OperatorSeconds`, `measured_table`: the operators, for a rehearsal and for a trace.
2. `Rehearsal`: the operators of one rank, its step in time, what the links would take, and memory.

ratio = measured / promised

Example: an operator with 1.23 ms measured and 1.10 ms promised has the ratio 1.12. A view, to which nothing is
promised, has none.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from ..json_files.json_reader import JsonObject
from ..report.console_tables import console_of, show, table
from ..report.format import size_text, time_text
from ..report.operator_names import OperatorNames

__all__ = ["OperatorSeconds", "Rehearsal", "figure_line", "folded", "measured_table", "ratio_of", "table_text"]


#: Rows of a table of measured seconds; the others are in the JSON.
SHOWN = 40


@dataclass(frozen=True)
class OperatorSeconds:
    """Seconds of one operator in a step of one rank, all its micro-batches and recomputations included.

    Attributes:
        operator: its name in the plan.
        forward, backward: measured.
        promised_forward, promised_backward: by the plan's cost model, without communication.
    """

    operator: str
    forward: float
    backward: float
    promised_forward: float
    promised_backward: float

    @property
    def seconds(self) -> float:
        """Measured, forward and backward."""
        return self.forward + self.backward

    @property
    def promised(self) -> float:
        """By the plan, forward and backward."""
        return self.promised_forward + self.promised_backward

    @property
    def ratio(self) -> float | None:
        """Measured by promised; None where the plan promises nothing, as for a view."""
        return ratio_of(self.seconds, self.promised)


def ratio_of(measured: float, promised: float) -> float | None:
    """Measured by promised; None where nothing is promised."""
    return measured / promised if promised else None


def together(name: str, each: Sequence[OperatorSeconds]) -> OperatorSeconds:
    """The sum of several, under a name."""
    forward, backward, *promised = (
        math.fsum(getattr(o, part) for o in each)
        for part in ("forward", "backward", "promised_forward", "promised_backward")
    )
    return OperatorSeconds(name, forward, backward, *promised)


def folded(operators: Iterable[OperatorSeconds], names: OperatorNames) -> tuple[OperatorSeconds, ...]:
    """Operators by their paths; those of equal layers to which the plan promises the same are one, with the sum of
    their seconds."""
    of = {o.operator: o for o in operators}
    # To six digits: sums of the same numbers may differ in the last.
    same = lambda name: (f"{of[name].promised_forward:.6g}", f"{of[name].promised_backward:.6g}")
    return tuple(together(text, [of[name] for name in group]) for text, group in names.folded(of, same))


def figure_line(name: str, measured: str, promised: str, ratio: float | None) -> str:
    """A line of the figures of a whole step."""
    return f"{name:<20} {measured:>10} {promised:>10} {ratio_text(ratio):>7}".rstrip()


def ratio_text(ratio: float | None) -> str:
    """``0.982``, ``26.9``, ``3820``; nothing where there is no ratio."""
    return "" if ratio is None else f"{ratio:.3g}" if ratio < 1000 else f"{ratio:.0f}"


def measured_table(title: str, operators: Sequence[OperatorSeconds]) -> Table:
    """A table of measured and promised seconds, the longest first.

    Args:
        title: of the first column.
        operators: or other things that take time.
    """
    columns = ("forward", "backward", "promised\nforward", "promised\nbackward", "ratio")
    made = table(title, *columns, right=columns, wraps=(title,))
    ordered = sorted(operators, key=lambda o: -o.seconds)
    for o in ordered[:SHOWN]:
        seconds = (o.forward, o.backward, o.promised_forward, o.promised_backward)
        cells = (o.operator, *(time_text(s) if s else "" for s in seconds), ratio_text(o.ratio))
        made.add_row(*map(Text, cells))
    if remaining := ordered[SHOWN:]:
        rest = together("", remaining)
        seconds_text = (time_text(rest.forward), time_text(rest.backward))
        made.add_row(*map(Text, (f"{len(remaining)} more", *seconds_text, "", "", "")))
    return made


def table_text(made: Table, width: int | None = None) -> str:
    """A table as text, as wide as the terminal, or `width`."""
    written = io.StringIO()
    show(console_of(written, console_of(None, width).width), made)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines() if line.strip())


@dataclass(frozen=True)
class Rehearsal:
    """One rank of a plan, played on one device. Seconds are medians over the steps.

    Attributes:
        rank, devices: the rank, and the number of ranks of the plan.
        stages: the pipeline stages of the rank; empty without a pipeline.
        device: the name of the device.
        cluster: the cluster that the plan is priced for.
        steps: the number of steps that were measured.
        operators: in program order.
        step: seconds of a whole step as it ran.
        promised_step: seconds of a step by the plan as a sum, in which nothing overlaps (`Plan.cost`).
        rest: seconds of the step in no operator: copies, sums of gradients, autograd, Python.
        communication: seconds of all messages by the plan.
        exposed, promised_exposed: seconds in which the computation waits for messages, as the plan's schedule issues
            them and its cost model prices them: beside the measured operators, and beside the promised ones.
        waiting, promised_waiting: seconds that the rank waits for other stages, likewise; 0 without a pipeline.
        elapsed, promised_elapsed: seconds of the step in time, likewise: computing, casts of
            redistributions, exposed and waiting.
        slept: seconds that the step slept for communication; None: communication took no time.
        peak: the most bytes held in a step that begins without gradients, as after ``zero_grad()``.
        peak_accumulating: the same in a step that begins with the gradients of another one.
        promised_peak: by the plan, which holds gradients during the whole step.
        layers: the operators by their paths, those of equal layers together.

    Example:
        >>> played = sw.rehearse(plan, rank=1, steps=1)
        >>> played.peak > 0
        True
    """

    rank: int
    devices: int
    stages: tuple[int, ...]
    device: str
    cluster: str
    steps: int
    operators: tuple[OperatorSeconds, ...]
    step: float
    promised_step: float
    rest: float
    communication: float
    exposed: float
    promised_exposed: float
    waiting: float
    promised_waiting: float
    elapsed: float
    promised_elapsed: float
    slept: float | None
    peak: int
    peak_accumulating: int
    promised_peak: float
    layers: tuple[OperatorSeconds, ...] = ()

    @property
    def computing(self) -> float:
        """Seconds of all operators."""
        return math.fsum(o.seconds for o in self.operators)

    @property
    def promised_computing(self) -> float:
        """Seconds of all operators, by the plan."""
        return math.fsum(o.promised for o in self.operators)

    def ratios(self) -> dict[str, float | None]:
        """Measured by promised: "computing", "exposed", "waiting", "elapsed", "peak", "peak_accumulating"."""
        return {
            "computing": ratio_of(self.computing, self.promised_computing),
            "exposed": ratio_of(self.exposed, self.promised_exposed),
            "waiting": ratio_of(self.waiting, self.promised_waiting),
            "elapsed": ratio_of(self.elapsed, self.promised_elapsed),
            "peak": ratio_of(self.peak, self.promised_peak),
            "peak_accumulating": ratio_of(self.peak_accumulating, self.promised_peak),
        }

    def correlation(self) -> float | None:
        """The rank correlation (Spearman's) of the operators' seconds with the promised ones; None for fewer than
        three operators with work."""
        work = [o for o in self.operators if o.promised]
        if len(work) < 3:
            return None
        return _pearson(_ranks([o.seconds for o in work]), _ranks([o.promised for o in work]))

    def to_dict(self) -> JsonObject:
        """Everything as JSON."""
        out = asdict(self)
        del out["layers"]
        out["operators"] = [asdict(o) | {"ratio": o.ratio} for o in self.operators]
        return out | {
            "computing": self.computing,
            "promised_computing": self.promised_computing,
            "ratios": self.ratios(),
            "correlation": self.correlation(),
        }

    def summary(self, width: int | None = None) -> str:
        """The report as text; operators of equal layers to which the plan promises the same share a row.

        Args:
            width: of the table, in characters; None: the terminal's, or 100 where there is none.
        """
        where = f", stage {', '.join(map(str, self.stages))}" if self.stages else ""
        ratios = self.ratios()
        in_seconds = lambda title, name, measured, promised: figure_line(
            title, time_text(measured), time_text(promised), ratios[name]
        )
        lines = [
            f"rank {self.rank} of {self.devices}{where}, played on {self.device}; the plan is priced for "
            f"{self.cluster}; medians of {self.steps} steps",
            "",
            f"{'':<20} {'measured':>10} {'promised':>10} {'ratio':>7}",
            in_seconds("computing", "computing", self.computing, self.promised_computing),
            figure_line(
                "communication",
                "" if self.slept is None else f"{time_text(self.slept)} slept",
                time_text(self.communication),
                None if self.slept is None else ratio_of(self.slept, self.communication),
            ),
            in_seconds("  exposed", "exposed", self.exposed, self.promised_exposed),
        ]
        if self.stages:
            lines.append(in_seconds("waiting for stages", "waiting", self.waiting, self.promised_waiting))
        lines += [
            in_seconds("a step in time", "elapsed", self.elapsed, self.promised_elapsed),
            figure_line("  as it ran", time_text(self.step), "", None),
            figure_line("  in no operator", time_text(self.rest), "", None),
            figure_line("peak memory", size_text(self.peak), size_text(self.promised_peak), ratios["peak"]),
            figure_line(
                "  accumulating",
                size_text(self.peak_accumulating),
                size_text(self.promised_peak),
                ratios["peak_accumulating"],
            ),
            "exposed, in time: the measured computing beside the messages of the plan's cost model and schedule",
        ]
        if (correlation := self.correlation()) is not None:
            lines.append(f"rank correlation of the operators' seconds: {correlation:.2f}")
        made = measured_table("operator", self.layers or self.operators)
        return "\n".join((*lines, "", table_text(made, width)))


def _ranks(numbers: Sequence[float]) -> list[float]:
    """The place of each number among all; equal numbers share the mean of their places."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    out = [0.0] * len(numbers)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and math.isclose(numbers[order[stop]], numbers[order[start]], rel_tol=1e-9):
            stop += 1
        for k in order[start:stop]:
            out[k] = (start + stop - 1) / 2
        start = stop
    return out


def _pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    means = math.fsum(one) / len(one), math.fsum(other) / len(other)
    both = math.fsum((a - means[0]) * (b - means[1]) for a, b in zip(one, other))
    each = math.fsum((a - means[0]) ** 2 for a in one) * math.fsum((b - means[1]) ** 2 for b in other)
    return both / math.sqrt(each) if each else None
