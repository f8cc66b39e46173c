"""A plan compared with one device: the same model, batch and optimizer, run both ways.

    plain      deep copies of the model in plain PyTorch; where operators draw random numbers, which the package
               generates itself, under `AutoParallel` on one device
    parallel   the same under `AutoParallel`, all ranks in this process (the local runtime, whatever the current one is)
    difference of two tensors = max |a − b| / max(|a|, |b|)

The comparison runs in float64, where anything beyond rounding shows, and in float32. A value that the model computes
in a coarser dtype all the same, and everything computed from it, gets the tolerance of that dtype: see
`value_precision`. Where the two runs differ, the first operator that differs is searched for: see `first_difference`.

Example: losses of 0.5 and 0.5 + 3e-16 differ by 6e-16 of their value, which is rounding in float64; a gradient that was
summed twice differs by one half of its larger value.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..accelerators import default_device
from ..cluster import Cluster
from ..errors import SettingError, known_keywords
from ..launch.progress import phase
from ..mixed_precision import MixedPrecision, one_device
from ..parallel.auto_parallel import AutoParallel, observed
from ..pipeline.pipeline_plan import PipelinePlan
from ..planners.planning_problem import devices_of_call
from ..process_runtime import Runtime, current, stream
from ..pytree_objects import closed, opened, with_tensors
from ..runtime.deferred_init import materialize
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.step_program import StepProgram
from ..settings import (
    KEYWORDS_ELSEWHERE,
    ClusterSetting,
    DatasetStrategy,
    Limit,
    MissingRule,
    ParallelMode,
    PipelineSetting,
    PrecisionSetting,
    decided_feeding,
)
from ..sharded_plan import Plan
from ..torch_private import pytree
from .first_difference import find_first_difference
from .node_comparison import worst
from .value_precision import Allowed
from .verify_report import Differences, FirstDifference, VerifyReport, Worst

__all__ = ["Differences", "FirstDifference", "VerifyReport", "verify", "verify_call"]

#: The largest relative difference allowed; for other dtypes: the root of their precision.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}

#: A gradient or parameter smaller than this fraction of the largest one is measured relative to that fraction. Such a
#: tensor may be nothing but rounding, as the gradient of a bias that a normalisation subtracts again.
FLOOR = 1e-2

#: Operators that compute statistics of their input, by their plain names, and the note about them in a pipeline.
_OWN_STATISTICS = ("batch_norm", "instance_norm")
_OWN_NOTE = "a batch norm that trains normalises each micro-batch by itself, which is not what one device computes"
_OVERFLOW = (
    "{}: the results on one device are not finite, those in float64 are: only float64 decides. Inputs of torch.empty "
    "hold any values"
)


@known_keywords({word: meant for word, meant in KEYWORDS_ELSEWHERE.items() if not meant.startswith("hsdp")})
def verify(
    net: nn.Module,
    inputs: tuple[object, ...] | Tensor,
    targets: object = None,
    *,
    loss_fn: Callable[..., object] | None = None,
    devices: int = 8,
    parallel_mode: ParallelMode = "semi_auto",
    steps: int = 3,
    dataset_strategy: DatasetStrategy | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    tolerances: Mapping[torch.dtype, float] | None = None,
    on_missing_rule: MissingRule = "error",
    kwargs: dict[str, object] | None = None,
    uneven: bool = False,
    cluster: ClusterSetting | None = None,
    memory: Limit | None = None,
    pipeline: PipelineSetting | None = None,
    mixed_precision: PrecisionSetting | None = None,
    cut: bool = False,
) -> VerifyReport:
    """Compare a model under a plan with the same model on one device.

    Copies of the model train for a few steps on one batch, in each dtype: in plain PyTorch, and planned for `devices`
    devices, all in this process. The model itself is not changed; parameters without values (`no_init_parameters`)
    are initialised in the copies.

    Args:
        net: the model.
        inputs: the model's inputs, whole tensors. Floating inputs take each dtype in turn, as does torch's default
            dtype while they run; other inputs stay as they are.
        targets, loss_fn: the loss, called as ``loss_fn(net(*inputs), targets)``. Without one the backward starts from
            the sum, over the floating outputs, of the mean of their squares, and `max_loss_difference` is that of the
            outputs themselves.
        devices, parallel_mode, on_missing_rule, uneven, cluster, memory: as for `shardwright.plan`. Batch norms train
            by the whole batch's statistics in every mode: the statistics of each device's part define another
            function.
        dataset_strategy: as for `shardwright.plan`. None (default): the batch as the call is handed it. A plan for all
            devices at once is handed the whole batch ("full_batch"), the training step of a process is handed the
            process's own part ("data_parallel").
        steps: the number of optimizer steps.
        optimizer: ``parameters -> optimizer``; None: SGD with a learning rate of 0.01. An optimizer that divides by
            the size of the gradient, as Adam does, turns the rounding of a gradient that should be zero into a whole
            step.
        dtypes: floating dtypes.
        tolerances: the largest relative difference allowed in a dtype; default: 1e-10 in float64, 1e-4 in float32. A
            value that depends on an operator of a coarser dtype, such as a norm that the model computes in float32,
            gets the tolerance of that dtype; the report names the operator.
        kwargs: further inputs, by name.
        pipeline: the arguments of `AutoParallel.pipeline` as a dict; None: no pipeline. The backward then starts from
            the one loss among the model's results.
        mixed_precision: as for `AutoParallel`. Both sides compute in its dtypes, from parameters of each of `dtypes`;
            the tolerance is at least the root of their precision.
        cut: True: plan with links that cost almost nothing, so that a search cuts whatever can be cut. A plan that
            cuts nothing, or sends nothing, proves nothing: see `VerifyReport.unproved`.

    Returns:
        The report: ``.ok``, ``.proved``, ``.max_loss_difference``, ``.first_difference``, ``.summary()``, …

    Raises:
        ShardwrightError: a model that cannot be planned, or an invalid setting. An error of the model itself on one
            device is raised as it is; an error of the parallel run alone is a finding, and in the report.

    Example:
        >>> sw.verify(net, (x,), y, loss_fn=loss_fn, devices=8, steps=1).ok
        True
    """
    inputs, targets = with_tensors((inputs, targets))
    args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if loss_fn is not None:
        args = (*args, targets)
    elif targets is not None:
        raise SettingError("targets without a loss_fn", legal="verify(net, inputs, targets, loss_fn=…)")
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"verify(devices={devices!r})", legal="a whole number of at least 1")
    if cut:
        cluster = Cluster.of(cluster, devices).with_free_links()

    policy = MixedPrecision.of(mixed_precision)

    def wrap(copied: nn.Module, loss: object, runtime: Runtime) -> AutoParallel:
        wrapped = _OnOneMachine(
            copied,
            loss,
            parallel_mode,
            on_missing_rule=on_missing_rule,
            sync_batch_norm=True,
            uneven=uneven,
            cluster=cluster,
            memory=memory,
            runtime=runtime,
            mixed_precision=policy,
        )
        wrapped.dataset_strategy(decided_feeding(dataset_strategy, training_step=False))
        return wrapped if pipeline is None else wrapped.pipeline(**pipeline)

    return _Verification(
        net, loss_fn, args, kwargs or {}, wrap, devices, steps, optimizer, dtypes, tolerances, policy
    ).report()


def verify_call(
    model: AutoParallel,
    args: tuple[object, ...],
    kwargs: dict[str, object] | None = None,
    *,
    devices: int | None = None,
    steps: int = 3,
    cut: bool = False,
) -> VerifyReport:
    """Verify one call of a wrapped model, with its settings. The model itself is not changed.

    Args:
        model: the wrapped model, in the local runtime.
        args, kwargs: the arguments of the call.
        devices: the number of devices; None: as many as the model would run on.
        steps: the number of steps of plain SGD.
        cut: True: plan with links that cost almost nothing, as in `verify`.

    Raises:
        SettingError: the number of devices is not known.
    """
    devices = devices or current().devices or devices_of_call(model.net, model.loss_fn, args, kwargs)

    def wrap(copied: nn.Module, loss: object, runtime: Runtime) -> AutoParallel:
        wrapped = _OnOneMachine(copied, loss, runtime=runtime)
        cluster = model.settings.cluster
        # "fast" random numbers differ from plan to plan; the statistics of each device's part do as well
        wrapped._running = replace(model.program_settings, random="exact", save_graphs=None)
        wrapped._settings = replace(
            model.settings,
            sync_batch_norm=True,
            cluster=Cluster.of(cluster, runtime.devices).with_free_links() if cut else cluster,
        )
        return wrapped

    return _Verification(
        model.net,
        model.loss_fn,
        args,
        kwargs or {},
        wrap,
        devices,
        steps,
        None,
        tuple(TOLERANCES),
        None,
        model.settings.mixed_precision,
    ).report()


class _OnOneMachine(AutoParallel):
    """A wrapper with all devices in this process, whatever the current runtime is. No files are written."""

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["runtime"] = runtime

    def _runtime(self) -> Runtime:
        return self.__dict__["runtime"]


@dataclass
class _ModelCopy:
    """A copy of the model, the loss and the inputs in one dtype.

    Attributes:
        values: (tensor of the copy, its value at the beginning in the model's dtype) of the model's whole state.
    """

    net: nn.Module
    loss_fn: Callable[..., object] | None
    args: tuple[object, ...]
    kwargs: dict[str, object]
    policy: MixedPrecision | None
    values: list[tuple[Tensor, Tensor]]

    def plain(self) -> object:
        if self.loss_fn is None:
            return one_device(self.policy, self.net, self.args, self.kwargs)
        return self.loss_fn(one_device(self.policy, self.net, self.args[:-1], self.kwargs), self.args[-1])

    def restore(self) -> None:
        """Give the tensors of the model the values that they began with, and no gradients."""
        with torch.no_grad():
            for tensor, value in self.values:
                tensor.grad = None
                tensor.copy_(value)

    def named(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Parameters and buffers by their names in a plan."""
        parts = [("", self.net)] + ([("loss_fn.", self.loss_fn)] if isinstance(self.loss_fn, nn.Module) else [])
        return (
            {prefix + name: p for prefix, part in parts for name, p in part.named_parameters()},
            {prefix + name: b for prefix, part in parts for name, b in part.named_buffers()},
        )


@dataclass
class _Run:
    """The outcome of a run: results of every step, gradients of the first, the state after the last."""

    results: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    failure: str | None = None


class _Verification:
    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., object] | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        wrap: Callable[[nn.Module, object, Runtime], AutoParallel],
        devices: int,
        steps: int,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
        dtypes: Sequence[torch.dtype],
        tolerances: Mapping[torch.dtype, float] | None,
        policy: MixedPrecision | None,
    ) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise SettingError(f"verify(steps={steps!r})", legal="a whole number of at least 1")
        self.dtypes = tuple(dtypes)
        if not self.dtypes or not all(isinstance(d, torch.dtype) and d.is_floating_point for d in self.dtypes):
            raise SettingError(f"verify(dtypes={dtypes!r})", legal="floating types, such as (torch.float64,)")
        self.net, self.loss_fn, self.args, self.kwargs, self.wrap = net, loss_fn, args, kwargs, wrap
        self.steps, self.policy = steps, policy
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
        rounded = [
            torch.finfo(d).eps ** 0.5 for d in (policy.types if policy is not None else ()) if d != torch.float64
        ]
        self.tolerances = {d: torch.finfo(d).eps ** 0.5 for d in self.dtypes} | TOLERANCES
        self.tolerances = {d: max([t, *rounded]) for d, t in self.tolerances.items()} | dict(tolerances or {})
        self.finite: dict[torch.dtype, bool] = {}  # by dtype: the results on one device are finite
        leaves = [x for x in pytree.tree_leaves(opened((args, kwargs))) if isinstance(x, Tensor)]
        device = leaves[0].device if leaves else default_device()
        self.runtime = Runtime(False, devices, 0, device)
        self.state = _values(net, loss_fn, device)

    @phase("comparison with one device")
    def report(self) -> VerifyReport:
        rows: list[Differences] = []
        notes: dict[str, None] = {}
        found: FirstDifference | None = None
        plan: Plan | PipelinePlan | None = None
        with observed(None), torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            self.random, self.stream = torch.get_rng_state(), stream.state_dict()
            try:
                for dtype in sorted(self.dtypes, key=lambda dtype: dtype != torch.float64):
                    with _default_dtype(dtype):
                        row, program, copied = self.compare(dtype, notes)
                        plan = program.plan
                        rows.append(row)
                        if found is None and (not row.ok or row.coarser) and not row.overflow:
                            # A coarse tolerance can hide a small error in the results; a comparison operator by
                            # operator finds it.
                            found = self.search(dtype, program, copied)
            finally:
                self.rewind()
        assert plan is not None
        return VerifyReport(tuple(rows), found, plan.devices, plan.mode, self.steps, tuple(notes), plan)

    def copied(self, dtype: torch.dtype) -> _ModelCopy:
        """Fresh copies of model, loss and inputs. Tensors that the model shares are shared in its copy."""

        def cast(x: Tensor) -> Tensor:
            return x.detach().to(dtype if x.is_floating_point() else x.dtype, copy=True)

        memo: dict[int, object] = {}  # by id, as `copy.deepcopy` has it; `self.state` owns the tensors
        values: list[tuple[Tensor, Tensor]] = []
        for tensor, value in self.state:
            new = cast(value)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            new.__dict__.update(vars(tensor))  # marks on a parameter hold for its copy
            memo[id(tensor)] = new
            values.append((new, value))
        try:
            net, loss_fn = copy.deepcopy((self.net, self.loss_fn), memo)
        except (TypeError, RuntimeError) as error:
            raise SettingError(
                f"the model cannot be copied: {error}", legal="a model that copy.deepcopy copies"
            ) from error
        args, kwargs = closed(pytree.tree_map_only(Tensor, cast, opened((self.args, self.kwargs))))
        return _ModelCopy(net, loss_fn, args, kwargs, self.policy, values)

    def compare(
        self, dtype: torch.dtype, notes: dict[str, None]
    ) -> tuple[Differences, StepProgram | PipelineProgram, _ModelCopy]:
        """The differences in one dtype, the program of the parallel run, and the copy that it has trained."""
        one, copied = self.copied(dtype), self.copied(dtype)
        program = self.program(copied)
        self.loss_of = _loss_of
        if isinstance(program, PipelineProgram):
            program.check()
            self.loss_of = partial(_loss_among, index=program.loss)
            if any(op.kind in _OWN_STATISTICS for op in program.plan.graph.ops):
                notes.setdefault(_OWN_NOTE)
        plain = self.train(one, self.on_one_device(one, program))
        leaves, plan = pytree.tree_leaves(opened((copied.args, copied.kwargs))), program.plan
        parallel = self.train(copied, lambda: program(*leaves), catch=True)
        finite = all(r.isfinite().all() for step in plain.results for r in step if r.is_floating_point())
        self.finite[dtype] = finite
        overflow = not finite and self.finite.get(torch.float64, False)
        if overflow:
            notes.setdefault(_OVERFLOW.format(str(dtype).removeprefix("torch.")))
        elif not finite:
            notes.setdefault("the results on one device are not finite: there is little to compare")
        if not any(g is not None for g in plain.gradients.values()):
            notes.setdefault("no parameter has a gradient: only results were compared")
        allowed = Allowed(plan.graph, dtype, self.tolerances, self.steps)
        losses = Worst(math.inf, self.tolerances[dtype])
        if len(plain.results) == len(parallel.results):
            single, reference = (
                {f"{step}.{i}": x for step, results in enumerate(run.results) for i, x in enumerate(results)}
                for run in (plain, parallel)
            )
            losses = worst(single, reference, lambda name: allowed.result(int(name.rpartition(".")[2])), allowed)
        gradients = worst(plain.gradients, parallel.gradients, allowed.of_parameter, allowed, FLOOR)
        parameters = max(
            (
                worst(getattr(plain, kind), getattr(parallel, kind), allowed.state, allowed, FLOOR)
                for kind in ("parameters", "buffers")
            ),
            key=Worst.excess,
        )
        tolerance = self.tolerances[dtype]
        row = Differences(dtype, losses, gradients, parameters, tolerance, parallel.failure, overflow)
        return row, program, copied

    def program(self, copied: _ModelCopy) -> StepProgram | PipelineProgram:
        """The program of a copy. Errors of planning are raised to the user."""
        return self.wrap(copied.net, copied.loss_fn, self.runtime)._build(
            copied.args, copied.kwargs, hooks_around=False
        )

    def on_one_device(self, one: _ModelCopy, program: StepProgram | PipelineProgram) -> Callable[[], object]:
        """The call on one device: in plain PyTorch, or, where the model draws random numbers, under a plan for one
        device."""
        if not program.plan.draws:
            return one.plain
        alone = _OnOneMachine(
            one.net, one.loss_fn, "stand_alone", runtime=replace(self.runtime, devices=1), mixed_precision=self.policy
        )
        return lambda: alone(*one.args, **one.kwargs)

    def rewind(self) -> None:
        """Restore the random state of the beginning."""
        stream.load_state_dict(self.stream)
        torch.set_rng_state(self.random)

    def train(self, copied: _ModelCopy, call: Callable[[], object], catch: bool = False) -> _Run:
        self.rewind()
        run = _Run()
        parameters, _ = copied.named()
        optimizer = self.optimizer(list(parameters.values())) if parameters else None
        try:
            for step in range(self.steps):
                result = call()
                leaves = pytree.tree_leaves(opened(result))
                run.results.append([x.detach().clone() for x in leaves if isinstance(x, Tensor)])
                loss = self.loss_of(result)
                if loss is not None and loss.requires_grad:
                    loss.backward()
                if step == 0:
                    run.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
        except Exception as error:  # a wrong program raises anything; the report names it
            if not catch or isinstance(error, MemoryError):
                raise
            run.failure = f"{type(error).__name__}: {error}"
        run.parameters, run.buffers = parameters, copied.named()[1]  # a forward may have assigned buffers
        return run

    def search(
        self, dtype: torch.dtype, program: StepProgram | PipelineProgram, trained: _ModelCopy
    ) -> FirstDifference | None:
        """Search the first step of a program, on the copy of the model that it has trained, from the beginning."""
        one, fresh = self.copied(dtype), self.copied(dtype)
        call = self.on_one_device(one, program)
        self.rewind()
        plain = call()
        trained.restore()
        parameters, buffers = trained.named()
        inputs = [x for x in pytree.tree_leaves(opened((fresh.args, fresh.kwargs))) if isinstance(x, Tensor)]
        self.rewind()
        return find_first_difference(
            program,
            parameters | buffers,
            inputs,
            plain,
            self.loss_of,
            Allowed(program.plan.graph, dtype, self.tolerances),
        )


def _values(net: nn.Module, loss_fn: object, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """(tensor, its value) of each parameter, buffer and tensor attribute. Parameters without values are initialised."""
    values: dict[Tensor, Tensor] = {}
    for part in (net, loss_fn):
        if not isinstance(part, nn.Module):
            continue

        def take(name: str, tensor: Tensor, whole: Tensor) -> None:
            values[tensor] = whole.detach().clone()  # a clone: training must not change the model

        materialize(part, take, device)
        for module in part.modules():
            for tensor in vars(module).values():
                if isinstance(tensor, Tensor):
                    values.setdefault(tensor, tensor.detach().clone())
    return list(values.items())


def _loss_of(result: object) -> Tensor | None:
    """The start of the backward: the only number of a result, else the sum of the mean squares of its floating
    tensors."""
    tensors = [x for x in pytree.tree_leaves(opened(result)) if isinstance(x, Tensor) and x.is_floating_point()]
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    squares = [x.square().mean() for x in tensors if x.numel()]
    return sum(squares[1:], squares[0]) if squares else None


def _loss_among(result: object, index: int | None) -> Tensor | None:
    """The loss of a pipeline: its result at `index`; None without one."""
    return None if index is None else pytree.tree_leaves(opened(result))[index]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
