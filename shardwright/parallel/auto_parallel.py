"""`AutoParallel`: a one-device model as a parallel one, driven by the user's own loop.

It ties the rooms together: capture, plan, lower, run. Nothing happens before the first call; settings come before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import autocast
from ..capture.annotations import PipelineSettings
from ..capture.export import ModelAndLoss, Recording
from ..capture.guards import HOOKS, Guards
from ..capture.module_hooks import has_global_hooks, hooked
from ..errors import SettingError
from ..layout import Layout
from ..mixed_precision import MixedPrecision
from ..partition.local_program import MODES
from ..partition.parameter_sharding import OptimizerParallel
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile.parameter_file import ParameterStrategies
from ..planfile.plan_document import PlanDocument
from ..planning import budget_of
from ..pytree_objects import opened
from ..runtime.distributed.gradient_fusion import Accumulation, Fusion
from ..runtime.optimizer_guard import watch_steps
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.step_program import StepProgram, make_program
from ..sharded_plan import ParameterPlan, Plan
from ..torch_private import MODULE_TABLES, hooks_of, pytree
from .call_planning import CallPlanning
from .foreign_wrappers import check_inside, compile_instead, refuse_class, watch_wrapping
from .graph_cache import GraphCache
from .model_copies import Followers, copied
from .sequence_buckets import SequenceBuckets
from .whole_model import WholeModel, attribute_of_net, refuse_calls_of_parts, signed_as_net

__all__ = ["AutoParallel", "RecaptureWarning", "observed"]

#: Called with (model, args, kwargs) before a model is captured, or None.
_OBSERVER: contextvars.ContextVar[Callable | None] = contextvars.ContextVar("shardwright_observer", default=None)


@contextlib.contextmanager
def observed(observer: Callable[[AutoParallel, tuple, dict[str, Any]], None] | None) -> Iterator[None]:
    """While active, `observer` sees each call of a model that is about to be planned; what it raises ends that call."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class RecaptureWarning(UserWarning):
    """The model was called with inputs of another shape, or something that its forward reads was changed: a program is
    made for it."""


