"""The figures of a line, each for people and for writers.

    samples/s, tokens/s    their numbers since the last line over the time since then
    TFLOP/s                steps/s · the model's work in a step: the multiplications and additions of every operator on
                           the whole batch, forward and backward, as on one device (`cost.primitive_costs.work_of`);
                           replicated or recomputed operators add none
    share of peak          steps/s · the seconds that all devices of the plan need for this work at the cluster's peak
                           rates: Σ over operators of work / rate of the operator's dtype / devices
    computation, exposed   see `runtime.distributed.watch.wait_times`
    memory                 of an accelerator: the most that torch has given out since the last line. Of a process on
                           the CPU: the most that it has ever had resident

Example: 4 devices with a peak of 1e14 flop/s in bfloat16, 2e14 flop a step, one step a second: 2e14 / 1e14 / 4 = 50 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerator_api import is_accelerator, peak_allocated
from ..cluster import Cluster
from ..cost.primitive_costs import work_of
from ..process import current
from ..report.format import size_text, time_text
from ..runtime.distributed.watch.wait_times import MeasuredStep

__all__ = ["Figure", "PlanWork", "device_of", "memory_figures", "plan_of", "rate_figures", "time_figures"]


class Figure(NamedTuple):
    """One figure of a line.

    Attributes:
        tag: its name for writers.
        value: for writers.
        text: for people.
    """

    tag: str
    value: float
    text: str


def plan_of(model: nn.Module | None) -> Any:
    """The plan of a model's latest program; None while it has none, and for a model that is not parallel."""
    return getattr(model, "plan", None) if getattr(model, "_programs", None) else None


def device_of(model: nn.Module | None) -> torch.device:
    """The device on which this process computes."""
    runtime = current()
    if runtime.processes or runtime.chosen or not isinstance(model, nn.Module):
        return runtime.device
    return next((parameter.device for parameter in model.parameters()), runtime.device)


class PlanWork:
    """The work of a step of a plan.

    Args:
        plan: the plan.
        named: True where the user has named its cluster.

    Attributes:
        plan: the plan.
        flops: multiplications and additions of a step.
        seconds: that all devices need for them at the peak rates of the cluster.
        assumed: the name of the cluster, where it is the one that is assumed; else "".
    """

    def __init__(self, plan: Any, named: bool) -> None:
        cluster = Cluster.of(plan.cluster, plan.devices)
        works = [work_of(op) for op in plan.graph.ops]
        times = getattr(plan, "micro_batches", 1)
        self.plan = plan
        self.flops = times * sum(sum(work.flops) for work in works)
        self.seconds = times * sum(sum(work.flops) / cluster.rate(work.dtype) for work in works) / plan.devices
        self.assumed = "" if named or cluster != Cluster.of(None, plan.devices) else cluster.name

    def figures(self, each: float) -> list[Figure]:
        """The figures of `each` steps a second."""
        if not self.flops:
            return []
        out = [_rate("TFLOP/s", each * self.flops / 1e12)]
        if current().processes or self.plan.devices == 1:  # else one device stands for several
            share = each * self.seconds
            peak = f"the peak of {self.assumed}, which is assumed" if self.assumed else "peak"
            tag = "share_of_assumed_peak" if self.assumed else "share_of_peak"
            out.append(Figure(f"throughput/{tag}", share, f"{100 * share:.3g} % of {peak}"))
        return out


def rate_figures(each: float, amounts: dict[str, float], work: PlanWork | None) -> list[Figure]:
    """The rates.

    Args:
        each: steps a second.
        amounts: numbers a second, by noun.
        work: of a step; None: not known.
    """
    rates = [_rate("steps/s", each), *(_rate(f"{noun}/s", number) for noun, number in amounts.items())]
    return rates + ([] if work is None else work.figures(each))


def _rate(name: str, value: float) -> Figure:
    return Figure(
        f"throughput/{name.replace('/', '_per_')}", value, f"{value:{',.3g' if value < 1000 else ',.0f'}} {name}"
    )


def time_figures(steps: Sequence[MeasuredStep]) -> list[Figure]:
    """The mean times of some steps; nothing where this rank has come to no wait point in them."""
    read = [step.read() for step in steps]
    if not any(times.waits for times in read):
        return []
    computation, exposed = (sum(each) / len(read) for each in list(zip(*read))[:2])
    return [
        Figure("time/computation_s", computation, f"{time_text(computation)} computation"),
        Figure("time/exposed_communication_s", exposed, f"{time_text(exposed)} exposed communication"),
    ]


def memory_figures(device: torch.device, plan: Any) -> list[Figure]:
    """The memory that was in use at most, and what the plan of this rank's process says of it.

    Args:
        device: on which this process computes.
        plan: the plan; None: not known.
    """
    if not is_accelerator(device):
        resident = _peak_resident()
        return [] if resident is None else [_memory("peak_resident", resident, f"peak {size_text(resident)} resident")]
    allocated = peak_allocated(device)
    if allocated is None:
        return []
    text = f"peak {size_text(allocated)} allocated"
    if plan is None or not current().processes:
        return [_memory("peak_allocated", allocated, text)]
    planned = plan.peak
    return [
        _memory("peak_allocated", allocated, f"{text} ({size_text(planned)} planned)"),
        _memory("peak_planned", planned, ""),
    ]


def _memory(name: str, count: float, text: str) -> Figure:
    return Figure(f"memory/{name}_bytes", count, text)


def _peak_resident() -> int | None:
    """Bytes of memory that this process has had resident at most; None where the system does not tell."""
    try:
        import resource  # noqa: PLC0415  Windows has none
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
