"""`Monitor`: a line about the training every few steps, from rank 0; TensorBoard and W&B, by their own writers.

    step 120  loss 2.3456  8.31 steps/s  17,019 tokens/s  0.124 TFLOP/s  41.2 % of peak  96.2 ms computation
              24.1 ms exposed communication  peak 12 GiB allocated (11 GiB planned)

    loss                   the mean since the last line
    steps/s                steps since the last line over the time since then; the step that plans the model is in no
                           line's time
    samples/s, tokens/s    their numbers since the last line over the time since then
    TFLOP/s                steps/s · the model's work in a step: the multiplications and additions of every operator on
                           the whole batch, forward and backward, as on one device (`cost.primitive_costs.work_of`);
                           replicated or recomputed operators add none
    share of peak          steps/s · the seconds that all devices of the plan need for this work at the cluster's peak
                           rates: Σ over operators of work / rate of the operator's dtype / devices
    computation, exposed   see `runtime.distributed.rank_positions`
    memory                 of an accelerator: the most that torch has given out since the last line. Of a process on
                           the CPU: the most that it has ever had resident

Example: 4 devices with a peak of 1e14 flop/s in bfloat16, 2e14 flop a step, one step a second: 2e14 / 1e14 / 4 = 50 %.

The monitor does not wait for the loss: on an accelerator its mean is copied beside the computation, and the line is
written in the first step after the copy has finished. Computation and exposed communication are measured on rank 0:
by the host's clock in every step; on an accelerator by events, in the steps for which a line is written.

    TensorBoard            add_scalar(tag, value, step)
    W&B                    run.log({tag: value, …, "step": step}), with "step" as the x-axis of each tag. W&B's own
                           count of steps is left alone: a line may be written later than a step that the user logs

A writer that the user has made stays open; one that a monitor has opened is closed with the monitor.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import torch
from torch import Tensor, nn

from .accelerators import is_accelerator, on_host_soon, peak_allocated
from .cluster import Cluster
from .cost.primitive_costs import work_of
from .errors import SettingError
from .pipeline.pipeline_plan import PipelinePlan
from .process_runtime import current, rank
from .report.format import size_text, time_text
from .runtime.distributed.rank_positions import MeasuredStep, WaitTimes, times_on
from .sharded_plan import Plan

__all__ = ["Monitor"]


#: A share of the peak below which a line says no number.
LEAST_SHARE = 1e-4


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


def plan_of(model: nn.Module | None) -> Plan | PipelinePlan | None:
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

    def __init__(self, plan: Plan | PipelinePlan, named: bool) -> None:
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
        out = [_work_figure(each * self.flops)]
        alone = self.plan.devices > 1 and not current().processes  # one device stands for several
        unlike = self.assumed and not is_accelerator(current().device)  # a CPU beside GPUs that nobody named
        if not alone and not unlike:
            share = each * self.seconds
            peak = f"the peak of {self.assumed}, which is assumed" if self.assumed else "peak"
            tag = "share_of_assumed_peak" if self.assumed else "share_of_peak"
            percent = f"{100 * share:.3g}" if share >= LEAST_SHARE else f"less than {100 * LEAST_SHARE:g}"
            out.append(Figure(f"throughput/{tag}", share, f"{percent} % of {peak}"))
        return out


def _work_figure(flops: float) -> Figure:
    """Operations a second: always TFLOP/s for a writer; in a line GFLOP/s or MFLOP/s where a model is small."""
    figure = _rate("TFLOP/s", flops / 1e12)
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("G", 1e9)) if flops >= s / 100), ("M", 1e6))
    return figure._replace(text=_rate(f"{unit}FLOP/s", flops / size).text)


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


def memory_figures(device: torch.device, plan: Plan | PipelinePlan | None) -> list[Figure]:
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


class MetricWriter(ABC):
    """A writer of figures."""

    @abstractmethod
    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a step, by tag."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Bring the rest to disk, and close what the monitor has opened."""


