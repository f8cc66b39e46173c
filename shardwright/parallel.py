"""`AutoParallel`: a one-device model as a parallel one, driven by the user's own loop.

It ties the rooms together: capture, plan, lower, run. Nothing happens before the first call; settings come before it.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .capture import capture
from .errors import SettingError
from .layout import Layout, digits_size
from .graph import Graph, Op
from .marks import marked_operators
from .plan import MODES, Plan, make_plan
from .rules import bound_rule, find_rule
from .runtime.deferred import beginnings
from .runtime.init import Runtime, current
from .runtime.run import Program, make_program

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
        parallel_mode: "stand_alone", "data_parallel" or "semi_auto".
        on_missing_rule: "error", or "replicate": operators without a rule run whole on every device.
        save_graphs: a directory for the IR dumps of every rank; None: none are written.

    Raises:
        SettingError: an unknown mode or setting.
    """

    #: What a wrapper holds besides its settings: `shardwright.verify` gives its copies everything else.
    _NOT_SETTINGS = frozenset({*vars(nn.Module()), "net", "loss_fn", "save_graphs", "_programs", "_submodules", "_stored",
                               "_warned"})

    def __init__(self, net: nn.Module, loss_fn: Callable[..., Any] | None = None, parallel_mode: str = "semi_auto", *,
                 on_missing_rule: str = "error", save_graphs: str | Path | None = None) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise SettingError(f"{net!r} is not an nn.Module", legal="a model written for one device")
        if loss_fn is not None and not callable(loss_fn):
            raise SettingError(f"the loss_fn {loss_fn!r} cannot be called", legal="nn.CrossEntropyLoss(), or a function")
        if parallel_mode not in MODES:
            raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(MODES))
        if on_missing_rule not in ("error", "replicate"):
            raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
        # The wrapper has the model's own tables of parameters, buffers and submodules, hence its names and state.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = net.__dict__[table]
        self.__dict__["net"], self.__dict__["loss_fn"] = net, loss_fn
        self.training = net.training
        self.parallel_mode, self.on_missing_rule = parallel_mode, on_missing_rule
        self.save_graphs = save_graphs
        self._dataset_strategy: Any = "data_parallel"
        self._gradients_mean = parallel_mode == "data_parallel"
        self.__dict__["_programs"], self.__dict__["_submodules"] = {}, None
        self._stored: dict[str, Layout] | None = None
        self._warned = False

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
            leaves, spec = pytree.tree_flatten((args, kwargs))
        fed = tuple((x.shape, x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves)
        program = self._programs.get((spec, self._state(), fed))
        if program is None:
            self._announce((spec, self._state(), fed))
            program = self._build(args, kwargs)
            self._programs[spec, self._state(), fed] = program  # the state of now: its parameters may be others
        return program(*leaves)

    def _state(self) -> tuple[tuple, ...]:
        """What of the model's state a captured program depends on: which modules train, which parameters there are and
        which of them are trained."""
        if self._submodules is None:
            self.__dict__["_submodules"] = list(self.net.modules())
        parameters = [p for m in self._submodules for p in m._parameters.values() if p is not None]
        return (tuple([m.training for m in self._submodules]), tuple([p.requires_grad for p in parameters]),
                tuple([id(p) for p in parameters]))

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
        runtime = self._runtime()
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
            whole_args, whole_kwargs = global_inputs(args, kwargs, devices, dataset) if parts else (args, kwargs)
            fed = [(tuple(x.shape), str(x.dtype)) for x in pytree.tree_leaves((whole_args, whole_kwargs))
                   if isinstance(x, torch.Tensor)]
            self._marks_loss_training()
            graph = capture(self.net, whole_args, whole_kwargs, loss_fn=self.loss_fn, device=runtime.device)
            devices = devices or implied_devices(self.net, graph)
            plan = make_plan(graph, devices, self.parallel_mode, dataset, on_missing_rule=self.on_missing_rule,
                             stored=self._stored)
        except Exception as error:
            if not parts:
                raise
            plan = error  # the other ranks have to hear of it
        if parts:
            from .runtime.processes import agree
            agree(plan, fed, {} if before is not None else beginnings(module))
        assert isinstance(plan, Plan)
        program = make_program(plan, module, runtime, before=before,
                               gradients_mean=self._gradients_mean and self.loss_fn is None)
        if before is None:
            self._stored = {name: parameter.storage for name, parameter in plan.parameters.items()}
        if self.save_graphs is not None:
            ranks = [runtime.rank] if parts else range(devices)
            from .report import write_dumps
            write_dumps(plan, self.save_graphs, ranks)
        return program

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

    def explain(self) -> None:
        """Print the plan as a table: every operator, where it is called, its strategy, layouts and conversions."""
        from .report import explain
        explain(self.plan)

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


def implied_devices(net: nn.Module, graph: Graph | None = None) -> int:
    """How many devices the marks of a model speak of: the least number that all of them fit.

    Args:
        graph: of a call of the model. Without it the cuts of one tensor are counted together, not those of an operator.

    Raises:
        SettingError: nothing is marked.
    """
    counts = [1 for _ in marked_operators(net)]
    for operator in marked_operators(net):
        for strategy in (operator.in_strategy, operator.out_strategy):
            for entry in strategy if isinstance(strategy, (tuple, list)) else ():
                counts.append(entry.devices if isinstance(entry, Layout) else _product(entry))
    counts += [_devices_of(op) for op in (graph.ops if graph is not None else ()) if op.mark is not None]
    if not counts:
        raise SettingError("how many devices? No launcher says, nor does a mark of the model",
                           legal="shardwright.init(devices=8), or `shardwright run --devices 8`")
    return math.lcm(*counts)


def _product(cuts: Any) -> int:
    return math.prod(c for c in cuts if isinstance(c, int) and c > 0) if isinstance(cuts, (tuple, list)) else 1


def _devices_of(op: Op) -> int:
    """The number of devices that the tuples of a mark cut for: their product over the operator's factors."""
    described, cuts = find_rule(op), {}
    if described is not None and isinstance(op.mark.in_strategy, (tuple, list)):
        inputs = bound_rule(op, described).inputs
        for place, entry in zip(op.mark.order, op.mark.in_strategy):
            if isinstance(entry, (tuple, list)):
                cuts.update((dim[0], cut) for dim, cut in zip(inputs[place], entry) if len(dim) == 1)
    return _product(tuple(cuts.values()))


def global_inputs(args: tuple, kwargs: dict[str, Any], devices: int, dataset: Any) -> tuple[tuple, dict[str, Any]]:
    """What a process feeds, as meta tensors of the whole batch's shapes."""
    if dataset == "full_batch":
        return args, kwargs
    tensors = iter(range(1_000_000))

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index, shape = next(tensors), list(leaf.shape)
        if dataset == "data_parallel":
            cuts = (devices,) + (1,) * (len(shape) - 1) if shape else ()
        elif isinstance(dataset, (tuple, list)) and index < len(dataset):
            entry = dataset[index]
            cuts = tuple(map(digits_size, entry.dims or ())) if isinstance(entry, Layout) else entry
        else:
            cuts = (1,) * len(shape)
        if not isinstance(cuts, (tuple, list)) or len(cuts) != len(shape) or not all(isinstance(c, int) for c in cuts):
            cuts = (1,) * len(shape)  # the planner says what is wrong with it
        return torch.empty([s * c for s, c in zip(shape, cuts)], dtype=leaf.dtype, device="meta",
                           requires_grad=leaf.requires_grad)
    return pytree.tree_map(whole, (args, kwargs))
