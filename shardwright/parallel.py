"""`AutoParallel`: a one-device model as a parallel one, driven by the user's own loop.

It ties the rooms together: capture, plan, lower, run. Nothing happens before the first call; settings come before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .capture import capture
from .errors import SettingError
from .layerwise import check_held, check_mode, one_slice, own_parameters
from .layout import Layout
from .marks import stored_whole
from .ops import for_ranks
from .plan import MODES, Plan, make_plan
from .plan.document import Document
from .plan.hybrid import OwnPrograms, local_inputs
from .plan.make import optimizer_parallel
from .plan.storage import OptimizerParallel
from .recompute import with_policy
from .runtime.deferred import beginnings
from .runtime.fusion import Accumulation, Fusion, fusion_of
from .runtime.init import Runtime, current
from .runtime.optimizers import watch_steps
from .runtime.random import stream
from .runtime.run import Program, make_program
from .settling import global_inputs, implied_devices
from .trees import opened

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
    """The model was called with inputs of another shape: it is captured and planned anew for them."""


class AutoParallel(nn.Module):
    """A model trained on all devices; use it as the model it wraps.

    ``state_dict``, ``parameters`` and names are those of the wrapped model. The first call captures and plans it; all
    errors in marks and settings are raised then, before anything runs, on every rank alike.

    Args:
        net: the model, written for one device. Operators may be marked with `shardwright.shard`.
        loss_fn: if given, the model is called as ``model(*inputs, target)`` and returns the loss of the whole batch,
            the same on every rank.
        parallel_mode: "stand_alone", "data_parallel", "semi_auto", or "hybrid_parallel": each rank runs the model as it is on
            its own part of the batch, parameters marked with `layerwise_parallel` are its own, and `shardwright.ops` in the
            model join the ranks. A loss outside is each rank's own, and gradients are those of their mean.
        on_missing_rule: "error", or "replicate": operators without a rule run whole on every device.
        save_graphs: a directory for the IR dumps of every rank; None: none are written.
        sync_batch_norm: in data_parallel, whether batch norms train by the statistics of the whole batch; otherwise each
            device's part has its own, and the running ones are averaged. In the other modes they always do.
        random: "exact": random operators give the numbers that one device gives for the same seed, under every plan.
            "fast": those of torch's own generators, others under each plan; replicas agree.
        recompute: which operators' results are dropped and computed again in the backward, besides what
            `shardwright.recompute` marks: a function of an operator (its ``name``, ``kind``, ``module``, ``source``) that
            says True, or "save" to keep its results in a recomputed module too, or None; or a list of the operators
            that are saved, all others being recomputed.
        parameter_broadcast: in processes, whether parameters and buffers begin with the values that they have on rank 0;
            otherwise they must begin alike, and ranks that differ are named in an error.
        uneven: whether cuts may be asked for that do not divide a dim: it is padded where it is cut so, into parts of
            one length, and the padding is left out of every sum. Otherwise such a cut is an error.
        compile: whether ``torch.compile`` compiles the planned program, or the name of its backend; a process that plays
            several devices runs it operator by operator all the same, and says so.
        cluster: the devices and their links, as costs are reckoned: a `Cluster`, the name of a preset, a JSON file;
            None: see `Cluster.of`.
        memory: how much a device may hold, in the modes that search: bytes, "70GB", or "cluster" for its own.
        optimizer: what keeps state for each parameter, to reckon with its memory: "adam", "momentum", "sgd", or its bytes
            an element.

    Raises:
        SettingError: an unknown mode or setting.
    """

    #: What a wrapper holds besides its settings: `shardwright.verify` gives its copies everything else.
    _NOT_SETTINGS = frozenset({*vars(nn.Module()), "net", "loss_fn", "save_graphs", "_programs", "_submodules", "_stored",
                               "_used", "_warned", "_accumulation", "_kind", "_strategy_files"})

    def __init__(self, net: nn.Module, loss_fn: Callable[..., Any] | None = None, parallel_mode: str = "semi_auto", *,
                 on_missing_rule: str = "error", save_graphs: str | Path | None = None,
                 sync_batch_norm: bool = False, random: str = "exact",
                 parameter_broadcast: bool = False, recompute: Any = None, uneven: bool = False,
                 compile: bool | str = False, cluster: Any = None, memory: Any = None, optimizer: Any = "adam") -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise SettingError(f"{net!r} is not an nn.Module", legal="a model written for one device")
        if loss_fn is not None and not callable(loss_fn):
            raise SettingError(f"the loss_fn {loss_fn!r} cannot be called", legal="nn.CrossEntropyLoss(), or a function")
        if parallel_mode not in MODES:
            raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(MODES))
        if on_missing_rule not in ("error", "replicate"):
            raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
        if random not in ("exact", "fast"):
            raise SettingError(f"unknown random {random!r}", legal='"exact" or "fast"')
        # The wrapper has the model's own tables of parameters, buffers and submodules, hence its names and state.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = net.__dict__[table]
        self.__dict__["net"], self.__dict__["loss_fn"] = net, loss_fn
        self.training = net.training
        self.parallel_mode, self.on_missing_rule = parallel_mode, on_missing_rule
        self.save_graphs, self.sync_batch_norm, self.random = save_graphs, bool(sync_batch_norm), random
        self._dataset_strategy: Any = "data_parallel"
        self._gradients_mean = parallel_mode in ("data_parallel", "hybrid_parallel")
        self._broadcast, self.recompute, self.uneven = bool(parameter_broadcast), recompute, bool(uneven)
        self._cluster, self._memory, self._optimizer = cluster, memory, optimizer
        self.compiled = "inductor" if compile is True else compile or None
        self._fusion, self.__dict__["_accumulation"] = Fusion(), Accumulation()
        self.__dict__["_programs"], self.__dict__["_submodules"] = {}, None
        self._hsdp: OptimizerParallel | None = None
        self._strategies: Document | None = None
        self.__dict__["_strategy_files"] = []
        self._stored: dict[str, Layout] | None = None
        self._used: dict[str, Layout] | None = None
        self._warned, self._kind = False, "cpu"

    # -- settings ---------------------------------------------------------------------------------------------------

    def dataset_strategy(self, strategy: str | tuple) -> AutoParallel:
        """How the batch is fed.

        Args:
            strategy: "data_parallel" (default): each process feeds its own part, the whole batch is their
                concatenation in the order of the ranks. "full_batch": every process feeds the same whole batch. A
                tuple with one entry per tensor input, a tuple of cuts or a `Layout`: each feeds the slice that this
                gives it. In the local runtime the one process feeds the whole batch in every case.

        Raises:
            SettingError: after the first call, or an unknown word.
        """
        if isinstance(strategy, str) and strategy not in ("data_parallel", "full_batch"):
            raise SettingError(f"unknown dataset_strategy {strategy!r}",
                               legal='"data_parallel", "full_batch", or a tuple with one entry per tensor input')
        self._dataset_strategy = self._before_first_call("dataset_strategy", strategy)
        return self

    def enable_gradients_mean(self, enabled: bool = True) -> AutoParallel:
        """With the loss outside and each rank feeding its own part: whether gradients are those of the mean of the
        ranks' losses (True; the default of data_parallel) or of their sum. With `loss_fn` it makes no difference.

        Raises:
            SettingError: after the first call.
        """
        self._gradients_mean = self._before_first_call("enable_gradients_mean", bool(enabled))
        return self

    def parameter_broadcast(self, enabled: bool = True) -> AutoParallel:
        """In processes, whether parameters and buffers begin with the values that they have on rank 0; otherwise (the
        default) they must begin alike, and ranks that differ are named in an error. In one process it changes nothing.

        Raises:
            SettingError: after the first call.
        """
        self._broadcast = self._before_first_call("parameter_broadcast", bool(enabled))
        return self

    def comm_fusion(self, config: dict[str, Any] | None = None, *, allreduce: Any = None, openstate: bool = True
                    ) -> AutoParallel:
        """Which gradients are summed over ranks in one collective: they wait for one another, and travel while the
        backward goes on.

        Args:
            config: the arguments below as a dict.
            allreduce: ``{"mode": "auto"}`` (the default): buckets of a size that suits. ``{"mode": "size", "config":
                25}``, or 25: a bucket is full at 25 MB. ``{"mode": "index", "config": [10, 20]}``, or the list: buckets
                begin before the parameters of these indices, counted in the order of ``model.parameters()`` among those
                that are trained.
            openstate: False: each gradient by itself.

        In one process it changes nothing but what is refused.

        Raises:
            SettingError: after the first call, an unknown mode or key, or a config that does not fit the mode.
        """
        if config is not None:
            known = {"openstate", "allreduce"}
            if not isinstance(config, dict) or set(config) - known or allreduce is not None:
                raise SettingError(f"comm_fusion: unknown config {config!r}", legal='{"openstate": True, "allreduce": '
                                   '{"mode": "auto"}}: sums of gradients are what is fused')
            openstate, allreduce = config.get("openstate", openstate), config.get("allreduce")
        if not isinstance(openstate, bool):
            raise SettingError(f"comm_fusion: openstate={openstate!r}", legal="True or False")
        fusion = Fusion() if allreduce is None else fusion_of(allreduce)
        self._fusion = self._before_first_call("comm_fusion", fusion if openstate else Fusion(limit=0))
        return self

    def hsdp(self, shard_size: int = -1, threshold: float = 64, optimizer_level: str = "level1") -> AutoParallel:
        """Optimizer parallel: parameters that several devices hold alike are stored in parts, on top of what operators'
        own strategies cut; gathered before use, their gradients summed and scattered. What is computed stays the same.

        Args:
            shard_size: over how many of its replicas a parameter is cut, neighbouring ones; -1: all. The gradient is
                then summed over the rest.
            threshold: KB (1024 bytes) of the whole parameter from which on it is cut. One whose slices' dim 0 does not
                divide stays whole, and the plan says so; so does what `shardwright.no_optimizer_parallel` names.
            optimizer_level: "level1": parameters and the optimizer's state are cut; under `no_sync` gradients are held
                whole. "level2": they are cut as well. "level3": weights are not kept from the forward for the backward
                either, but gathered again. (With `compile` the compiler decides what is kept, and gradients are cut.)

        Raises:
            SettingError: after the first call, or an unknown value. At the first call: a `shard_size` that does not
                divide the replicas of a parameter.
        """
        self._hsdp = self._before_first_call("hsdp", OptimizerParallel(shard_size, threshold, optimizer_level))
        return self

    def load_operator_strategy_file(self, path: str | Path) -> AutoParallel:
        """Split operators as a plan says that was saved: each line is a mark, over what the model's own marks say.
        Operators without a line are left to the mode; where each has one, the plan is that of the file.

        Args:
            path: a file that `save_operator_strategy_file` or `Plan.save` wrote, edited or not.

        Raises:
            SettingError: after the first call, or in a mode that runs operators as they stand.
            PlanError: no such file, not a plan. At the first call: a plan for another model, other shapes or another
                number of devices, with the line.
        """
        if self.parallel_mode in ("stand_alone", "hybrid_parallel"):
            raise SettingError(f"load_operator_strategy_file: {self.parallel_mode} runs operators as they stand",
                               legal=", ".join(m for m in MODES if m not in ("stand_alone", "hybrid_parallel")))
        self._before_first_call("load_operator_strategy_file", path)
        self._strategies = Document.read(path)
        return self

    def save_operator_strategy_file(self, path: str | Path) -> AutoParallel:
        """Write the plan as a document (`Plan.save`): now, or when it is made, at the first call. In processes the
        first rank writes.

        Raises:
            SettingError: there is no such folder.
            OSError: the file cannot be written.
        """
        if not Path(path).absolute().parent.is_dir():
            raise SettingError(f"save_operator_strategy_file: there is no folder {Path(path).parent}",
                               legal="a file in a folder that is there")
        if self._programs:
            self._write_strategies(self.plan, [path])
        else:
            self._strategy_files.append(path)
        return self

    def _write_strategies(self, plan: Plan, paths: Iterable[str | Path]) -> None:
        if self._runtime().rank == 0:
            for path in paths:
                plan.save(path)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave the gradients as each rank has them; the next backward outside sums them together with
        its own, once: as cheap as one backward, and the same gradients as without.

        Between the two they are no gradients yet: an optimizer's step and ``clip_grad_norm_`` are refused (`SettingError`),
        ``zero_grad`` drops them. Sums that lie inside of the program, such as those of a cut parameter's activations, are
        taken as ever. In one process, where gradients are whole, it changes nothing.
        """
        before, self._accumulation.open = self._accumulation.open, True
        try:
            yield
        finally:
            self._accumulation.open = before

    def _before_first_call(self, name: str, value: Any) -> Any:
        if self._programs:
            raise SettingError(f"{name}() comes too late: the model has been called and planned",
                               legal=f"{name}() before the first call")
        return value

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, or with `loss_fn` the loss of the whole batch. The last positional argument is then
        the target.

        Raises:
            ShardwrightError: at the first call with inputs of these shapes: whatever cannot be planned.
        """
        if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
            leaves, spec = args, len(args)  # as most calls are; the tree takes longer than all the rest here
        else:
            leaves, spec = pytree.tree_flatten(opened((args, kwargs)))
        fed = tuple((x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves)
        program = self._programs.get((spec, self._state(), fed))
        if program is None:
            self._announce((spec, self._state(), fed))
            program = self._build(args, kwargs)
            self._programs[spec, self._state(), fed] = program  # the state of now: its parameters may be others
        if torch.is_autocast_enabled(self._kind):
            with torch.autocast(self._kind, enabled=False):  # the program has the casts in it
                return program(*leaves)
        return program(*leaves)

    def _state(self) -> tuple[tuple, ...]:
        """What of the model's state a captured program depends on: which modules train, which parameters there are and
        which of them are trained, and the type of autocast."""
        if self._submodules is None:
            self.__dict__["_submodules"] = list(self.net.modules())
        parameters = [p for m in self._submodules for p in m._parameters.values() if p is not None]
        cast = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        return (tuple([m.training for m in self._submodules]), tuple([p.requires_grad for p in parameters]),
                tuple([id(p) for p in parameters]), cast)

    def train(self, mode: bool = True) -> AutoParallel:
        """Training or evaluation mode, for the wrapped model too."""
        super().train(mode)
        self.net.train(mode)
        return self

    def _announce(self, key: tuple) -> None:
        """Say once that inputs of another shape are captured anew."""
        known = [k for k in self._programs if k[1] == key[1] and _shapes(k) != _shapes(key)]
        if known and not self._warned:
            self._warned = True
            warnings.warn(f"inputs of shapes {_shapes(key)} after {_shapes(known[0])}: the model is captured and planned "
                          "once for each shape; further ones are not announced", RecaptureWarning, stacklevel=5)

    def _build(self, args: tuple, kwargs: dict[str, Any]) -> Program:
        observer = _OBSERVER.get()
        if observer is not None:
            observer(self, args, kwargs)
        args, kwargs = opened((args, kwargs))
        runtime = self._runtime()
        self._kind = runtime.device.type
        devices = 1 if self.parallel_mode == "stand_alone" else runtime.devices
        dataset = "full_batch" if self.parallel_mode == "stand_alone" else self._dataset_strategy
        parts = runtime.processes and self.parallel_mode != "stand_alone"
        module = _Holder(self.net, self.loss_fn)
        before = next(iter(self._programs.values()), None)
        plan: Plan | Exception
        fed: list[tuple[tuple[int, ...], str]] = []
        try:
            if before is None and parts:
                from .runtime.parameters import held_layouts  # see runtime/run.py
                self._stored = held_layouts(module)
            hybrid = self.parallel_mode == "hybrid_parallel"
            check_mode(module, self.parallel_mode)
            if hybrid:
                devices = devices or 1
                check_held(module, devices, runtime.processes)
                whole_args, whole_kwargs = (args, kwargs) if parts else local_inputs(args, kwargs, devices, dataset)
            else:
                whole_args, whole_kwargs = global_inputs(args, kwargs, devices, dataset) if parts else (args, kwargs)
            fed = [(tuple(x.shape), str(x.dtype)) for x in pytree.tree_leaves((whole_args, whole_kwargs))
                   if isinstance(x, torch.Tensor)]
            self._marks_loss_training()
            self._fusion.check(sum(p.requires_grad for p in module.parameters()))
            with for_ranks(devices), one_slice(module):
                graph = capture(self.net, whole_args, whole_kwargs, loss_fn=self.loss_fn, device=runtime.device)
            devices = devices or (self._strategies.devices if self._strategies is not None
                                  else implied_devices(self.net, graph))
            plan = make_plan(with_policy(graph, self.recompute), devices, self.parallel_mode, dataset,
                             on_missing_rule=self.on_missing_rule, stored=self._stored, used=self._used,
                             sync_batch_norm=self.sync_batch_norm,
                             hsdp=optimizer_parallel(self._hsdp, self.net, self.loss_fn),
                             own=OwnPrograms(own_parameters(module), self.loss_fn is not None) if hybrid else None,
                             uneven=self.uneven, strategies=self._strategies, cluster=self._cluster, memory=self._memory,
                             optimizer=self._optimizer, whole=stored_whole(self.net, self.loss_fn))
        except Exception as error:
            if not parts:
                raise
            plan = error  # the other ranks have to hear of it
        if parts:
            from .runtime.processes import agree
            draws = isinstance(plan, Plan) and plan.routed.seed is not None
            begin = {} if before is not None or self._broadcast else beginnings(module)
            agree(plan, fed, {name: value for name, value in begin.items() if name not in own_parameters(module)},
                  (*stream.upcoming(), self.random) if draws else None, (self._fusion, self._broadcast))
        assert isinstance(plan, Plan)
        program = make_program(plan, module, runtime, before=before, fusion=self._fusion,
                               accumulation=self._accumulation, broadcast=self._broadcast, compiled=self.compiled,
                               gradients_mean=self._gradients_mean and self.loss_fn is None)
        program.exact = self.random == "exact"
        if before is None:
            watch_steps(self.net)
            self._stored = {name: parameter.storage for name, parameter in plan.parameters.items()}
            self._used = {name: parameter.layout for name, parameter in plan.parameters.items()}
            self._write_strategies(plan, self._strategy_files)
        if self.save_graphs is not None:
            ranks = [runtime.rank] if parts else range(devices)
            from .report import write_dumps
            write_dumps(plan, self.save_graphs, ranks)
        return program

    def plan_settings(self) -> dict[str, Any]:
        """What of the settings decides a plan, as `shardwright.plan` takes it."""
        return {"parallel_mode": self.parallel_mode, "dataset_strategy": self._dataset_strategy,
                "on_missing_rule": self.on_missing_rule, "sync_batch_norm": self.sync_batch_norm, "hsdp": self._hsdp,
                "recompute": self.recompute, "uneven": self.uneven, "strategies": self._strategies,
                "cluster": self._cluster, "memory": self._memory, "optimizer": self._optimizer}

    def _runtime(self) -> Runtime:
        return current()

    def _marks_loss_training(self) -> None:
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.train(self.training)

    # -- looking ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the latest shapes.

        Raises:
            SettingError: before the first call.
        """
        if not self._programs:
            raise SettingError("there is no plan before the first call",
                               legal="call the model once, or shardwright.plan(net, inputs, …)")
        return list(self._programs.values())[-1].plan

    def explain(self, name: str | None = None) -> None:
        """Print the plan as a table: every operator, where it is called, its strategy, layouts and conversions; or one
        operator: what it costs, its three best alternatives and what a step would take with each, and what holds it there.

        Args:
            name: of an operator, or the path of a module that calls just one.
        """
        from .report import explain
        if name is None:
            explain(self.plan)
            return
        from .plan.explain import explained
        from .report.explained import explanation
        explanation(explained(self.plan, name))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["net"], name)


class _Holder(nn.Module):
    """The wrapped model and its loss under the names that a captured graph uses."""

    def __init__(self, net: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.__dict__["tables"] = [("", net)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])

    def named_parameters(self, *args: Any, **kwargs: Any):  # type: ignore[override]
        for prefix, module in self.tables:
            for name, tensor in module.named_parameters(*args, **kwargs):
                yield prefix + name, tensor

    def modules(self):  # type: ignore[override]
        for _, module in self.tables:
            yield from module.modules()

    def named_buffers(self, *args: Any, **kwargs: Any):  # type: ignore[override]
        for prefix, module in self.tables:
            for name, tensor in module.named_buffers(*args, **kwargs):
                yield prefix + name, tensor


def _shapes(key: tuple) -> list[tuple[int, ...]]:
    return [tuple(entry[0]) for entry in key[2] if isinstance(entry[0], torch.Size)]
