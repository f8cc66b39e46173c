"""The numbers of a rehearsal, each beside that of the plan, and their text.

    ratio = measured / promised

1. `OperatorSeconds`: one operator of the user's program, forward and backward.
2. `Rehearsal`: all of them, the step, what the links would take, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..report.format import size_text, time_text

__all__ = ["OperatorSeconds", "Rehearsal"]

#: Operators in the text; the others are in the JSON.
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
        return _ratio(self.seconds, self.promised)


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
            "computing": _ratio(self.computing, self.promised_computing),
            "peak": _ratio(self.peak, self.promised_peak),
            "peak_accumulating": _ratio(self.peak_accumulating, self.promised_peak),
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
        out["operators"] = [asdict(o) | {"ratio": o.ratio} for o in self.operators]
        return out | {
            "computing": self.computing,
            "promised_computing": self.promised_computing,
            "ratios": self.ratios(),
            "correlation": self.correlation(),
        }

    def summary(self) -> str:
        """The report as text."""
        where = f", stage {', '.join(map(str, self.stages))}" if self.stages else ""
        lines = [
            f"rank {self.rank} of {self.devices}{where}, played on {self.device}; the plan is priced for "
            f"{self.cluster}; medians of {self.steps} steps",
            "",
            f"{'':<20} {'measured':>10} {'promised':>10} {'ratio':>7}",
            _line(
                "computing", time_text(self.computing), time_text(self.promised_computing), self.ratios()["computing"]
            ),
            _line("  the rest", time_text(self.rest), "", None),
            _line(
                "communication",
                "" if self.slept is None else f"{time_text(self.slept)} slept",
                time_text(self.communication),
                None,
            ),
        ]
        if self.stages:
            lines.append(_line("waiting for stages", "", time_text(self.waiting), None))
        ratios = self.ratios()
        lines += [
            _line("a step", time_text(self.step), time_text(self.promised_step), None),
            _line("peak memory", size_text(self.peak), size_text(self.promised_peak), ratios["peak"]),
            _line(
                "  accumulating",
                size_text(self.peak_accumulating),
                size_text(self.promised_peak),
                ratios["peak_accumulating"],
            ),
        ]
        if (correlation := self.correlation()) is not None:
            lines.append(f"rank correlation of the operators' seconds: {correlation:.2f}")
        ordered = sorted(self.operators, key=lambda o: -o.seconds)
        width = max([len("operator"), *(len(o.operator) for o in ordered[:SHOWN])])
        lines += ["", f"{'operator':<{width}} {'forward':>9} {'backward':>9} {'promised':>19} {'ratio':>7}"]
        for o in ordered[:SHOWN]:
            promised = f"{time_text(o.promised_forward)} {time_text(o.promised_backward):>9}"
            ratio = "" if o.ratio is None else f"{o.ratio:.3g}"
            lines.append(
                f"{o.operator:<{width}} {time_text(o.forward):>9} {time_text(o.backward):>9} {promised:>19} {ratio:>7}"
            )
        if len(ordered) > SHOWN:
            left = ordered[SHOWN:]
            lines.append(f"{len(left)} more take {time_text(math.fsum(o.seconds for o in left))}")
        return "\n".join(lines)


def _line(name: str, measured: str, promised: str, ratio: float | None) -> str:
    return f"{name:<20} {measured:>10} {promised:>10} {'' if ratio is None else f'{ratio:.3g}':>7}".rstrip()


def _ratio(measured: float, promised: float) -> float | None:
    return measured / promised if promised else None


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
