"""The numbers of a rehearsal, each beside that of the plan, and their text.

The operators (`measured_table.OperatorSeconds`), the step, what the links would take, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..report.format import size_text, time_text
from .measured_table import OperatorSeconds, figure_line, measured_table, ratio_of, table_text

__all__ = ["Rehearsal"]


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
        promised_step: seconds of a step by the plan.
        rest: seconds of the step in no operator: copies, sums of gradients, autograd, Python.
        communication: seconds of communication by the plan, which are all exposed.
        waiting: seconds that the rank waits for other stages, by the plan.
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
    waiting: float
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
        """Measured by promised: "computing", "peak", "peak_accumulating"."""
        return {
            "computing": ratio_of(self.computing, self.promised_computing),
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

    def to_dict(self) -> dict[str, Any]:
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
        lines = [
            f"rank {self.rank} of {self.devices}{where}, played on {self.device}; the plan is priced for "
            f"{self.cluster}; medians of {self.steps} steps",
            "",
            f"{'':<20} {'measured':>10} {'promised':>10} {'ratio':>7}",
            figure_line(
                "computing", time_text(self.computing), time_text(self.promised_computing), self.ratios()["computing"]
            ),
            figure_line("  the rest", time_text(self.rest), "", None),
            figure_line(
                "communication",
                "" if self.slept is None else f"{time_text(self.slept)} slept",
                time_text(self.communication),
                None,
            ),
        ]
        if self.stages:
            lines.append(figure_line("waiting for stages", "", time_text(self.waiting), None))
        ratios = self.ratios()
        lines += [
            figure_line("a step", time_text(self.step), time_text(self.promised_step), None),
            figure_line("peak memory", size_text(self.peak), size_text(self.promised_peak), ratios["peak"]),
            figure_line(
                "  accumulating",
                size_text(self.peak_accumulating),
                size_text(self.promised_peak),
                ratios["peak_accumulating"],
            ),
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
