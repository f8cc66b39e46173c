"""What a verification found: the numbers, and the text that a person reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..plan.pipelined import PipelinePlan
from ..plan.plan import Plan

if TYPE_CHECKING:
    from ..first_difference import FirstDifference

__all__ = ["Differences", "VerifyReport"]


@dataclass(frozen=True)
class Differences:
    """How far the plan is from one device in one type; differences are relative to the largest value of a tensor.

    Attributes:
        loss: of the results of all steps: the loss, or without `loss_fn` the outputs.
        gradient: of all gradients of the first step; `worst_gradient` names the parameter.
        parameter: of all parameters and buffers after the last step; `worst_parameter` names it.
        tolerance: what each of the three may be.
        failure: what the parallel run was ended by, or None.
    """

    dtype: torch.dtype
    loss: float
    gradient: float
    parameter: float
    worst_gradient: str
    worst_parameter: str
    tolerance: float
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether everything is within the tolerance."""
        return self.failure is None and max(self.loss, self.gradient, self.parameter) <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found. The headline numbers are those of float64, else of the first type.

    Attributes:
        differences: for each type.
        first_difference: the first operator that differs in the first step, or None.
        plan: the plan that was verified.
        notes: what the reader should know besides.
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
        """Whether the plan computes what one device computes, in every type."""
        return all(d.ok for d in self.differences)

    @property
    def headline(self) -> Differences:
        """The differences in float64, or in the first type if it is not among them."""
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

    def summary(self) -> str:
        """The report as text."""
        head = (f"{'ok' if self.ok else 'NOT OK'}: {self.parallel_mode} on {self.devices} "
                f"device{'s' * (self.devices > 1)}{self._stages} against one device, "
                f"{self.steps} step{'s' * (self.steps > 1)}")
        rows = [("relative differences", "loss", "gradients", "parameters", "allowed", "")]
        for d in self.differences:
            rows.append((str(d.dtype).removeprefix("torch."), f"{d.loss:.1e}", _named(d.gradient, d.worst_gradient),
                         _named(d.parameter, d.worst_parameter), f"{d.tolerance:.0e}", "" if d.ok else "not ok"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [head, *("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)]
        for d in self.differences:
            if d.failure is not None:
                lines.append(f"the plan could not run in {str(d.dtype).removeprefix('torch.')}: {d.failure}")
        if self.first_difference is not None:
            lines.append(f"first difference, {self.first_difference.phase}: {self.first_difference}")
        elif not self.ok:
            lines.append("first difference: none in the operators and gradients of the first step")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    __str__ = summary

    @property
    def _stages(self) -> str:
        if not isinstance(self.plan, PipelinePlan):
            return ""
        made = self.plan.schedule
        return f" in {made.stages} stages, {made.name}, {made.micro_batches} micro-batches,"


def _named(value: float, name: str) -> str:
    return f"{value:.1e} ({name})" if name and value else f"{value:.1e}"