class ScalarWriter(Protocol):
    """A ``SummaryWriter`` of torch.utils.tensorboard, or a value like it."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class MetricRun(Protocol):
    """A run of W&B, or a value like it."""

    def define_metric(self, name: str, /, *, step_metric: str) -> object: ...
    def log(self, data: dict[str, float], /) -> object: ...
    def finish(self, *, exit_code: int) -> object: ...


class _TensorBoard(MetricWriter):
    def __init__(self, writer: ScalarWriter, ours: bool) -> None:
        self._writer, self._ours = writer, ours

    def write(self, figures: Mapping[str, float], step: int) -> None:
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, failed: bool) -> None:
        if self._ours:
            self._writer.close()
        else:
            self._writer.flush()


class _WandB(MetricWriter):
    def __init__(self, run: MetricRun, ours: bool) -> None:
        self._run, self._ours = run, ours
        self._defined: set[str] = set()

    def write(self, figures: Mapping[str, float], step: int) -> None:
        for tag in figures:
            if tag not in self._defined:
                self._run.define_metric(tag, step_metric="step")
                self._defined.add(tag)
        self._run.log({**figures, "step": step})

    def close(self, failed: bool) -> None:
        if self._ours:
            self._run.finish(exit_code=int(failed))


def check_tensorboard(setting: object) -> None:
    """Check the argument ``tensorboard=`` of a monitor.

    Raises:
        SettingError: neither a folder nor a writer.
    """
    if setting is not None and not isinstance(setting, (str, os.PathLike)) and not hasattr(setting, "add_scalar"):
        raise SettingError(
            f"Monitor(tensorboard={setting!r})", legal="a folder, or a SummaryWriter of torch.utils.tensorboard"
        )


def check_wandb(setting: object) -> None:
    """Check the argument ``wandb=`` of a monitor.

    Raises:
        SettingError: neither a run, nor arguments for one, nor True.
    """
    plain = setting is None or isinstance(setting, (bool, Mapping))
    if not plain and not (hasattr(setting, "log") and hasattr(setting, "define_metric")):
        raise SettingError(
            f"Monitor(wandb={setting!r})",
            legal='True, a dict of arguments of wandb.init such as {"project": "gpt"}, or a run of W&B',
        )


def tensorboard_writer(setting: str | Path | ScalarWriter, say: Callable[[str], None]) -> MetricWriter | None:
    """The writer of a folder, or of a SummaryWriter.

    Args:
        setting: one of them.
        say: takes a line where TensorBoard is not installed; the result is None then.
    """
    if not isinstance(setting, (str, os.PathLike)):
        return _TensorBoard(setting, False)
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  TensorBoard may not be installed
    except ImportError:
        say("TensorBoard is not installed (pip install tensorboard): nothing is written for it")
        return None
    return _TensorBoard(SummaryWriter(str(setting)), True)


def wandb_writer(setting: bool | Mapping[str, object] | MetricRun, say: Callable[[str], None]) -> MetricWriter | None:
    """The writer of a run of W&B.

    Args:
        setting: the run; True: a new one; a dict: a new one with these arguments of ``wandb.init``.
        say: takes a line where W&B is not installed; the result is None then.
    """
    if not isinstance(setting, (bool, Mapping)):
        return _WandB(setting, False)
    try:
        import wandb  # noqa: PLC0415  W&B may not be installed
    except ImportError:
        say("W&B is not installed (pip install wandb): nothing is written for it")
        return None
    return _WandB(wandb.init(**(setting if isinstance(setting, Mapping) else {})), True)


@dataclass
class _Line:
    """A line that waits for its loss."""

    step: int
    loss: Tensor | None
    rates: list[Figure]
    memory: list[Figure]
    times: list[MeasuredStep]
    metrics: dict[str, float] = field(default_factory=dict)
    ready: Any = None  # an event of the accelerator, or None


class Monitor:
    """Prints a line every few steps. Call `step` once a step, on every rank or on rank 0 alone. A ``with`` block
    closes it.

    A line has the mean loss; steps, samples, tokens and operations a second; the share of the peak of the model's
    cluster; the time of a step by computation and exposed communication, as rank 0 has measured it; and the most memory
    that was in use: of an accelerator since the last line (torch's count of it begins again), of a process on the CPU
    ever. What is not known is not shown: the share of peak and exposed communication where all ranks are in one
    process; the share of peak on a CPU where no cluster was named; exposed communication without a model, and of one
    that ``torch.compile`` compiles. On an accelerator without a named cluster the line says which one is assumed.

    Args:
        model: an `AutoParallel`, whose work in a step is shown if it is known; None: it is not shown.
        every: the number of steps from line to line.
        tensorboard: a folder for TensorBoard's files, or a ``SummaryWriter``, which stays open; None: none. Where
            TensorBoard is not installed, a line says so.
        samples, tokens: their numbers in the whole batch of a step; None: not shown.
        wandb: True: a new run of W&B; a dict: the same, with these arguments of ``wandb.init``; a run, which stays
            open; None: none. Where W&B is not installed, a line says so.
        out: the file of the lines; None: standard output.

    Raises:
        SettingError: an `every` that is no whole number of at least 1, or something else for `tensorboard` or `wandb`.

    Example:
        >>> with sw.Monitor(model, every=10) as monitor:
        ...     for _ in range(3):
        ...         loss = model(x, y)
        ...         monitor.step(loss)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        every: int = 10,
        tensorboard: str | Path | ScalarWriter | None = None,
        *,
        samples: float | None = None,
        tokens: float | None = None,
        wandb: bool | Mapping[str, object] | MetricRun | None = None,
        out: TextIO | None = None,
    ) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise SettingError(f"Monitor(every={every!r})", legal="a whole number of at least 1")
        check_tensorboard(tensorboard)
        check_wandb(wandb)
        self._model, self._every, self._out = model, every, out
        self._always = {"samples": samples, "tokens": tokens}
        self._speaks = rank() == 0
        found = [
            tensorboard_writer(tensorboard, self._say) if self._speaks and tensorboard is not None else None,
            wandb_writer(wandb, self._say) if self._speaks and wandb is not None and wandb is not False else None,
        ]
        self._writers = [writer for writer in found if writer is not None]
        self._sum: Tensor | None = None
        self._count = 0  # the number of losses in the sum
        self._next = 0  # the number of the next step, where none is given
        self._steps = 0
        self._done: dict[str, float] = {}  # samples and tokens since the last line
        self._since: float | None = None  # None: before the first step
        self._last = 0.0  # the time of the last call of `step` or `leave_out`
        self._waiting: list[_Line] = []
        self._work: PlanWork | None = None
        self._clock = self._new_clock()
        self._times: list[MeasuredStep] = []

    def _new_clock(self) -> WaitTimes | None:
        settings = getattr(self._model, "program_settings", None)
        if not self._speaks or not current().processes or settings is None or settings.compiled:
            return None
        clock = times_on(current().device)
        if clock is not None:
            weakref.finalize(self, clock.stop)
        return clock

    def step(
        self,
        loss: Tensor | float | None = None,
        step: int | None = None,
        *,
        samples: float | None = None,
        tokens: float | None = None,
        **scalars: float,
    ) -> None:
        """Note that a step is done, and write the lines that are due.

        Args:
            loss: its loss; the monitor does not wait for it.
            step: its number; None: one more than the last.
            samples, tokens: their numbers in the whole batch of this step; None: those that the monitor was given.
            scalars: further numbers of this step for the line and the writers (``lr=…``).
        """
        if not self._speaks:
            return
        measured = None if self._clock is None else self._clock.end()
        number = self._next if step is None else step
        self._next = number + 1
        if loss is not None:
            loss = loss.detach().float() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            self._sum = loss.clone() if self._sum is None else self._sum.add_(loss)
            self._count += 1
        self._last = now = time.perf_counter()
        if self._since is None:
            self._since = now  # the first step included planning, which counts in no rate
        else:
            self._steps += 1
            for noun, of_step in (("samples", samples), ("tokens", tokens)):
                count = self._always[noun] if of_step is None else of_step
                if count is not None:
                    self._done[noun] = self._done.get(noun, 0.0) + count
            if measured is not None:
                self._times.append(measured)
        if (number + 1) % self._every == 0:
            self._waiting.append(self._line(number, now, scalars))
            self._sum, self._count, self._steps, self._since = None, 0, 0, now
            self._done, self._times = {}, []
        self._write()
        self._measure()

    def leave_out(self, began: float | None = None) -> None:
        """Leave what has happened since the last call of `step` out of rates and times: a validation, a checkpoint.

        Args:
            began: ``time.perf_counter()`` when it began, where that was in the middle of a step, which then counts in
                no time by computation and communication; None: with the last call of `step` or of `leave_out`.

        Example:
            >>> monitor = sw.Monitor(model, every=10)
            >>> monitor.step(model(x, y))
            >>> evaluated = model(x, y)
            >>> monitor.leave_out()
        """
        if self._since is not None:
            now = time.perf_counter()
            self._since += now - (self._last if began is None else began)
            self._last = now
            if began is None:
                self._measure()
            elif self._clock is not None:
                self._clock.stop()

    def _measure(self) -> None:
        """Begin to measure the next step, where it is to be."""
        if self._clock is not None and (self._clock.every_step or (self._next + 1) % self._every == 0):
            self._clock.begin()

    def close(self, failed: bool = False) -> None:
        """Write the remaining lines, waiting for their losses, and close the writers that the monitor has opened.

        Args:
            failed: True: the run has failed, as W&B will show.
        """
        if self._clock is not None:
            self._clock.stop()
        try:
            self._write(wait=True)
        finally:
            while self._writers:
                self._writers.pop().close(failed)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close(failed=kind is not None)

    def _line(self, step: int, now: float, scalars: dict[str, float]) -> _Line:
        loss, ready = (None, None) if self._sum is None else on_host_soon(self._sum / self._count)
        plan = plan_of(self._model)
        memory = memory_figures(device_of(self._model), plan)
        ready = self._times[-1].ready if ready is None and self._times else ready
        return _Line(step, loss, self._rates(now, plan), memory, self._times, scalars, ready)

    def _rates(self, now: float, plan: Plan | PipelinePlan | None) -> list[Figure]:
        if not self._steps or self._since is None:
            return []
        if plan is not None and (self._work is None or self._work.plan is not plan):
            settings = getattr(self._model, "settings", None)
            self._work = PlanWork(plan, getattr(settings, "cluster", None) is not None)
        seconds = now - self._since
        return rate_figures(self._steps / seconds, {k: n / seconds for k, n in self._done.items()}, self._work)

    def _write(self, wait: bool = False) -> None:
        while self._waiting:
            line = self._waiting[0]
            if line.ready is not None and not line.ready.query():
                if not wait and len(self._waiting) == 1:
                    return
                line.ready.synchronize()
            self._tell(self._waiting.pop(0))

    def _tell(self, line: _Line) -> None:
        numbers = ({} if line.loss is None else {"loss": float(line.loss)}) | line.metrics
        figures = [Figure(name, value, f"{name} {value:.6g}") for name, value in numbers.items()]
        figures += [*line.rates, *time_figures(line.times), *line.memory]
        self._say("  ".join([f"step {line.step}", *(figure.text for figure in figures if figure.text)]))
        for writer in self._writers:
            writer.write({figure.tag: figure.value for figure in figures}, line.step)

    def _say(self, text: str) -> None:
        print(text, file=self._out or sys.stdout, flush=True)