class AutoParallel(CallPlanning, nn.Module):
    """A model trained on all devices; use it as the model it wraps.

    ``state_dict``, ``parameters`` and names are those of the wrapped model. The first call captures and plans it; all
    errors in marks and settings are raised then, before anything runs, on every rank alike.

    Args:
        net: the model, written for one device. Operators may be marked with `shardwright.shard`.
        loss_fn: if given, the model is called as ``model(*inputs, target)`` and returns the loss of the whole batch,
            the same on every rank.
        parallel_mode: "stand_alone", "data_parallel", "semi_auto", or "hybrid_parallel": each rank runs the model as it
            is on its own part of the batch, parameters marked with `layerwise_parallel` are its own, and
            `shardwright.ops` in the model join the ranks. A loss outside is each rank's own, and gradients are those of
            their mean.
        on_missing_rule: "error", or "replicate": operators without a rule run whole on every device.
        save_graphs: a directory for the IR dumps of every rank; None: none are written.
        sync_batch_norm: in data_parallel, whether batch norms train by the statistics of the whole batch; otherwise
            each device's part has its own, and the running ones are averaged. In the other modes they always do.
        random: "exact": random operators give the numbers that one device gives for the same seed, under every plan.
            "fast": those of torch's own generators, others under each plan; replicas agree.
        recompute: which operators' results are dropped and computed again in the backward, besides what
            `shardwright.capture.regions` marks: a function of an operator (its ``name``, ``kind``, ``module``,
            ``source``) that says True, or "save" to keep its results in a recomputed module too, or None; or a list of
            the operators that are saved, all others being recomputed.
        parameter_broadcast: in processes, whether parameters and buffers begin with the values that they have on rank
            0; otherwise they must begin alike, and ranks that differ are named in an error.
        uneven: whether cuts may be asked for that do not divide a dim: it is padded where it is cut so, into parts of
            one length, and the padding is left out of every sum. Otherwise such a cut is an error.
        compile: whether ``torch.compile`` compiles the planned program, or the name of its backend; a process that
            plays several devices runs it operator by operator all the same, and says so.
        cluster: the devices and their links, as costs are reckoned: a `Cluster`, the name of a preset, a JSON file;
            None: see `Cluster.of`.
        memory: how much a device may hold, in the modes that search: bytes, "70GB", or "cluster" for its own.
        optimizer: what keeps state for each parameter, to reckon with its memory: "adam", "momentum", "sgd", or its
            bytes an element.
        max_programs: how many programs are kept, one for each shape of the inputs and state of the model. Beyond it the
            one that was not used for the longest time is forgotten, and made anew when it is needed.
        varying: dims of the inputs whose sizes will differ from call to call, such as (0, 1) for batch and sequence:
            the first call captures the model with symbols for them too, which takes longer, and no later one has to.
            Otherwise the second size does that. With several `buckets` they are dim 0 and that of the sequence.
        mixed_precision: a `MixedPrecision`, or what `MixedPrecision.of` takes: parameters stay as they are for the
            optimizer and checkpoints, the model computes in another type, gradients are summed in a third. None: as the
            model is.
        search_memory: by how much host memory the process may grow while it searches: bytes or text such as "2GB";
            None: half of what is free.
        search_progress: what a long search calls every few seconds; None: a line on a terminal, False: nothing; see
            `shardwright.plan`.

    Raises:
        SettingError: an unknown mode or setting.
    """

    #: What a wrapper holds besides its settings: `shardwright.verify` gives its copies everything else.
    _NOT_SETTINGS = frozenset(
        {
            *vars(nn.Module()),
            "net",
            "loss_fn",
            "save_graphs",
            "_programs",
            "_states",
            "_stored",
            "_used",
            "_warned",
            "_graphs",
            "_accumulation",
            "_kind",
            "_strategy_files",
            "_awaited",
            "_copies",
            "_whole",
            "_first_ranks",
        }
    )

    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        parallel_mode: str = "semi_auto",
        *,
        on_missing_rule: str = "error",
        save_graphs: str | Path | None = None,
        sync_batch_norm: bool = False,
        random: str = "exact",
        parameter_broadcast: bool = False,
        recompute: Any = None,
        uneven: bool = False,
        compile: bool | str = False,
        cluster: Any = None,
        memory: Any = None,
        optimizer: Any = "adam",
        max_programs: int = 64,
        varying: Sequence[int] = (),
        mixed_precision: Any = None,
        search_memory: Any = None,
        search_progress: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise SettingError(f"{net!r} is not an nn.Module", legal="a model written for one device")
        if loss_fn is not None and not callable(loss_fn):
            raise SettingError(
                f"the loss_fn {loss_fn!r} cannot be called", legal="nn.CrossEntropyLoss(), or a function"
            )
        if parallel_mode not in MODES:
            raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(MODES))
        if on_missing_rule not in ("error", "replicate"):
            raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
        if random not in ("exact", "fast"):
            raise SettingError(f"unknown random {random!r}", legal='"exact" or "fast"')
        check_inside(net)
        watch_wrapping(AutoParallel)
        if not isinstance(max_programs, int) or isinstance(max_programs, bool) or max_programs < 1:
            raise SettingError(f"max_programs={max_programs!r}", legal="a whole number of at least 1")
        if not isinstance(varying, (tuple, list)) or not all(type(d) is int and d >= 0 for d in varying):
            raise SettingError(
                f"varying={varying!r}", legal="dims of the inputs, counted from 0, such as varying=(0, 1)"
            )
        self.max_programs, self.varying = max_programs, tuple(varying)
        # The wrapper has the model's own tables of parameters, buffers and submodules, hence its names and state.
        for table in MODULE_TABLES:
            self.__dict__[table] = net.__dict__[table]
        self.__dict__["net"], self.__dict__["loss_fn"] = net, loss_fn
        self._loss_trains = isinstance(loss_fn, nn.Module)
        self.training = net.training
        self.parallel_mode, self.on_missing_rule = parallel_mode, on_missing_rule
        self.save_graphs, self.sync_batch_norm, self.random = save_graphs, bool(sync_batch_norm), random
        self._dataset_strategy: Any = "data_parallel"
        self._gradients_mean = parallel_mode in ("data_parallel", "hybrid_parallel")
        self._broadcast, self.recompute, self.uneven = bool(parameter_broadcast), recompute, bool(uneven)
        self._cluster, self._memory, self._optimizer = cluster, memory, optimizer
        self.mixed_precision = MixedPrecision.of(mixed_precision)
        budget_of(search_memory, search_progress)  # what there is not is said now
        self._search_memory, self._search_progress = search_memory, search_progress
        self.compiled = "inductor" if compile is True else compile or None
        self._fusion, self.__dict__["_accumulation"] = Fusion(), Accumulation()
        self.__dict__["_programs"], self.__dict__["_states"] = OrderedDict(), {}
        self.__dict__["_graphs"] = GraphCache()
        self._hsdp: OptimizerParallel | None = None
        self._pipeline: PipelineSettings | None = None
        self._buckets: SequenceBuckets | None = None
        self._strategies: PlanDocument | None = None
        self._parameter_strategies: ParameterStrategies | None = None
        self.__dict__["_strategy_files"] = []
        self.__dict__["_awaited"]: list[
            Callable[[], None]
        ] = []  # what loads a checkpoint's values, once there are slices
        self.__dict__["_copies"], self.__dict__["_whole"], self.__dict__["_first_ranks"] = [], None, {}
        self._stored: dict[str, Layout] | None = None
        self._used: dict[str, Layout] | None = None
        self._warned, self._kind = False, "cpu"

    # -- running ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; hooks of all modules (`register_module_forward_hook`) run with the model itself, not with
        the wrapper around it."""
        if not has_global_hooks():
            return super().__call__(*args, **kwargs)
        if hooks_of(self).backward or hooks_of(self).backward_pre:
            raise SettingError(
                "hooks in the backward of the model, beside forward hooks of all modules",
                legal="one of them, or forward hooks of the modules that are meant",
            )
        return hooked(self, self._with_global_hooks, args, kwargs, forward=True)

    def _with_global_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if self.loss_fn is None:
            return hooked(self.net, self.forward, args, kwargs, forward=True, own=False, everyones=True)
        return self.forward(*args, **kwargs)

    @signed_as_net
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, or with `loss_fn` the loss of the whole batch. The last positional argument is then
        the target.

        Raises:
            ShardwrightError: at the first call with inputs of these shapes: whatever cannot be planned.
        """
        if self._buckets is None:
            return self._between_hooks(args, kwargs)
        call = self._buckets.padded(self.net, self.loss_fn, args, kwargs, self._agreed_bucket)
        return call.cropped(self._between_hooks(call.args, call.kwargs))

    def _agreed_bucket(self, index: int) -> int:
        """The longest bucket that any process needs, where each feeds its own part of the batch."""
        runtime = self._runtime()
        if not runtime.processes or self._dataset_strategy == "full_batch" or self.parallel_mode == "stand_alone":
            return index
        from torch import distributed  # see runtime/run.py

        needed = torch.tensor(index, device=runtime.device)
        distributed.all_reduce(needed, distributed.ReduceOp.MAX)
        return int(needed)

    def _between_hooks(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call with the hooks of the outermost module around it."""
        net = self.net
        hooks = hooks_of(net)
        if hooks.forward_pre or (hooks.forward and self.loss_fn is None):
            return hooked(net, self._run, args, kwargs, forward=self.loss_fn is None, target=self.loss_fn is not None)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """A call between the model's own hooks."""
        if self._loss_trains and self.loss_fn.training is not self.training:
            self.loss_fn.train(self.training)
        if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            leaves, spec = args, len(args)  # as most calls are; the tree takes longer than all the rest here
        else:
            leaves, spec = pytree.tree_flatten(opened((args, kwargs)))
        fed = tuple(
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves
        )
        if self._whole is not None:
            raise SettingError(
                "the parallel model is called inside of whole(), where it has whole parameters",
                legal="the plain model inside: net(…) with `model.whole() as net`; model(…) after it",
            )
        feed = spec, autocast.current("cpu", self._kind), fed
        program = self._found(feed)
        if program is None:
            program = self._build(args, kwargs, self._announce(feed))
            self._keep(feed, program)
        if torch.is_autocast_enabled(self._kind):
            with torch.autocast(self._kind, enabled=False):  # the program has the casts in it
                result = program(*leaves)
        else:
            result = program(*leaves)
        if program.effects.entries:
            program.effects.play()
        return result

    def _found(self, feed: tuple) -> StepProgram | PipelineProgram | None:
        """The program of such inputs whose guards hold: one of several that differ in the model's state.

        Args:
            feed: how the inputs nest, the type of autocast, and the inputs' shapes and types.
        """
        states = self._states.get(feed)
        if states is None:
            return None
        for i, guards in enumerate(states):
            if guards.hold():
                if i:
                    states.insert(0, states.pop(i))
                key = (*feed, guards)
                self._programs.move_to_end(key)
                return self._programs[key]
        return None

    def _keep(self, feed: tuple, program: StepProgram | PipelineProgram) -> None:
        """Keep a new program, and take the values of a checkpoint that was loaded before the first call."""
        self._programs[(*feed, program.guards)] = program
        self._states.setdefault(feed, []).insert(0, program.guards)
        try:
            while self._awaited:
                self._awaited[0]()
                del self._awaited[0]
            program.guards.settle()
        except BaseException:
            self._forget((*feed, program.guards))  # nothing runs without them
            raise
        while len(self._programs) > self.max_programs:
            self._forget(next(iter(self._programs)))

    def _forget(self, key: tuple) -> None:
        """Drop a program."""
        *feed, guards = key
        del self._programs[key]
        states = self._states[tuple(feed)]
        states.remove(guards)
        if not states:
            del self._states[tuple(feed)]

    def train(self, mode: bool = True) -> AutoParallel:
        """Training or evaluation mode, for the wrapped model too."""
        super().train(mode)
        self.net.train(mode)
        return self

    def _announce(self, feed: tuple) -> str:
        """Say that the model is captured anew: once for inputs of other shapes, in one line for each change of its
        state, which is returned."""
        if not self._programs:
            return ""
        known = [key for key in self._programs if _shapes(key) != _shapes(feed) and key[3].hold()]
        if known:
            if not self._warned and not self._varying():
                self._warned = True
                warnings.warn(
                    f"inputs of shapes {_shapes(feed)} after {_shapes(known[0])}: a program is made for each shape, "
                    "which takes longest for this second one; further ones are not announced. AutoParallel(…, "
                    "varying=(0, 1)) prepares the first call for dims that vary",
                    RecaptureWarning,
                    stacklevel=8,
                )
            return ""
        states = self._states.get(feed) or [key[3] for key in reversed(self._programs)]
        change = states[0].change()
        if change is not None and not any(guards.only_mode_changed() for guards in states):
            warnings.warn(f"{change}: the model is captured and planned anew", RecaptureWarning, stacklevel=8)
        return change or ""

    def _build(
        self, args: tuple, kwargs: dict[str, Any], why: str = "", hooks_around: bool = True
    ) -> StepProgram | PipelineProgram:
        """Capture, plan and put a call on the runtime.

        Args:
            why: what has changed since it was planned before.
            hooks_around: whether the model's own hooks run around the program; otherwise they are a part of it.
        """
        observer = _OBSERVER.get()
        if observer is not None:
            observer(self, args, kwargs)
        runtime, module = self._runtime(), ModelAndLoss(self.net, self.loss_fn)
        before = self._before()
        if runtime.processes:
            refuse_calls_of_parts()
        recording = Recording(why)
        plan = self._planned(args, kwargs, module, before, recording=recording, hooks_around=hooks_around)
        followers = Followers(self) if before is None else None
        program = make_program(
            plan,
            module,
            runtime,
            before=before,
            fusion=self._fusion,
            accumulation=self._accumulation,
            broadcast=self._broadcast,
            compiled=self.compiled,
            gradients_mean=self._gradients_mean and self.loss_fn is None,
        )
        program.exact = self.random == "exact"
        around = {id(self.net): HOOKS[:2] if self.loss_fn is None else HOOKS[:1]}
        program.effects = recording.effects
        program.guards = recording.guards = Guards(
            recording.modules,
            recording.reads.values(),
            around,
            {place.identity for place in recording.effects.advanced()},
        )
        if before is None:
            watch_steps(self.net)
            self._stored = {name: parameter.storage for name, parameter in plan.parameters.items()}
            self._used = {name: parameter.layout for name, parameter in plan.parameters.items()}
            self._write_strategies(plan)
            if isinstance(plan, PipelinePlan):
                self._first_ranks.update((name, parameter.ranks.start) for name, parameter in plan.parameters.items())
            followers.follow()
        if self.save_graphs is not None:
            from ..report.ir_dump import write_dumps

            parts = runtime.processes and self.parallel_mode != "stand_alone"
            write_dumps(plan, self.save_graphs, [runtime.rank] if parts else range(plan.devices))
        return program

    def _before(self) -> StepProgram | PipelineProgram | None:
        """The model's latest program, by which its parameters are stored; None: there is none, or, in one process,
        which has them whole, parameters or submodules have been replaced since."""
        before = next(reversed(self._programs.values()), None)
        if before is None or before.held is not None or not before.guards.parts_changed():
            return before
        self._stored = self._used = None
        return None

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the latest call.

        Raises:
            SettingError: before the first call.
        """
        if not self._programs:
            raise SettingError(
                "there is no plan before the first call",
                legal="call the model once, or shardwright.plan(net, inputs, …)",
            )
        return list(self._programs.values())[-1].plan

    def infer_layout(self, *args: Any, **kwargs: Any) -> dict[str, ParameterPlan]:
        """Where each parameter and buffer lies, by name, without a step: the call is planned and does not run. No
        parameter is cut or made. Files that `save_operator_strategy_file` and `save_param_strategy_file` wait to write
        are written.

        Args:
            args, kwargs: what the model would be called with. In processes every rank calls it.

        Returns:
            By name: the whole ``shape``, the ``layout`` of its use, that of its ``storage``, ``slice(rank)`` and
            ``local_shape(rank)``.

        Raises:
            ShardwrightError: whatever cannot be planned.
        """
        before = self._before()
        plan = self._planned(args, kwargs, ModelAndLoss(self.net, self.loss_fn), before, runs=False)
        if before is None:
            self._write_strategies(plan)
        return plan.parameters

    def whole(self, rank: int | None = None) -> WholeModel:
        """The plain model, with whole parameters, for a while: ``with model.whole() as net: net.generate(…)``.

        In processes, parameters are slices (DTensors). Inside, `net` has ordinary parameters with whole values, for
        generation, evaluation, export, ``save_pretrained``; after it the sharded parameters are back, the same objects,
        so that optimizers go on. All ranks enter and leave together; in between each does what it likes. In one process
        parameters are whole already. Parameters of other stages of a pipeline are there too.

        Changed values of parameters and buffers, however they were changed, are written back at the end. A change that
        cannot
        be is an error on every rank, and then nothing is written back: new, removed or reshaped parameters, gradients,
            other
        values on other ranks. So is an error in the body, on any rank. The parallel model itself and steps of its
        optimizer are refused inside.

        Args:
            rank: the rank that gets whole parameters, where memory or a file wants one alone; None: all ranks.

        Returns:
            A context manager. Its value is the plain model, or None on ranks that have not got whole parameters.

        Raises:
            SettingError: a rank that there is not; parameters that have no values yet, or of which each rank has its
                own (`layerwise_parallel`).
        """
        return WholeModel(self, rank)

    def explain(self, name: str | None = None) -> None:
        """Print the plan as a table: every operator, where it is called, its strategy, layouts and conversions; or one
        operator: what it costs, its three best alternatives and what a step would take with each, and what holds it
            there.

        Args:
            name: of an operator, or the path of a module that calls just one.
        """
        from ..report.tables import explain

        if name is None:
            explain(self.plan)
            return
        from ..explain import explained
        from ..report.explanations import explanation

        explanation(explained(self.plan, name))

    compile = compile_instead

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoParallel:
        return copied(self, memo)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            refuse_class(value)
        super().__setattr__(name, value)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **kwargs: Any) -> Any:
        refuse_class(type(getattr(hook, "__self__", None)))  # as ``fully_shard`` begins
        return super().register_forward_pre_hook(hook, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return attribute_of_net(self, name)


def _shapes(key: tuple) -> list[tuple[int, ...]]:
    return [tuple(entry[0]) for entry in key[2] if isinstance(entry[0], torch.Size)]
