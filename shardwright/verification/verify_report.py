"""The findings of a verification: the numbers, and the text of the report.

1. `Worst`: the tensor that differs most, relative to its tolerance.
2. `Differences`: the worst loss, gradient and parameter in one dtype.
3. `FirstDifference`: the first operator that differs, from `first_difference`.
4. `VerifyReport`: all of these, the verdict, and its text (`summary`).

Example, the beginning of a `summary`::

    ok: data_parallel on 8 devices against one device, 3 steps
    relative differences  loss     gradients  parameters  allowed
    float64               1.6e-16  0.0e+00    0.0e+00     1e-10
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..pipeline.pipeline_plan import PipelinePlan
from ..report.html_elements import html_table
from ..sharded_plan import Plan
from .value_precision import Precision

__all__ = ["Differences", "FirstDifference", "VerifyReport", "Worst"]


@dataclass(frozen=True)
class FirstDifference:
    """The first operator or tensor of a plan that differs from one device.

    Attributes:
        operator: the operator's name, as in ``plan.operator(name)``; "" where `part` is "capture".
        op: its plain name, such as "matmul".
        source: ``file.py:41``, the line that calls it.
        phase: "forward", or "gradient": everything up to the backward agrees.
        part: "operator": its computation on slices; "conversion": the redistribution of an input to it, or of its
            gradient back; "capture": the captured graph differs from the model.
        tensor: the value (or, for a gradient, the value or parameter) that differs.
        difference: the largest difference, relative to the largest value of the operator's output and of its terms: Σ
            |x| |w| of a product, the inputs of others; infinite where the shapes or the replicas differ, or where the
            operator could not run.
        dtype: the dtype of the run in which it was found.
        tolerance: the largest difference allowed.
        precision: the dtype that decided the tolerance, and the operator that brought it in.
        message: further explanation; "": none.
    """

    operator: str
    op: str
    source: str
    phase: str
    part: str
    tensor: str
    difference: float
    dtype: torch.dtype
    message: str = ""
    tolerance: float = 0.0
    precision: Precision | None = None

    def __str__(self) -> str:
        if self.part == "capture":
            how = f", {self.message}" * bool(self.message)
            return f"the graph as it was captured{how}: {self.tensor} differs by {self.difference:.1e}"
        name = self.operator if self.op in self.operator else f"{self.operator} ({self.op})"
        what = f"{self.tensor}" if self.phase == "forward" else f"the gradient of {self.tensor}"
        by = f"differs by {self.difference:.1e}" if math.isfinite(self.difference) else "is not the same at all"
        if self.precision is not None and math.isfinite(self.difference):
            by += f", more than the {self.tolerance:.0e} of {self.precision}"
        parts = [f"{name}{f', {self.source}' if self.source else ''}: {what} {by}"]
        if self.part == "conversion":
            parts.append("in the redistribution for it, not in the operator")
        return "; ".join(parts + [self.message] * bool(self.message))


@dataclass(frozen=True)
class Worst:
    """The tensor among several that differs most, relative to its tolerance.

    Attributes:
        difference: relative to the largest value of the tensor.
        tolerance: the largest difference allowed of this tensor.
        tensor: its name; "" where none differs.
        precision: the dtype that decided the tolerance, and the operator that brought it in; None: nothing is
            rounded.
    """

    difference: float = 0.0
    tolerance: float = 0.0
    tensor: str = ""
    precision: Precision | None = None

    @property
    def ok(self) -> bool:
        """True where the difference is within the tolerance."""
        return self.difference <= self.tolerance

    def excess(self) -> float:
        """The difference as a multiple of the tolerance."""
        return self.difference / self.tolerance if self.tolerance else math.inf if self.difference else 0.0


@dataclass(frozen=True)
class Differences:
    """The differences between the plan and one device in one dtype, relative to the largest value of a tensor.

    Attributes:
        dtype: the dtype of the run.
        losses: of the results of all steps: the loss, or without `loss_fn` the outputs.
        gradients: of the gradients of the first step, by the parameter.
        parameters: of the parameters and buffers after the last step.
        tolerance: the tolerance of a value that was computed in this dtype throughout.
        failure: the error that ended the parallel run, or None.
        overflow: the results on one device are not finite in this dtype, and finite in float64. The differences then
            follow from the order of sums, and decide nothing.
    """

    dtype: torch.dtype
    losses: Worst
    gradients: Worst
    parameters: Worst
    tolerance: float
    failure: str | None = None
    overflow: bool = False

    @property
    def ok(self) -> bool:
        """True where everything is within its tolerance, or overflows on one device."""
        within = self.losses.ok and self.gradients.ok and self.parameters.ok
        return self.failure is None and (self.overflow or within)

    @property
    def loss(self) -> float:
        """The difference of the worst loss."""
        return self.losses.difference

    @property
    def gradient(self) -> float:
        """The difference of the worst gradient."""
        return self.gradients.difference

    @property
    def parameter(self) -> float:
        """The difference of the worst parameter."""
        return self.parameters.difference

    @property
    def worst_gradient(self) -> str:
        """The parameter whose gradient differs most."""
        return self.gradients.tensor

    @property
    def worst_parameter(self) -> str:
        """The parameter or buffer that differs most."""
        return self.parameters.tensor

    @property
    def coarser(self) -> tuple[tuple[str, Precision], ...]:
        """The results ("loss", "gradients", "parameters") that have the tolerance of a dtype other than the run's,
        with their precision."""
        each = (("loss", self.losses), ("gradients", self.gradients), ("parameters", self.parameters))
        return tuple(
            (what, w.precision) for what, w in each if w.precision is not None and w.precision.dtype != self.dtype
        )


@dataclass(frozen=True, repr=False)
class VerifyReport:
    """The findings of a verification. The headline numbers are those of float64, else of the first dtype.

    Attributes:
        differences: for each dtype.
        first_difference: the first operator that differs in the first step, or None.
        devices, parallel_mode, steps: the number of devices, the mode and the number of steps that were verified.
        notes: further remarks.
        plan: the plan that was verified.

    Example:
        >>> report = sw.verify(net, (x,), y, loss_fn=loss_fn, devices=8, steps=1)
        >>> report.ok, report.max_loss_difference < 1e-12
        (True, True)
    """

    differences: tuple[Differences, ...]
    first_difference: FirstDifference | None
    devices: int
    parallel_mode: str
    steps: int
    notes: tuple[str, ...] = ()
    plan: Plan | PipelinePlan | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """True where the plan computes the results of one device, in every dtype, and no operator of the first step
        differs."""
        return all(d.ok for d in self.differences) and self.first_difference is None

    @property
    def headline(self) -> Differences:
        """The differences in float64, or in the first dtype if float64 is not among them."""
        return next((d for d in self.differences if d.dtype == torch.float64), self.differences[0])

    @property
    def max_loss_difference(self) -> float:
        """The headline's largest relative difference of a loss."""
        return self.headline.loss

    @property
    def max_gradient_difference(self) -> float:
        """The headline's largest relative difference of a gradient."""
        return self.headline.gradient

    @property
    def max_parameter_difference(self) -> float:
        """The headline's largest relative difference of a parameter after the last step."""
        return self.headline.parameter

    @property
    def unproved(self) -> str:
        """The reason why the comparison proves nothing of the plan: it cuts no operator, or it sends nothing; ""
        where it does both. The stages of a pipeline are cuts, and so are the ranks' own programs of hybrid_parallel."""
        if self.plan is None:
            return ""
        cut, operators = self.cut
        if not cut and not isinstance(self.plan, PipelinePlan) and self.plan.own is None:
            return f"the plan cuts none of its {operators} operators: every device does the same work"
        return "" if self.sent else "the plan sends nothing: no device depends on another"

    @property
    def proved(self) -> bool:
        """True where the plan cuts operators, sends something, and computes the results of one device."""
        return self.ok and not self.unproved

    @property
    def cut(self) -> tuple[int, int]:
        """The number of operators that the plan cuts, and the number of all operators."""
        plans = [stage.plan for stage in self.plan.stages] if isinstance(self.plan, PipelinePlan) else [self.plan]
        decisions = [d for plan in plans if plan is not None for d in plan.decisions.values()]
        return sum(bool(d.assignment.used) for d in decisions), len(decisions)

    @property
    def sent(self) -> int:
        """The number of collectives, sends and receives of rank 0 in one step."""
        return len(self.plan.collectives(0)) if self.plan is not None else 0

    def to_dict(self) -> dict[str, object]:
        """The report as JSON: differences relative to the largest value of a tensor, with the tolerance of each; a
        difference that is infinite is None."""

        def worst(found: Worst) -> dict[str, object]:
            difference = found.difference if math.isfinite(found.difference) else None
            return {"difference": difference, "tolerance": found.tolerance, "tensor": found.tensor, "ok": found.ok}

        cut, operators = self.cut if self.plan is not None else (None, None)
        return {
            "ok": self.ok,
            "proved": self.proved,
            "unproved": self.unproved,
            "devices": self.devices,
            "mode": self.parallel_mode,
            "steps": self.steps,
            "cut": cut,
            "operators": operators,
            "sent": self.sent,
            "dtypes": {
                _type(d.dtype): {"ok": d.ok, "failure": d.failure}
                | {what: worst(getattr(d, what)) for what in ("losses", "gradients", "parameters")}
                for d in self.differences
            },
            "first_difference": None if self.first_difference is None else str(self.first_difference),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """The report as text."""
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)
        return "\n".join([self._verdict, *table, *self._remarks()])

    def _remarks(self) -> list[str]:
        """The lines below the table of differences."""
        lines = []
        for d in self.differences:
            for precision in dict.fromkeys(p for _, p in d.coarser):
                what = " and ".join(what for what, p in d.coarser if p == precision)
                lines.append(f"allowed in {_type(d.dtype)}: the tolerance of {precision} for {what}")
        for d in self.differences:
            if d.failure is not None:
                lines.append(f"the plan could not run in {_type(d.dtype)}: {d.failure}")
        if self.first_difference is not None:
            lines.append(f"first difference, {self.first_difference.phase}: {self.first_difference}")
        elif not self.ok:
            lines.append("first difference: none in the operators and gradients of the first step")
        if self.plan is not None:
            lines.append(f"cut: {self.cut[0]} of {self.cut[1]} operators; {self.sent} collectives a step")
            if self.unproved:
                lines += [f"nothing was proved: {self.unproved}", f"  to prove something: {_INSTEAD}"]
        return lines + [f"note: {note}" for note in self.notes]

    __str__ = summary

    def __repr__(self) -> str:
        d = self.headline
        lines = [f"<{self._verdict}; relative differences in {_type(d.dtype)}: loss {d.loss:.1e}, gradients"]
        lines[0] += f" {d.gradient:.1e}, parameters {d.parameter:.1e}>"
        if self.first_difference is not None:
            lines.append(f"first difference, {self.first_difference.phase}: {self.first_difference}".partition("\n")[0])
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        return html_table(self._verdict, head, rows, self._remarks())

    @property
    def _verdict(self) -> str:
        verdict = "NOT OK" if not self.ok else "ok, but nothing was proved" if self.unproved else "ok"
        return (
            f"{verdict}: {self.parallel_mode} on {self.devices} "
            f"device{'s' * (self.devices > 1)}{self._stages} against one device, "
            f"{self.steps} step{'s' * (self.steps > 1)}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        """The table of differences: its head, and a row for each dtype."""
        rows: list[tuple[str, ...]] = [("relative differences", "loss", "gradients", "parameters", "allowed", "")]
        for d in self.differences:
            rows.append(
                (
                    _type(d.dtype),
                    f"{d.loss:.1e}",
                    _named(d.gradient, d.worst_gradient),
                    _named(d.parameter, d.worst_parameter),
                    _allowed(d),
                    "not ok" if not d.ok else "overflow" if d.overflow else "",
                )
            )
        return rows

    @property
    def _stages(self) -> str:
        if not isinstance(self.plan, PipelinePlan):
            return ""
        made = self.plan.schedule
        return f" in {made.stages} stages, {made.name}, {made.micro_batches} micro-batches,"


#: The alternatives to verifying a plan that proves nothing.
_INSTEAD = (
    "verify(..., cut=True) or `shardwright verify --cut` plans on links that are free, where searches cut whatever "
    'can be cut; parallel_mode="data_parallel" cuts the batch; with a loss and trained parameters gradients are '
    "sent; more than one device"
)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _named(value: float, name: str) -> str:
    return f"{value:.1e} ({name})" if name and value else f"{value:.1e}"


def _allowed(d: Differences) -> str:
    """The tolerances of loss, gradients and parameters, once where they are equal."""
    each = [f"{w.tolerance:.0e}" for w in (d.losses, d.gradients, d.parameters)]
    return each[0] if len(set(each)) == 1 else " ".join(each)
