"""`AutoParallel`: a one-device model as a parallel one, driven by the user's own training loop.

The first call captures the model, plans it, lowers the plan and runs it. Later calls run the program that was built:

1. the inputs' structure, shapes, dtypes and the autocast type select the programs built for such inputs
   (`program_cache`);
2. the guards of a program hold: the program runs;
3. no guards hold: the model is captured and planned anew (`_build`). `_announce` warns of it, but for a mere change
   between training and evaluation.

Settings are methods that are called before the first call (`setting_methods`); planning of one call is
`call_planning.CallPlanning`.

Example: a first call with x [32, 16] builds a program. A call with x [64, 16] builds a second one, with a
`RecaptureWarning`. A third call, with x [32, 16] again, runs the first program.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import autocast
from ..capture.annotations import note_planned
from ..capture.conditions import check_layouts
from ..capture.export import Recording
from ..capture.guards import HOOKS, Guards
from ..capture.model_device import TensorTable, check_inputs, check_values, place_of
from ..capture.module_calls import FunctionOfModels, ModelAndLoss, has_global_hooks, hooked
from ..errors import SettingError, known_keywords
from ..garbage_collection import gc_paused, roomy_stack
from ..layout import Layout
from ..pipeline.pipeline_plan import PipelinePlan
from ..pytree_objects import opened, with_tensors
from ..runtime.compared_parameters import compared
from ..runtime.compilation import Compilation
from ..runtime.deferred_init import optimizer_finder
from ..runtime.distributed.requested_gradients import requested
from ..runtime.optimizer_guard import Accumulation, expect_first_call, watch_steps
from ..runtime.pipeline_step import PipelineProgram
from ..runtime.saved_tensors import hooks_aside
from ..runtime.step_program import StepProgram, make_program
from ..settings import (
    ClusterSetting,
    CompileSetting,
    Limit,
    MissingRule,
    OptimizerState,
    ParallelMode,
    PrecisionSetting,
    RandomNumbers,
    RecomputePolicy,
    Settings,
    decided_feeding,
)
from ..sharded_plan import Plan
from ..solver.search_memory import SearchProgress
from ..torch_private import MODULE_TABLES, hooks_of, pytree, transforms
from .foreign_wrappers import check_inside, compile_instead, refuse_class, watch_wrapping
from .forwarded_attributes import assigned, attribute_of_net, deleted, signed_as_net
from .graph_cache import GraphCache
from .model_copies import Followers, copied
from .program_cache import ProgramCache, RecaptureWarning
from .setting_methods import MODEL_KEYWORDS, ProgramSettings
from .train_step import StepFunction
from .value_and_grad import called_in_transform
from .whole_model import WholeModel, refuse_calls_of_parts

__all__ = ["AutoParallel", "RecaptureWarning", "observed"]

#: Called with (model, args, kwargs) before a model is captured, or None.
_OBSERVER: contextvars.ContextVar[Callable[..., object] | None] = contextvars.ContextVar(
    "shardwright_observer", default=None
)


@contextlib.contextmanager
def observed(observer: Callable[[AutoParallel, tuple[object, ...], dict[str, object]], None] | None) -> Iterator[None]:
    """Call `observer` before each planning of a model inside the ``with`` block; an exception of the observer ends
    that call.

    Args:
        observer: called with (model, args, kwargs); None: no observer.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class AutoParallel(ProgramCache, nn.Module):
    """A model trained on all devices, used like the model that it wraps.

    ``state_dict``, ``parameters`` and names are those of the wrapped model. An attribute that is not the wrapper's own
    is read from the model, written to it and deleted from it: ``model.beta = 5.0`` sets that of the model. The first
    call captures and plans the model; all errors in marks and settings are raised at that call, before anything runs,
    on every rank alike.

    A step function may stand in the place of the model: the user's Python for one step, written for one device. Calls
    of the wrapper then run the function, in which the models that it calls are parallel (`train_step`).

        step = sw.AutoParallel(train_step)      # def train_step(x, y): loss = loss_fn(net(x), y); loss.backward(); …
        loss = step(x, y)

    Args:
        model: the model, written for one device (also by the keyword `net`). Operators may be marked with
            `shardwright.shard`. Or a step function; its models are those that it refers to by variables.
        loss_fn: if given, the model is called as ``model(*inputs, target)`` and returns the loss of the whole batch,
            the same on every rank.
        parallel_mode: "stand_alone": one device. "data_parallel": the batch is cut, parameters are whole. "semi_auto":
            marked operators as marked, the others along the batch. "sharding_propagation": operators follow a few
            marks, and cost decides between conflicting demands. "recursive_programming": a quick search over all
            operators, one digit of the ranks at a time. "dynamic_programming": a search over all operators and digits
            at once, with a bound on the best plan. "hybrid_parallel": each rank runs the unchanged model on its part
            of the batch; parameters marked with `layerwise_parallel` differ from rank to rank, and `shardwright.ops`
            in the model communicate. A loss outside the model is each rank's own, and gradients are those of the mean.
        net: beside a step function: its models, where they are not to be found: a model, a list, or a dict by names.
        on_missing_rule: "error", or "replicate": operators without a rule run whole on every device.
        save_graphs: a directory for the IR dumps of every rank; None: none are written.
        sync_batch_norm: in data_parallel, True: batch norms train by the statistics of the whole batch. False: each
            device uses the statistics of its own part, and the running statistics are averaged. The other modes
            always use the whole batch.
        random: "exact": random operators give the numbers that one device gives for the same seed, under every plan.
            "fast": random operators use torch's own generators and give other numbers under each plan; replicas
            agree. An attention with dropout then keeps torch's fused kernel.
        recompute: the operators whose results are recomputed in the backward, in addition to those that
            `shardwright.capture.regions` marks: a function of an operator (its ``name``, ``kind``, ``module``,
            ``source``) that returns True (recompute), "save" (save the results even in a recomputed module) or None;
            or a list of the operators that are saved, all others being recomputed.
        parameter_broadcast: in processes, True: parameters and buffers begin with the values of rank 0. False: all
            ranks must begin with equal values; ranks that differ are named in an error.
        uneven: True: a strategy may cut a dim that it does not divide. The dim is padded, so that all parts have one
            length, and the padding is left out of every sum. False: such a cut is an error.
        compile: True: ``torch.compile`` compiles the planned program; a text: the same, with the backend of that
            name; a dict: with its arguments "backend", "mode" and "options", such as {"mode": "max-autotune"}. A
            process that plays several devices warns and runs the program operator by operator. On NCCL and HCCL the
            program sums gradients itself, in every backward, also under `no_sync`. Masks of dropout outside of
            attention are exact there under either `random`.
        cluster: the devices and their links, which the cost model uses: a `Cluster`, the name of a preset, a JSON
            file; None: see `Cluster.of`.
        memory: the memory limit of a device, in the modes that search: bytes, "70GB", or "cluster" for the device's
            own memory.
        optimizer: the optimizer whose state counts in each device's memory: "adam", "momentum", "sgd", or bytes of
            state an element. None: `explain` and `plan.memory` count the optimizer that holds the parameters, and a
            search within `memory` counts as for Adam.
        max_programs: the number of programs that are kept, one for each set of input shapes and state of the model.
            The least recently used program is dropped first, and built anew when it is needed.
        varying: dims of the inputs whose sizes differ from call to call, such as (0, 1) for batch and sequence: no
            `RecaptureWarning` announces them. With several `buckets` dim 0 and the sequence dim are such dims.
        mixed_precision: a `MixedPrecision`, or an argument of `MixedPrecision.of`: optimizer and checkpoints see
            parameters of their own dtype, the model computes in a second dtype, gradients are summed in a third.
            None: dtypes as the model has them.
        comm_memory: bytes by which messages under way may raise the peak of a device's memory: weights that are
            gathered ahead of their use, gradients that are being sent. Bytes or text such as "2GB"; 0: the peak stays
            as it is, so that messages are under way at other moments alone; None: twice the weights and gradients of
            the largest block, and at least the largest bucket of sums. On Gloo nothing is under way but sums of
            gradients.
        search_memory: the host memory by which the process may grow during the search: bytes or text such as "2GB";
            None: half of the free memory, and at most 3 GB.
        search_progress: a function that a long search calls every few seconds; None: capture, prices and search show
            how far they are; False: they do not; see `shardwright.plan` and `shardwright.quiet`.

    Raises:
        SettingError: an unknown mode or setting; a step function without a model, or with a `loss_fn` that belongs to
            none of its models.

    Example:
        >>> model = sw.AutoParallel(net, loss_fn, parallel_mode="data_parallel").dataset_strategy("full_batch")
        >>> loss = model(x, y)
        >>> loss.backward()
        >>> tuple(net[0].weight.grad.shape)
        (32, 16)
    """

    @known_keywords(MODEL_KEYWORDS)
    def __init__(
        self,
        model: nn.Module | Callable[..., object] | None = None,
        /,
        loss_fn: Callable[..., object] | None = None,
        parallel_mode: ParallelMode = "semi_auto",
        *,
        net: object = None,
        on_missing_rule: MissingRule = "error",
        save_graphs: str | Path | None = None,
        sync_batch_norm: bool = False,
        random: RandomNumbers = "exact",
        parameter_broadcast: bool = False,
        recompute: RecomputePolicy | None = None,
        uneven: bool = False,
        compile: bool | str | Callable[..., object] | CompileSetting = False,
        cluster: ClusterSetting | None = None,
        memory: Limit | None = None,
        optimizer: OptimizerState | None = None,
        max_programs: int = 64,
        varying: Sequence[int] = (),
        mixed_precision: PrecisionSetting | None = None,
        comm_memory: Limit | None = None,
        search_memory: Limit | None = None,
        search_progress: Callable[[SearchProgress], object] | bool | None = None,
    ) -> None:
        super().__init__()
        step, net = self._step_and_net(model, net, loss_fn is not None)
        if loss_fn is not None and not callable(loss_fn):
            raise SettingError(
                f"the loss_fn {loss_fn!r} cannot be called", legal="nn.CrossEntropyLoss(), or a function"
            )
        self._settings = Settings.of(
            parallel_mode=parallel_mode,
            dataset_strategy=decided_feeding(None, training_step=True),
            on_missing_rule=on_missing_rule,
            sync_batch_norm=bool(sync_batch_norm),
            recompute=recompute,
            uneven=bool(uneven),
            cluster=cluster,
            memory=memory,
            optimizer=optimizer,
            mixed_precision=mixed_precision,
            comm_memory=comm_memory,
            search_memory=search_memory,
            search_progress=search_progress,
        )
        self._running = ProgramSettings(
            save_graphs=save_graphs,
            random=random,
            parameter_broadcast=bool(parameter_broadcast),
            gradients_mean=step is not None or parallel_mode in ("data_parallel", "hybrid_parallel"),
            compiled=Compilation.of(compile),
            max_programs=max_programs,
            varying=tuple(varying) if isinstance(varying, Sequence) else varying,
        )
        check_inside(net)
        watch_wrapping(AutoParallel)
        # The wrapper has the model's own tables of parameters, buffers and submodules, hence its names and state.
        for table in MODULE_TABLES:
            self.__dict__[table] = net.__dict__[table]
        self.__dict__["loss_fn"], self.__dict__["_step"], self.__dict__["_entry"] = loss_fn, step, None
        self._loss_trains = isinstance(loss_fn, nn.Module)
        self.training = net.training
        self.__dict__["_accumulation"] = Accumulation()
        self.__dict__["_programs"], self.__dict__["_states"] = OrderedDict(), {}
        self.__dict__["_graphs"] = GraphCache()
        self.__dict__["_strategy_files"] = []
        self.__dict__["_awaited"] = []  # functions that load a checkpoint after the first plan
        self.__dict__["_copies"], self.__dict__["_whole"], self.__dict__["_first_ranks"] = [], None, {}
        self._place: tuple[TensorTable, str, torch.device] | None = None
        self._where, self._stays = torch.device("cpu"), True
        self._stored: dict[str, Layout] | None = None
        self._used: dict[str, Layout] | None = None
        self._warned, self._kind, self._number_changes = False, "cpu", Counter()
        self.__dict__["net"] = net  # from here on, attributes that are not those above are the model's
        self._note_parameters()
        requested(self)
        compared(self)
        expect_first_call(net)
        if step is not None and step.apart:
            del self.__dict__["net"]
            step.begin(self.with_same_settings)

    @classmethod
    def _step_and_net(cls, model: object, net: object, has_loss: bool) -> tuple[StepFunction | None, nn.Module]:
        """The step function or None, and the model."""
        if isinstance(model, nn.Module) and net is not None:
            raise SettingError(
                "a model and net=: which of them?", legal="AutoParallel(net), or AutoParallel(step, net=…)"
            )
        if model is None or isinstance(model, nn.Module):
            alone = net if model is None else model
            if not isinstance(alone, nn.Module):
                raise SettingError(f"{alone!r} is not an nn.Module", legal="a model written for one device")
            for path, module in alone.named_modules():
                if isinstance(module, AutoParallel):
                    raise SettingError(
                        f"the module {path!r} of the model is an AutoParallel"
                        if path
                        else "the model is wrapped twice: it is an AutoParallel already",
                        legal="AutoParallel once, around the whole plain model (model.net of a wrapped one)",
                    )
            return None, alone
        step = StepFunction(model, net, has_loss, AutoParallel)
        return step, step.net

    @property
    def models(self) -> dict[str, AutoParallel]:
        """Name -> the wrapper that plans it: of each model that a step function calls by itself, else of all of them
        together. The names of models that are planned together are joined by "+"."""
        step = self._step
        if step is None or not step.apart:
            return {"+".join(step.models) if step is not None else "net": self}
        return {"+".join(names): cast("AutoParallel", part) for names, part in step.parts.items()}

    def with_same_settings(self, net: nn.Module) -> AutoParallel:
        """A wrapper of another model of the same step, with the settings of this one."""
        made = AutoParallel(net)
        made._settings, made._running = self._settings, self._running
        made.__dict__["_accumulation"] = self._accumulation
        return made

    @property
    def in_processes(self) -> bool:
        """True where several processes train the model together."""
        return self._runtime().processes and self.parallel_mode != "stand_alone"

    @property
    def leaves_unsummed(self) -> bool:
        """True under `no_sync`."""
        return bool(self._accumulation.open)

    @property
    def parallel_mode(self) -> str:
        """The mode that decides strategies."""
        return self._settings.parallel_mode

    @property
    def settings(self) -> Settings:
        """The settings that decide the model's plans."""
        return self._settings

    @property
    def program_settings(self) -> ProgramSettings:
        """The settings that decide how its plans run."""
        return self._running

    # -- running ----------------------------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> Any:  # what the wrapped model returns
        """Call the step function, or the model like any module."""
        return self.call_model(*args, **kwargs) if self._step is None else self._step.run(self, args, kwargs)

    def call_model(self, *args: object, **kwargs: object) -> object:
        """Call the model. Global hooks (`register_module_forward_hook`) run with the wrapped model, not with the
        wrapper."""
        if transforms():
            return called_in_transform(
                ModelAndLoss(self.net, self.loss_fn), self._own_parameters, self.call_model, args, kwargs
            )
        if not has_global_hooks():
            return super().__call__(*args, **kwargs)
        if hooks_of(self).backward or hooks_of(self).backward_pre:
            raise SettingError(
                "hooks in the backward of the model, beside forward hooks of all modules",
                legal="one of them, or forward hooks of the modules that are meant",
            )
        return hooked(self, self._with_global_hooks, args, kwargs, forward=True)

    def call_function(self, entry: FunctionOfModels, *args: object, **kwargs: object) -> object:
        """Call a function of the wrapped models as one program, which has parameters in common with the model's."""
        with self._entered(entry):
            return self.call_model(*args, **kwargs)

    def _with_global_hooks(self, *args: object, **kwargs: object) -> object:
        if self.loss_fn is None:
            return hooked(self.net, self.forward, args, kwargs, forward=True, hooks_of_net=False, everyones=True)
        return self.forward(*args, **kwargs)

    @signed_as_net
    def forward(self, *args: object, **kwargs: object) -> object:
        """The model's outputs, or with `loss_fn` the loss of the whole batch; the last positional argument is then
        the target. numpy arrays are taken for tensors, its numbers for Python's.

        Raises:
            ShardwrightError: at the first call with inputs of these shapes: whatever cannot be planned.
        """
        if kwargs or not all(isinstance(x, torch.Tensor) for x in args):
            args, kwargs = with_tensors((args, kwargs))
        if self._running.buckets is None:
            return self._between_hooks(args, kwargs)
        call = self._running.buckets.padded(self.net, self.loss_fn, args, kwargs, self._agreed_bucket)
        return call.cropped(self._between_hooks(call.args, call.kwargs))

    def _between_hooks(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a call with the hooks of the outermost module around it."""
        net = self.net
        hooks = hooks_of(net)
        if hooks.forward_pre or (hooks.forward and self.loss_fn is None):
            return hooked(net, self._run, args, kwargs, forward=self.loss_fn is None, target=self.loss_fn is not None)
        return self._run(*args, **kwargs)

    def _run(self, *args: object, **kwargs: object) -> object:
        """Run a call between the model's own hooks."""
        if self._loss_trains and isinstance(self.loss_fn, nn.Module) and self.loss_fn.training is not self.training:
            self.loss_fn.train(self.training)
        if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            leaves, spec = args, len(args)  # the usual call: flattening a tree would take most of the time here
        else:
            leaves, spec = pytree.tree_flatten(opened((args, kwargs)))
        signature = tuple(
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves
        )
        if self._whole is not None:
            raise SettingError(
                "the parallel model is called inside of whole(), where it has whole parameters",
                legal="the plain model inside: net(…) with `model.whole() as net`; model(…) after it",
            )
        if self._programs:
            self._check_place(leaves)
        if not self._programs:
            self._runtime_of(args, kwargs)  # finds out whose autocast it is
        feed = spec, (autocast.current("cpu", self._kind), self._entry), signature
        program = self._found(feed)
        if program is None:
            with hooks_aside():
                program = self._build(args, kwargs, self._announce(feed))
            self._keep(feed, program)
        if program.strides.line or program.plan.graph.changed:
            self._check_layouts(program, leaves)
        if torch.is_autocast_enabled(self._kind):
            with torch.autocast(self._kind, enabled=False):  # the program contains the casts
                result = program(*leaves)
        else:
            result = program(*leaves)
        if program.effects.entries:
            program.effects.play()
        return result

    def _check_place(self, leaves: Sequence[object]) -> None:
        """Look where the model is at a call after the first one. In one process a model that was moved is planned
        anew.

        Raises:
            SettingError: a model that was moved from the device of the process; in one process, an input elsewhere.
        """
        if self._place is not None:
            table, name, device = self._place
            tensor = table.get(name)
            now = device if tensor is None else tensor.device
            if now != device:
                runtime = self._runtime()
                if runtime.processes or runtime.chosen:
                    message = f"the model was moved after its first call: {name} is on {now}, and this process computes"
                    legal = f'model.to("{device}"), or shardwright.init(device="{now.type}") before the first call'
                    raise self._heard(SettingError(f"{message} on {device}", legal=legal))
                for key in list(self._programs):
                    self._forget(key)
                return
        for x in leaves:
            if isinstance(x, torch.Tensor) and x.device != self._where:
                check_values(leaves, self._heard)
                if self._stays:
                    check_inputs(self._where, leaves)
                break

    def _check_layouts(self, program: StepProgram | PipelineProgram, leaves: Sequence[object]) -> None:
        try:
            check_layouts(leaves, program.strides, program.plan.graph.changed)
        except SettingError as error:
            raise self._heard(error) from None

    def train(self, mode: bool = True) -> AutoParallel:
        """Set training or evaluation mode, for the wrapped model too."""
        super().train(mode)
        for model in [self.net] if self._step is None else self._step.models.values():
            model.train(mode)
        return self

    @roomy_stack
    @gc_paused()
    def _build(
        self, args: tuple[object, ...], kwargs: dict[str, object], why: str = "", hooks_around: bool = True
    ) -> StepProgram | PipelineProgram:
        """Capture a call, plan it and build its program.

        Args:
            why: the change of the model's state since the last plan.
            hooks_around: True: the model's own hooks run around the program. False: they are captured into the
                program.
        """
        if (observer := _OBSERVER.get()) is not None:
            observer(self, args, kwargs)
        runtime, module = self._runtime_of(args, kwargs), ModelAndLoss(self.net, self.loss_fn)
        before = self._before()
        if runtime.processes:
            refuse_calls_of_parts()
        recording = Recording(why)
        plan = self._planned(args, kwargs, module, before, recording=recording, hooks_around=hooks_around)
        find = optimizer_finder(part for _, part in module.tables)
        for one in [plan] if isinstance(plan, Plan) else [stage.plan for stage in plan.stages]:
            one.count_optimizer(find)
        if before is None and runtime.processes and isinstance(plan, PipelinePlan):
            from ..runtime.distributed.parameters import check_stages  # noqa: PLC0415  imports DTensor

            check_stages(module, plan)
        followers = Followers(self) if before is None else None
        program = make_program(
            plan,
            module,
            runtime,
            before=before,
            fusion=self._running.fusion,
            accumulation=self._accumulation,
            broadcast=self._running.parameter_broadcast,
            compiled=self._running.compiled,
            gradients_mean=self._running.gradients_mean and self.loss_fn is None,
        )
        around = {self.net: HOOKS[:2] if self.loss_fn is None else HOOKS[:1]}
        assert recording.effects is not None
        program.exact, program.effects = self._running.random == "exact", recording.effects
        program.guards = recording.guards = Guards(
            recording.modules,
            recording.reads.values(),
            around,
            {place.identity for place in recording.effects.advanced()},
            recording.conditions,
            next((earlier.guards for earlier in reversed(self._programs.values())), None),
        )
        program.strides = recording.strides
        for _, part in module.tables:
            note_planned(self, part, recording.operators)
        self._place, self._where = place_of(module), runtime.device
        self._stays = not runtime.processes and not runtime.chosen
        if before is None:
            if runtime.processes:
                from ..runtime.distributed.parameters import note_plan  # noqa: PLC0415  imports DTensor

                note_plan(module, plan)
            self._note_parameters()
            watch_steps(self.net)
            self._stored = {name: parameter.storage for name, parameter in plan.parameters.items()}
            self._used = {name: parameter.layout for name, parameter in plan.parameters.items()}
            self._write_strategies(plan)
            if isinstance(plan, PipelinePlan):
                self._first_ranks.update((name, parameter.ranks.start) for name, parameter in plan.parameters.items())
            assert followers is not None
            followers.follow()
        if self._running.save_graphs is not None:
            from ..report.ir_dump import write_dumps  # noqa: PLC0415  needed only when dumps are written

            parts = runtime.processes and self._settings.parallel_mode != "stand_alone"
            write_dumps(plan, self._running.save_graphs, [runtime.rank] if parts else range(plan.devices))
        return program

    # -- inspection -------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan of the latest call.

        Raises:
            SettingError: before the first call; a step function with several models, each of which has a plan.
        """
        self._check_together("plan")
        if not self._programs:
            raise SettingError(
                "there is no plan before the first call",
                legal="call the model once, or shardwright.plan(net, inputs, …)",
            )
        return list(self._programs.values())[-1].plan

    def whole(self, rank: int | None = None) -> WholeModel:
        """The plain model with whole parameters, inside a ``with`` block: ``with model.whole() as net:
        net.generate(…)``.

        In processes, parameters are slices (DTensors). Inside the block, `net` has ordinary parameters with whole
        values, for generation, evaluation, export, ``save_pretrained``; after the block the sharded parameters are
        back, the same objects, so that optimizers go on. All ranks enter and leave the block together; inside it each
        rank runs what it likes. In one process parameters are whole already. Parameters of other pipeline stages are
        included.

        Changed values of parameters and buffers, however they were changed, are written back at the end. A change
        that cannot be written back is an error on every rank, and then nothing is written back: new, removed or
        reshaped parameters, gradients, values that differ between ranks. An error in the body, on any rank, has the
        same effect. The parallel model itself and steps of its optimizer are refused inside.

        Args:
            rank: the rank that gets whole parameters, where memory or a file wants one rank alone; None: all ranks.

        Returns:
            A context manager. Its value is the plain model, or None on ranks that do not get whole parameters.

        Raises:
            SettingError: no such rank; parameters that have no values yet, or that differ from rank to rank by design
                (`layerwise_parallel`).
        """
        self._check_together("whole")
        return WholeModel(self, rank)

    def explain(self, name: str | None = None) -> None:
        """Print the plan as a table: every operator, its call site, its strategy, layouts and redistributions; equal
        layers once. With a name, print the operators of that module; of one operator its cost, its three best
        alternatives, the time of a step with each, and the reasons that hold its strategy.

        Args:
            name: an operator or a module: its name, its path, or the end of the path, such as ``q_proj``.
        """
        self.plan.explain(name)

    # -- steps with several models

    def _check_together(self, name: str) -> None:
        """Refuse what belongs to one of the models of a step that calls them by themselves."""
        if self._step is not None and self._step.apart:
            raise SettingError(
                f"{name}: the step calls its models {', '.join(self._step.models)} by themselves, and each has a plan",
                legal=f"in place of the step, {' or '.join(f'step.models[{model!r}]' for model in self.models)}",
            )

    def _parts(self) -> list[AutoParallel]:
        return [] if self._step is None else [cast("AutoParallel", part) for part in self._step.parts.values()]

    compile = compile_instead

    def __deepcopy__(self, memo: dict[int, object]) -> AutoParallel:
        made = cast("AutoParallel", copied(self, memo))
        requested(made)
        compared(made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:  # any attribute of the wrapped model
        if not assigned(self, name, value):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if not deleted(self, name):
            super().__delattr__(name)

    def register_forward_pre_hook(
        self, hook: Callable[..., object], *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        refuse_class(type(getattr(hook, "__self__", None)))  # the first thing that ``fully_shard`` does to a module
        return super().register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def __getattr__(self, name: str) -> Any:  # any attribute of the wrapped model
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "net":  # a step whose models have wrappers of their own has none itself
                self._check_together(name)
                raise
            return attribute_of_net(self, name)
