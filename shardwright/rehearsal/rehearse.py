"""One rank of a plan, played alone: real kernels on the rank's real shapes, beside ranks that are not there.

1. The rank (`rehearse`).

    process group    torch's "fake" one, of the plan's size: collectives take no time, or are slept for
    tensors          parameters, buffers and inputs of the rank's shapes, drawn at random; the optimizer's state as the
                     plan counts it
    program          the one that the rank would run (`runtime.step_program.make_program`), each operator measured
    a step           the forward and the backward of all micro-batches; no step of the optimizer

   The plan's file is enough: it has the graph. Example: one GPU plays rank 37 of a plan for 1,024.

2. Seconds (`OperatorClock`), in the forward and in the backward.

    forward          around each call of a local operator
    backward         around each function of autograd that the call has made; a call that recomputes counts here too

   A span is exclusive: an operator that is recomputed inside another one's backward is taken off from that. On the CPU
   the clock is the process's; on an accelerator spans lie between two events of its stream, which are read after the
   step. What is in no span (copies of redistributions, sums of gradients, autograd itself) is the rest of the step.

3. Bytes (`most_allocated`), at any moment of a step.

    accelerator      the allocator's own count
    CPU              the memory of all tensors that are alive, counted after each operator; what an operator holds only
                     while it runs is not seen
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..cluster import Cluster
from ..cost.communication_schedule import Fusion
from ..cost.cost_model import CostModel
from ..cost.memory_timeline import optimizer_bytes, trained_parameters
from ..errors import PlanError, SettingError
from ..launch.device_choice import accelerator_count, asked_device
from ..launch.progress import phase
from ..layout import Layout
from ..partition.local_program import LocalOp
from ..partition.padded_dims import true_slice
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile import load_plan
from ..process_runtime import Runtime, playing, stream
from ..pytree_objects import opened
from ..report.format import size_text
from ..report.operator_names import OperatorNames
from ..rules.random_numbers.counter_rng import PLAIN
from ..runtime.distributed.dtensors import beginning, to_dtensor
from ..runtime.distributed.parameters import ShardedState
from ..runtime.optimizer_guard import Accumulation
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.profile_ranges import around_backward
from ..runtime.step_program import make_program
from ..sharded_plan import Plan
from ..solver.search_memory import free_memory
from ..torch_private import TorchDispatchMode, backward_number, local_tensor, pytree, storage_id
from .rehearsal_report import OperatorSeconds, Rehearsal, folded
from .simulated_ranks import AbsentStages, DrawnValues, NamedGroups, Slept, alone
from .step_in_time import promised_seconds, step_of

__all__ = ["OperatorClock", "memory_of", "most_allocated", "rehearse"]

# -- measurement


@dataclass
class _Span:
    operator: str
    half: str
    start: Any  # seconds, or an event of the device
    stop: Any = None
    inside: list[_Span] = field(default_factory=list)


class OperatorClock:
    """Measures the operators of programs on one device.

    Args:
        device: on which the operators run.

    Attributes:
        runs: True while spans are recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.runs = False
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._open: list[_Span] = []
        self._spans: list[_Span] = []

    def timed(self, instruction: LocalOp) -> Callable[..., object]:
        """The function of a local operator, which measures itself."""
        target, operator = PLAIN.get(instruction.target, instruction.target), instruction.operator

        def call(*args: object, **kwargs: object) -> object:
            if not self.runs:
                return target(*args, **kwargs)
            span = self._begin(operator, "forward" if backward_number() == -1 else "backward")
            try:
                made = target(*args, **kwargs)
            finally:
                self._end(span)
            around_backward(made, (args, kwargs), lambda: self._begin_back(operator), self._end)
            return made

        call.__name__ = f"timed_{instruction.op.kind}"
        # With the attributes of the overload: the lowering asks its schema how many results there are.
        return functools.update_wrapper(call, instruction.target, assigned=())

    def _begin_back(self, operator: str) -> _Span | None:
        return self._begin(operator, "backward") if self.runs else None

    def _begin(self, operator: str, half: str) -> _Span:
        span = _Span(operator, half, self._now())
        (self._open[-1].inside if self._open else self._spans).append(span)
        self._open.append(span)
        return span

    def _end(self, span: _Span) -> None:
        span.stop = self._now()
        while self._open and self._open.pop() is not span:
            pass

    def _now(self) -> object:
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the device."""
        if self._module is not None:
            self._module.synchronize()

    def step(self, play: Callable[[], None]) -> tuple[float, dict[tuple[str, str], float]]:
        """Play one step.

        Returns:
            The seconds of the step, and those of each (operator, "forward" or "backward") that ran.
        """
        self._open.clear()
        self._spans.clear()
        self.wait()
        self.runs, start = True, time.perf_counter()
        try:
            play()
            self.wait()
        finally:
            self.runs = False
        seconds = time.perf_counter() - start
        out: dict[tuple[str, str], float] = {}
        for span in _all(self._spans):
            alone = self._seconds(span) - sum(map(self._seconds, span.inside))
            out[span.operator, span.half] = out.get((span.operator, span.half), 0.0) + max(0.0, alone)
        self._spans.clear()
        return seconds, out

    def _seconds(self, span: _Span) -> float:
        if span.stop is None:  # an error came between
            return 0.0
        return span.stop - span.start if self._module is None else span.start.elapsed_time(span.stop) / 1e3


def _all(spans: list[_Span]) -> Iterator[_Span]:
    for span in spans:
        yield span
        yield from _all(span.inside)


class _Alive(TorchDispatchMode):
    """The memory of the tensors that operators have seen or made, and that are still alive."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}
        for x in standing:
            self._note(x)
        self.peak = self._now()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # a DTensor: the operators on its slice come here again
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x)
        self.peak = max(self.peak, self._now())
        return result

    def _note(self, x: Tensor) -> None:
        if x.is_meta or isinstance(x, DTensor):
            return
        storage = x.untyped_storage()
        self._memory.setdefault(storage_id(storage), (StorageWeakRef(storage), storage.nbytes()))

    def _now(self) -> int:
        self._memory = {key: (ref, size) for key, (ref, size) in self._memory.items() if not ref.expired()}
        return sum(size for _, size in self._memory.values())


