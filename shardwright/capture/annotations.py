"""The user's marks on a model: strategies of single operators, recomputation, ZeRO/FSDP sharding, pipeline stages.

1. `shard` and `recompute` wrap an operator, or an `nn.Module` that is one operator. On one device the mark does
   nothing. During a capture the mark surrounds the operator with identity nodes, which name the operator in the graph
   and are stripped there.

2. `no_optimizer_parallel` leaves a parameter out of ZeRO/FSDP sharding (optimizer parallel).

3. `PipelineSettings` holds the setting of a pipeline; `set_stage` and `stage_config` give the stage of each module.

4. A mark that is given after the plan would change nothing. So `note_planned` records the modules and operators of each
   planned model, and their marks are refused until `forget_planned`.

Example: ``net.mm = shard(torch.matmul, ((2, 1), (1, 4)))`` on 8 devices cuts dim 0 of the first input 2 ways and dim 1
of the second one 4 ways. The operator is called "mm" in the plan.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from types import FrameType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from ..errors import SettingError, place_text
from ..graph import map_leaves
from ..identity_tables import IdentityMap
from ..torch_private import parameter_table
from .regions import ATTRIBUTE, RecomputeSettings, region
from .source_lines import stack_level

__all__ = [
    "CUT",
    "MARK",
    "Operator",
    "PipelineSettings",
    "be_elsewhere",
    "check_not_planned",
    "collect_marks",
    "forget_planned",
    "is_collecting",
    "mark_names",
    "no_optimizer_parallel",
    "note_planned",
    "pipelining",
    "set_stage",
    "shard",
    "staged_modules",
    "stored_whole",
    "warn_of_ignored_stages",
    "whole_shape",
]

ModuleT = TypeVar("ModuleT", bound=nn.Module)
StoredT = TypeVar("StoredT", bound="nn.Parameter | nn.Module")

#: Attribute of a parameter that `no_optimizer_parallel` has marked.
_STORED_WHOLE = "_shardwright_stored_whole"

#: Calls of marked operators seen by the current capture; None outside of a capture.
_CALLS: contextvars.ContextVar[list[Operator] | None] = contextvars.ContextVar("shardwright_marks", default=None)


@torch.library.custom_op("shardwright::mark", mutates_args=())
def mark(x: torch.Tensor, call: int, place: int) -> torch.Tensor:
    """Identity: `place` counts the tensor inputs of marked call number `call`; -1 marks an output of the call."""
    return x.clone()


@mark.register_fake
def _(x: torch.Tensor, call: int, place: int) -> torch.Tensor:
    return torch.empty_like(x)


mark.register_autograd(lambda ctx, grad: (grad, None, None))
MARK = torch.ops.shardwright.mark.default


@contextlib.contextmanager
def collect_marks() -> Iterator[list[Operator]]:
    """Let calls of marked operators leave mark nodes, while the context is active.

    Yields:
        The marked operators, by call number.
    """
    calls: list[Operator] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def is_collecting() -> bool:
    """True while a model is captured."""
    return _CALLS.get() is not None


def _user_line() -> str:
    """``file.py:41`` of the nearest caller outside this package and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("shardwright.", "torch.")) and module not in ("shardwright", "torch"):
            return place_text(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


class Operator:
    """One operator that may carry a strategy; called in place of the function that it wraps.

    Args:
        function: a function of tensors that is one operator, such as ``torch.matmul``.

    Attributes:
        in_strategy: one entry per tensor input, a tuple of cuts or a `Layout`; None: not marked.
        out_strategy: the same for the outputs, or None.
        priority: the order of marks in sharding_propagation: unmarked neighbours follow the lowest number first.
        source: the line that gave the strategy.
        recomputed: the settings given by `recompute`, or None.

    Example:
        >>> product = sw.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))
        >>> product.in_strategy
        ((2, 4), (4, 1))
        >>> torch.equal(product(x, net[0].weight.T), x @ net[0].weight.T)  # outside of a plan: the function itself
        True
    """

    def __init__(self, function: Callable[..., object]) -> None:
        if not callable(function):
            raise SettingError(f"{function!r} is not an operator", legal="a function such as torch.matmul")
        self.function = function
        self.in_strategy: tuple[object, ...] | None = None
        self.out_strategy: tuple[object, ...] | None = None
        self.priority = 0
        self.source = _user_line()
        self.recomputed: RecomputeSettings | None = None

    def shard(
        self,
        in_strategy: tuple[object, ...] | None = None,
        out_strategy: tuple[object, ...] | None = None,
        priority: int = 0,
    ) -> Operator:
        """Set the strategy of the operator; the last call before the first step holds.

        Args:
            in_strategy: one entry per tensor input: a tuple with the number of parts of each dim, or a `Layout`.
            out_strategy: one entry per output; without it a partial sum is completed by an all-reduce.
            priority: as of `shardwright.shard`.

        Returns:
            The operator itself. The strategy is checked against the operator when the model is planned.

        Raises:
            SettingError: a priority that is not a whole number from 0; the model has been planned.
        """
        check_not_planned("shard()", self)
        source = _user_line()
        if not isinstance(priority, int) or isinstance(priority, bool) or priority < 0:
            raise SettingError(
                f"priority={priority!r}",
                source=source,
                operator=getattr(self.function, "__name__", repr(self.function)),
                legal="a whole number from 0; marks of lower numbers go first",
            )
        self.in_strategy, self.out_strategy, self.priority = in_strategy, out_strategy, priority
        self.source = source
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:  # the result of any function
        calls = _CALLS.get()
        if calls is None:
            return self.function(*args, **kwargs)
        number, (args, kwargs) = self._enter(calls, args, kwargs)
        with region(self.recomputed, self):
            return _leave(number, self.function(*args, **kwargs))

    def _enter(
        self, calls: list[Operator], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[int, tuple[tuple[object, ...], dict[str, object]]]:
        number, place = len(calls), iter(range(1_000_000))
        calls.append(self)
        return number, map_leaves(
            lambda x: MARK(x, number, next(place)) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Operator:
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update((k, copy.deepcopy(v, memo)) for k, v in vars(self).items() if k != "function")
        try:
            new.function = copy.deepcopy(self.function, memo)
        except TypeError:  # an operator of torch.library cannot be copied, and need not be
            new.function = self.function
        return new

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"Operator({name}, in_strategy={self.in_strategy}, out_strategy={self.out_strategy})"

    def _repr_html_(self) -> str:
        # By name: tables are a layer above marks.
        name = getattr(self.function, "__name__", repr(self.function))
        html: str = import_module("..report.html_report", __package__).mark_html(self, name)
        return html


def _leave(number: int, result: object) -> object:
    return map_leaves(lambda x: MARK(x, number, -1) if isinstance(x, torch.Tensor) else x, result)


class _ModuleMark(Operator):
    """The mark of a module: hooks around the forward of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module))
        self._number = -1
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        calls = _CALLS.get()
        if calls is None:
            return None
        self._number, changed = self._enter(calls, args, kwargs)
        return changed

    def _after(self, module: nn.Module, args: tuple[object, ...], result: object) -> object:
        return None if _CALLS.get() is None else _leave(self._number, result)


@overload
def shard(  # type: ignore[overload-overlap]  # a module is callable too
    operator: ModuleT,
    in_strategy: tuple[object, ...] | None = None,
    out_strategy: tuple[object, ...] | None = None,
    priority: int = 0,
) -> ModuleT: ...


@overload
def shard(
    operator: Callable[..., object],
    in_strategy: tuple[object, ...] | None = None,
    out_strategy: tuple[object, ...] | None = None,
    priority: int = 0,
) -> Operator: ...


def shard(
    operator: Callable[..., object] | nn.Module,
    in_strategy: tuple[object, ...] | None = None,
    out_strategy: tuple[object, ...] | None = None,
    priority: int = 0,
) -> object:
    """Mark how one operator is split.

    Args:
        operator: a function that is one operator (``torch.matmul``), or an `nn.Module` that is one (``nn.Linear``).
        in_strategy: one entry per tensor input, in call order (for a module: its inputs, then its weight and bias): a
            tuple with the number of parts of each dim, or a `Layout`. Where a module has views around its operator, the
            strategy applies to the shapes that the operator sees.
        out_strategy: one entry per output, likewise. None: a partial sum is completed by an all-reduce, and the output
            keeps the remaining cuts.
        priority: read by the mode sharding_propagation alone. Unmarked operators follow marks of the lowest number
            first. Where two marks ask one operator for different cuts, the mark of the lower number wins at any cost,
            and the notes of the plan name the loser. Among marks of one number the cheaper cut is taken.

    Returns:
        For a function an `Operator`, to be called in its place; for a module the module itself, with a method
            ``shard(in_strategy, out_strategy, priority)`` that replaces the mark.

    Raises:
        SettingError: `operator` is neither a function nor a module, or the priority is not a whole number from 0; the
            model has been planned. Strategies are checked when the model is planned.

    Example:
        >>> layer = sw.shard(net[0], in_strategy=((2, 1), (4, 1)))  # rows 2 ways, output features 4 ways
        >>> sw.plan(net, (x,), devices=8).operator("0").in_strategy
        ((2, 1), (4, 1), (4,))
    """
    if isinstance(operator, Operator):
        return operator.shard(in_strategy, out_strategy, priority)
    if isinstance(operator, nn.Module):
        check_not_planned("shard()", operator)
        mark_method = operator.__dict__.get("shard")
        if not isinstance(mark_method, _ReShard):
            mark_method = _ReShard(_ModuleMark(operator), operator)
            operator.__dict__["shard"] = mark_method
        return mark_method(in_strategy, out_strategy, priority)
    return Operator(operator).shard(in_strategy, out_strategy, priority)


@overload
def recompute(  # type: ignore[overload-overlap]  # a module is callable too
    target: ModuleT, mp_comm_recompute: bool = True, parallel_optimizer_comm_recompute: bool = False
) -> ModuleT: ...


@overload
def recompute(
    target: Callable[..., object], mp_comm_recompute: bool = True, parallel_optimizer_comm_recompute: bool = False
) -> Operator: ...


def recompute(
    target: Callable[..., object] | nn.Module,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool = False,
) -> Operator | nn.Module:
    """Drop the results inside a module, or of an operator, after the forward and recompute them in the backward.

    Results of a module that are used outside of the module are saved; the results of a single operator are not.

    Args:
        target: an `nn.Module`, an `Operator` returned by `shard`, or a function that is one operator.
        mp_comm_recompute: run the collectives inside again in the backward; otherwise their results are saved.
        parallel_optimizer_comm_recompute: gather sharded weights again in the backward; otherwise they are kept.

    Returns:
        The module or operator itself; for a function an `Operator`, to be called in its place.

    Raises:
        SettingError: neither a module nor a function; the model has been planned.

    Example:
        >>> layer = sw.recompute(net[1])  # its activations are dropped, and computed again in the backward
        >>> layer is net[1]
        True
    """
    settings = RecomputeSettings(bool(mp_comm_recompute), bool(parallel_optimizer_comm_recompute))
    if isinstance(target, (nn.Module, Operator)):
        check_not_planned("recompute()", target)
    if isinstance(target, nn.Module):
        vars(target)[ATTRIBUTE] = settings
        return target
    operator = target if isinstance(target, Operator) else Operator(target)
    operator.recomputed = settings
    return operator


class _ReShard:
    """The method ``module.shard(...)`` of a marked module."""

    def __init__(self, mark: _ModuleMark, module: nn.Module) -> None:
        self.mark, self.module = mark, module

    def __call__(
        self,
        in_strategy: tuple[object, ...] | None = None,
        out_strategy: tuple[object, ...] | None = None,
        priority: int = 0,
    ) -> nn.Module:
        self.mark.shard(in_strategy, out_strategy, priority)
        return self.module


#: Types of most attributes of modules, which are no marked operators and hold none.
_UNMARKED = frozenset({type(None), bool, int, float, str})
_MAPPINGS = frozenset({dict, OrderedDict})


def _marked_operators(net: nn.Module) -> Iterator[tuple[str, Operator]]:
    """Every marked operator in a model, with its attribute path."""
    for path, module in net.named_modules():
        prefix = path + "." if path else ""
        for attribute, value in vars(module).items():
            kind = type(value)
            if kind in _UNMARKED or (kind in _MAPPINGS and not value):
                continue
            if isinstance(value, Operator):
                yield prefix + attribute, value
            elif isinstance(value, _ReShard):
                yield path or type(module).__name__, value.mark
            elif isinstance(value, (list, tuple, dict)):
                entries = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{prefix}{attribute}.{key}", e) for key, e in entries if isinstance(e, Operator))


def mark_names(net: nn.Module) -> IdentityMap[object, str]:
    """Marked operator -> the attribute path of the operator in the model: ``block.matmul1``."""
    names: IdentityMap[object, str] = IdentityMap()
    for path, operator in _marked_operators(net):
        names.setdefault(operator, path)
    return names


#: Modules and operators of planned models -> the wrappers that have planned them.
_PLANNED: weakref.WeakKeyDictionary[nn.Module | Operator, weakref.WeakSet[object]] = weakref.WeakKeyDictionary()


def note_planned(model: object, net: nn.Module, further: Iterable[Operator] = ()) -> None:
    """Refuse further marks on a network that a wrapper has planned, until `forget_planned`.

    Args:
        model: the wrapper.
        net: the network.
        further: operators that the forward finds elsewhere than in attributes of modules, such as globals.
    """
    parts: Iterator[nn.Module | Operator] = chain(
        net.modules(), (operator for _, operator in _marked_operators(net)), further
    )
    for part in parts:
        models = _PLANNED.get(part)
        if models is None:
            models = _PLANNED[part] = weakref.WeakSet()
        models.add(model)


def forget_planned(model: object) -> None:
    """Let marks be given again on the network that a wrapper has planned."""
    for models in _PLANNED.values():
        models.discard(model)


def check_not_planned(call: str, target: nn.Module | nn.Parameter | Operator) -> None:
    """Check that no wrapper has planned the target of a mark. Calls inside of a captured forward pass.

    Args:
        call: the call that marks, as in ``"shard()"``.

    Raises:
        SettingError: a wrapper has.
    """

    def planned() -> bool:
        if not isinstance(target, nn.Parameter):
            return bool(_PLANNED.get(target))
        parts = [part for part, models in _PLANNED.items() if models and isinstance(part, nn.Module)]
        return any(parameter is target for part in parts for parameter in parameter_table(part).values())

    if is_collecting() or not planned():
        return
    gc.collect()  # a wrapper that is out of use may wait in a circle of references for its collection
    if planned():
        raise SettingError(
            f"{call} comes too late: the model has been called, and its plan does not change any more",
            source=_user_line(),
            legal=f"{call} before the first call of the model, or after model.replan(); the next call then plans anew",
        )


def no_optimizer_parallel(parameter: StoredT) -> StoredT:
    """Leave a parameter, or all parameters of a module, out of ZeRO/FSDP sharding (`AutoParallel.hsdp`).

    The parameter is stored with the layout that its operators ask for.

    Args:
        parameter: a parameter, or a module for all of its parameters.

    Returns:
        The argument.

    Raises:
        SettingError: neither a parameter nor a module; the model has been planned.

    Example:
        >>> bias = sw.no_optimizer_parallel(net[2].bias)  # hsdp leaves it whole
    """
    if not isinstance(parameter, (nn.Parameter, nn.Module)):
        raise SettingError(
            f"no_optimizer_parallel({type(parameter).__name__})", legal="a parameter, or a module that has some"
        )
    check_not_planned("no_optimizer_parallel()", parameter)
    for one in [parameter] if isinstance(parameter, nn.Parameter) else parameter.parameters():
        setattr(one, _STORED_WHOLE, True)
    return parameter


def stored_whole(net: nn.Module, loss_fn: Callable[..., object] | None = None) -> frozenset[str]:
    """The names of the parameters of a model, and of its loss, that `no_optimizer_parallel` has marked."""
    parts = [("", net)] + ([("loss_fn.", loss_fn)] if isinstance(loss_fn, nn.Module) else [])
    return frozenset(
        prefix + name
        for prefix, part in parts
        for name, parameter in part.named_parameters(remove_duplicate=False)
        if getattr(parameter, _STORED_WHOLE, False)
    )


# -- pipeline: settings and stages

#: Attribute of a module: the stage given by `set_stage`.
_STAGE = "_shardwright_stage"

#: Attribute of a parameter that is sharded or empty on this process: its name.
CUT = "_shardwright_cut"

#: Attribute of an empty parameter whose values are on the ranks of another stage: the shape of the whole parameter.
_WHOLE_SHAPE = "_shardwright_whole_shape"


@dataclass(frozen=True)
class PipelineSettings:
    """The setting of a pipeline. See `AutoParallel.pipeline`."""

    stages: int | str = 1
    scheduler: str = "1f1b"
    micro_batches: int | str = 1
    stage_config: tuple[tuple[str, int], ...] = ()
    chunks: int | None = None

    @property
    def csv(self) -> str | None:
        """The path of the user's schedule file, or None."""
        return self.scheduler if self.scheduler.endswith(".csv") else None


def pipelining(setting: PipelineSettings | Mapping[str, object] | None) -> PipelineSettings | None:
    """The settings of a pipeline from a dict of the arguments of `AutoParallel.pipeline`; None: no pipeline.

    Raises:
        SettingError: an unknown argument, or an argument of another type.
    """
    if setting is None or isinstance(setting, PipelineSettings):
        return setting
    names = tuple(PipelineSettings.__dataclass_fields__)
    if not isinstance(setting, Mapping) or set(setting) - set(names):
        raise SettingError(f"pipeline={setting!r}", legal="a dict of " + ", ".join(names))
    values: dict[str, Any] = dict(setting)  # checked below
    if values.get("stages") == "auto":
        values.setdefault("micro_batches", "auto")
    config = values.pop("stage_config", None) or {}
    if not isinstance(config, Mapping):
        raise SettingError(f"stage_config={config!r}", legal='a dict such as {"layer1": 0, "layer2": 1}')
    made = PipelineSettings(**values, stage_config=tuple(config.items()))
    for what in ("stages", "micro_batches"):
        value = getattr(made, what)
        if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingError(f"{what}={value!r}", legal='a whole number from 1, or "auto"')
    if not isinstance(made.scheduler, str):
        raise SettingError(
            f"scheduler={made.scheduler!r}",
            legal='"1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", or the path of a CSV file',
        )
    return made


def set_stage(module: nn.Module, stage: int) -> nn.Module:
    """Put a module into a stage of the pipeline, with all submodules that have no stage of their own.

    An operator outside of any such module goes into the latest stage among its producers. An operator that reads inputs
    and parameters alone goes into the stage of its first consumer.

    Args:
        module: a module of the model.
        stage: its number, from 0.

    Returns:
        The module itself.

    Raises:
        SettingError: not a module, not a number from 0, a module that is in another stage already, or in a model that
            has been planned.

    Example:
        >>> first, last = sw.set_stage(net[0], 0), sw.set_stage(net[2], 1)
        >>> first is net[0]
        True
    """
    if not isinstance(module, nn.Module):
        raise SettingError(f"set_stage: {module!r} is not an nn.Module", legal="a module of the model")
    check_not_planned("set_stage()", module)
    _check_number("set_stage", stage)
    known = vars(module).setdefault(_STAGE, stage)
    if known != stage:
        raise SettingError(
            f"set_stage: a {type(module).__name__} in stage {known} is put into stage {stage} too",
            legal="one stage for each module",
        )
    return module


def be_elsewhere(parameter: nn.Parameter, shape: torch.Size) -> None:
    """Record on an empty parameter the shape that it has on the ranks of another stage."""
    setattr(parameter, _WHOLE_SHAPE, shape)


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter, on this stage or on another."""
    return getattr(tensor, _WHOLE_SHAPE, tensor.shape)


def staged_modules(net: nn.Module, config: Mapping[str, int] | None = None) -> dict[str, int]:
    """Dotted path of each module with a stage of its own -> the stage.

    Args:
        net: the model.
        config: path -> stage, in addition to the stages given by `set_stage`.

    Raises:
        SettingError: an unknown path, a number below 0, or a module in two stages, under one name or two.
    """
    modules = dict(net.named_modules(remove_duplicate=False))
    stage_of: dict[str, tuple[int, str]] = {
        path: (vars(module)[_STAGE], "set_stage") for path, module in modules.items() if _STAGE in vars(module)
    }
    for path, stage in (config or {}).items():
        if path not in modules:
            near = ", ".join(p for p, _ in net.named_children()) or "none"
            raise SettingError(
                f"stage_config: there is no module {path!r}", legal=f"the path of a module, such as {near}"
            )
        _check_number(f"stage_config of {path!r}", stage)
        if path in stage_of and stage_of[path][0] != stage:
            raise SettingError(
                f"the module {path!r} is in two stages: {stage_of[path][0]} by set_stage, {stage} by stage_config",
                legal="one stage for each module",
            )
        stage_of[path] = stage, "stage_config"
    first: dict[nn.Module, str] = {}
    for path, (stage, _) in stage_of.items():
        other = first.setdefault(modules[path], path)
        if stage_of[other][0] != stage:
            raise SettingError(
                f"the modules {other!r} and {path!r} are one, in two stages: {stage_of[other][0]} and {stage}",
                legal="one stage for each module",
            )
    return {path: stage for path, (stage, _) in stage_of.items()}


def warn_of_ignored_stages(net: nn.Module) -> None:
    """Warn of modules that `set_stage` has put into stages, for a model without a pipeline."""
    staged = [path or type(net).__name__ for path, module in net.named_modules() if _STAGE in vars(module)]
    if staged:
        named = ", ".join(staged[:8]) + (f" and {len(staged) - 8} more" if len(staged) > 8 else "")
        warnings.warn(
            f"the stages that set_stage gave to {named} are ignored: the model has no pipeline. "
            "model.pipeline(stages=2) makes one",
            stacklevel=stack_level(),
        )


def _check_number(what: str, stage: object) -> None:
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise SettingError(f"{what}: the stage {stage!r}", legal="a whole number from 0")