def most_allocated(play: Callable[[], None], standing: Iterable[Tensor], device: torch.device) -> int:
    """The most bytes held while `play` runs.

    Args:
        play: runs once.
        standing: the tensors that are there before. Other tensors from before are counted on an accelerator alone.
        device: on which they are.
    """
    if device.type == "cpu":
        with _Alive(local_tensor(x) if isinstance(x, DTensor) else x for x in standing) as alive:
            play()
        return alive.peak
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats(device)
    play()
    module.synchronize()
    return module.max_memory_allocated(device)


def memory_of(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cpu":
        return free_memory()
    return float(torch.get_device_module(device).mem_get_info(device)[0])


# -- the rank


@phase("rehearsal")
def rehearse(
    plan: Plan | PipelinePlan | str | Path,
    *,
    rank: int = 0,
    device: torch.device | str | None = None,
    steps: int = 3,
    links: bool = False,
    force: bool = False,
) -> Rehearsal:
    """Play one rank of a plan on one device, and compare seconds and memory with what the plan promises.

    Args:
        plan: the plan, or the path of its file; for any number of devices.
        rank: the rank.
        device: the device that plays it; None: the accelerator, or the CPU where there is none.
        steps: the number of steps that are measured, after one that is not.
        links: True: each collective and each message between stages takes as long as the plan's cost model says, by
            itself. False: they take no time.
        force: True: play also where the plan promises to need more memory than is free.

    Returns:
        The report: ``.summary()``, ``.operators``, ``.peak``, …

    Raises:
        PlanError: a rank outside of the plan; a file that is no plan, or has no graph.
        SettingError: no such device; too little memory; a process that is in a process group; a model with layers
            that are parallel by hand, of whose collectives a plan knows nothing.

    Example:
        >>> print(sw.rehearse(plan, rank=1, steps=1).summary())
        rank 1 of 8, played on the ...
        peak memory ...
        ...
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise SettingError(f"rehearse(steps={steps!r})", legal="a whole number of at least 1")
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    if not isinstance(plan, (Plan, PipelinePlan)):
        raise SettingError(f"rehearse(plan={plan!r})", legal="a plan, or the path of its file")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < plan.devices:
        raise PlanError(
            f"rank {rank} is outside the {plan.devices} devices of the plan", legal=f"0 to {plan.devices - 1}"
        )
    for one in _plans(plan, rank):
        if one.own is not None:
            raise SettingError(
                "the model has layers that are parallel by hand, of whose collectives a plan knows nothing",
                legal="a model without sw.layerwise_parallel",
            )
    where = asked_device(device, "rehearse") or _default_device()
    promised, free = _promised_peak(plan, rank), memory_of(where)
    if promised > free and not force:
        raise SettingError(
            f"the plan promises to need {size_text(promised)} on rank {rank}, and {where} has {size_text(free)} free",
            legal="another device, or force=True (--force)",
        )
    before = stream.state_dict()
    devices = [where] if where.type != "cpu" else []
    with (
        alone(rank, plan.devices),
        playing(Runtime(True, plan.devices, rank, where, watch=False)),
        torch.random.fork_rng(devices, device_type=where.type if devices else "cuda"),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        flushed = torch.set_flush_denormal(True)  # what no rank has sent is any number
        try:
            return _Rehearsed(plan, rank, where, links).report(steps)
        except torch.OutOfMemoryError as error:
            raise SettingError(
                f"{where} has too little memory for rank {rank}: {str(error).splitlines()[0]}",
                legal=f"a device with more than {size_text(promised)} free",
            ) from error
        finally:
            if flushed:
                torch.set_flush_denormal(False)
            stream.load_state_dict(before)


def _default_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if accelerator_count() else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def _plans(plan: Plan | PipelinePlan, rank: int) -> list[Plan]:
    """The plans of the programs that a rank runs: of its stages, or the plan itself."""
    return [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.of_rank(rank)]


def _promised_peak(plan: Plan | PipelinePlan, rank: int) -> float:
    if isinstance(plan, Plan):
        return plan.peak
    return plan.simulation.peak(plan.schedule.placement[plan.of_rank(rank)[0].number])


class _DrawnState(ShardedState):
    """The state of a rank whose parameters are drawn as slices: no whole tensor is made."""

    def __init__(self, holder: Any, groups: NamedGroups) -> None:
        self.holder, self.groups, self.absent = holder, groups, {}
        self.buffers = dict(holder.named_buffers())

    def take_buffers(self, holder: object, device: torch.device) -> None:
        """Nothing: the buffers are those that were drawn."""


class _Rehearsed:
    """A rank's program and its tensors.

    Args:
        plan: the plan.
        rank: in the world.
        device: on which it runs.
        links: True where messages take time.
    """

    def __init__(self, plan: Plan | PipelinePlan, rank: int, device: torch.device, links: bool) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.plans = _plans(plan, rank)
        self.clock = OperatorClock(device)
        counts = [] if isinstance(plan, Plan) else [s.counts.graph for s in plan.of_rank(rank) if s.counts is not None]
        self.values = DrawnValues([plan.graph, *(one.graph for one in self.plans), *counts], device)
        first, size = (0, plan.devices) if isinstance(plan, Plan) else _ranks(plan, rank)
        self.groups = NamedGroups(size, rank - first, first)
        costs = CostModel(Cluster.of(plan.cluster, plan.devices), plan.devices)
        self.slept = Slept(costs, self.groups, self.clock.wait) if links else None
        self.parameters = dict(self._parameters())
        self.buffers = dict(self._buffers())
        self.state = [torch.empty(size, dtype=torch.uint8, device=device) for size in self._state_bytes()]
        holder: Any = SimpleNamespace(
            named_parameters=lambda: self.parameters.items(), named_buffers=lambda: self.buffers.items()
        )
        self.program = make_program(
            self._timed_plan(),
            holder,
            Runtime(True, plan.devices, rank, device, watch=False),
            gradients_mean=False,
            before=SimpleNamespace(sharded=_DrawnState(holder, self.groups)),  # type: ignore[arg-type]
            fusion=Fusion(),
            accumulation=Accumulation(),
        )
        self.program.begin = None
        if isinstance(self.program, PipelineProgram):
            assert isinstance(plan, PipelinePlan)
            joined = self.program.link.joined  # type: ignore[attr-defined]
            self.program.link = AbsentStages(plan, rank, self.values, joined, self.slept)
        self.inputs = list(self._inputs())

    # -- tensors --

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for plan in self.plans:
            for name, placed in plan.program.parameters.items():
                shape, layout = plan.parameters[name].shape, plan.parameters[name].storage
                local = self.values.parameter(layout.local_shape(layout.padded(shape)), placed.value.stored.dtype)
                part = true_slice(layout, shape, self.groups.rank)
                slice_ = beginning(local, torch.Size(s.stop - s.start for s in part))
                local_tensor = (
                    slice_
                    if plan.devices == 1 and self.plan is plan
                    else to_dtensor(slice_, layout, shape, self.groups)
                )
                yield name, nn.Parameter(local_tensor, requires_grad=placed.value.requires_grad)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        counts = [] if isinstance(self.plan, Plan) else [stage.counts for stage in self.plan.of_rank(self.rank)]
        for plan in (*self.plans, *(one for one in counts if one is not None)):
            for name, placed in plan.program.buffers.items():
                yield name, self.values.buffer(placed.value, placed.local_shape)

    def _state_bytes(self) -> Iterator[int]:
        """The bytes of the optimizer's state for each parameter."""
        each = optimizer_bytes(self.plan.optimizer)
        for plan in self.plans:
            trained = trained_parameters(plan.program, plan.backward)
            for placed in plan.program.parameters.values():
                if placed.name in trained and each:
                    yield int(placed.local_bytes // placed.value.dtype.itemsize * each)

    def _inputs(self) -> Iterator[Tensor]:
        if isinstance(self.plan, Plan):
            for placed in self.plan.program.inputs:
                yield self.values.draw(placed.value, placed.local_shape)
            return
        plan, count = self.plan, self.plan.micro_batches
        names = [v.name for v in plan.graph.inputs]
        layouts: dict[int, Layout] = {}
        for stage in plan.of_rank(self.rank):
            entries = list(zip(stage.sources, stage.plan.input_placement.inputs))
            layouts |= {source.index: layout for source, layout in entries if source.kind == "input"}
            if stage.counts is not None:
                counted = zip(stage.counts.graph.inputs, stage.counts.input_placement.inputs)
                layouts |= {names.index(value.name): layout for value, layout in counted}
        for i, (value, split) in enumerate(zip(plan.graph.inputs, plan.split)):
            shape = list(value.shape if i not in layouts else layouts[i].local_shape(value.shape))
            if split:
                shape[0] *= count
            # An input that only other stages read takes no memory.
            zeros = torch.zeros((), dtype=value.dtype, device=self.device).expand(shape)
            yield self.values.draw(value, shape) if i in layouts else zeros

    # -- the program --

    def _timed_plan(self) -> Plan | PipelinePlan:
        """The plan with operators that measure themselves, and constants that have values."""
        if isinstance(self.plan, Plan):
            return self._timed(self.plan)
        mine = {stage.number for stage in self.plan.of_rank(self.rank)}
        stages = tuple(
            replace(
                stage,
                plan=self._timed(stage.plan),
                counts=None if stage.counts is None else self._with_constants(stage.counts),
            )
            if stage.number in mine
            else stage
            for stage in self.plan.stages
        )
        return replace(self.plan, stages=stages)

    def _timed(self, plan: Plan) -> Plan:
        instructions = tuple(
            replace(i, target=self.clock.timed(i)) if isinstance(i, LocalOp) else i for i in plan.program.instructions
        )
        made = self._with_constants(plan)
        vars(made).update(
            program=replace(plan.program, instructions=instructions),
            regions=plan.regions,
            schedule=plan.schedule,
            stage_schedule=plan.stage_schedule,
        )
        return made

    def _with_constants(self, plan: Plan) -> Plan:
        placed = plan.program.constants
        constants = {name: self.values.buffer(placed[name].value, x.shape) for name, x in plan.graph.constants.items()}
        return replace(plan, graph=replace(plan.graph, constants=constants))

    # -- a step --

    def step(self) -> None:
        """The forward and the backward of one step."""
        results = pytree.tree_leaves(opened(self.program(*self.inputs)))
        made = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        del results
        if made:
            torch.autograd.backward(made, [None if not x.dim() else torch.ones_like(x) for x in made])

    def forget(self) -> None:
        """Let the gradients go."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def report(self, steps: int) -> Rehearsal:
        """Play one step, then `steps` measured ones, then two for the memory."""
        self.step()
        seconds, slept, each = [], [], []
        for _ in range(steps):
            self.forget()
            before = 0.0 if self.slept is None else self.slept.seconds
            if self.slept is None:
                total, operators = self.clock.step(self.step)
            else:
                with self.slept:
                    total, operators = self.clock.step(self.step)
            seconds.append(total)
            each.append(operators)
            slept.append(0.0 if self.slept is None else self.slept.seconds - before)
        self.forget()
        standing = [*self.parameters.values(), *self.buffers.values(), *self.state, *self.inputs, *self._constants()]
        if self.slept is not None and isinstance(self.program, PipelineProgram):
            self.program.link.slept = None  # type: ignore[attr-defined]
        peak = most_allocated(self.step, standing, self.device)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        accumulating = most_allocated(self.step, [*standing, *gradients], self.device)
        return self._reported(seconds, slept, each, peak, accumulating)

    def _constants(self) -> list[Tensor]:
        plan = self.program.plan
        plans = [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.of_rank(self.rank)]
        return [x for one in plans for x in one.graph.constants.values()]

    def _reported(
        self,
        seconds: Sequence[float],
        slept: Sequence[float],
        each: Sequence[dict[tuple[str, str], float]],
        peak: int,
        accumulating: int,
    ) -> Rehearsal:
        plan = self.plan
        micro = 1 if isinstance(plan, Plan) else plan.micro_batches
        promised = promised_seconds(self.plans, micro)
        of = lambda name, half: median(one.get((name, half), 0.0) for one in each)
        operators = tuple(
            OperatorSeconds(
                name,
                of(name, "forward"),
                of(name, "backward"),
                promised.get((name, "forward"), 0.0),
                promised.get((name, "backward"), 0.0),
            )
            for name in dict.fromkeys(name for name, _ in promised)
        )
        prices = [CostModel(Cluster.of(p.cluster, p.devices), p.devices).plan(p, micro) for p in self.plans]
        stages = () if isinstance(plan, Plan) else tuple(stage.number for stage in plan.of_rank(self.rank))
        played = {(o.operator, "forward"): o.forward for o in operators}
        played |= {(o.operator, "backward"): o.backward for o in operators}
        in_time, promised_in_time = step_of(plan, self.rank, played), step_of(plan, self.rank)
        rests = [
            total - sleeping - sum(one.values()) for total, sleeping, one in zip(seconds, slept, each, strict=True)
        ]
        return Rehearsal(
            self.rank,
            plan.devices,
            stages,
            _name(self.device),
            Cluster.of(plan.cluster, plan.devices).name,
            len(seconds),
            operators,
            median(seconds),
            plan.cost,
            max(0.0, median(rests)),
            sum(price.communication for price in prices),
            *(in_time.exposed, promised_in_time.exposed),
            *(in_time.waiting, promised_in_time.waiting),
            *(in_time.elapsed, promised_in_time.elapsed),
            None if self.slept is None else median(slept),
            peak,
            accumulating,
            _promised_peak(plan, self.rank),
            folded(operators, OperatorNames(plan)),
        )


def _ranks(plan: PipelinePlan, rank: int) -> tuple[int, int]:
    """The first rank of a rank's stage, and how many it has."""
    stage = plan.of_rank(rank)[0]
    return stage.first, stage.devices


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"the CPU, {torch.get_num_threads()} threads"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"
