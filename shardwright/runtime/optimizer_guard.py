"""Checks before an optimizer's step for mistakes that would otherwise go unnoticed.

1. An optimizer that holds other parameter objects than the model finds no gradients and does nothing: refused.
2. An optimizer that steps while gradients are not summed over ranks would let the ranks diverge: refused.
3. An optimizer that steps while `whole` has whole tensors in place of the slices: refused.
4. An optimizer that steps while its state is copied for a checkpoint would mix two steps in it: the step waits.

Parameters that are empty on this rank are also hidden from steps, to save time. In processes the step is that of a
stand-in (`distributed/optimizer_steps.py`).

Example of the first case: ``optimizer = SGD(copy.deepcopy(net).parameters(), lr=0.1)``, while ``net`` is trained. Its
step is the error "SGD holds the parameters of a copy of the model".
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import SettingError
from ..torch_private import DisableTorchFunctionSubclass
from .replaced_parameters import replaced_name

__all__ = [
    "Accumulation",
    "before_next_step",
    "close_to_steps",
    "expect_first_call",
    "not_summed",
    "open_to_steps",
    "says_when_it_steps",
    "set_empty_aside",
    "step_through",
    "watch_steps",
]


@dataclass
class Accumulation:
    """The state of `AutoParallel.no_sync`: whether gradients of a backward stay unsummed, and the parameters that have
    such.

    Attributes:
        open: True while gradients stay unsummed.
        unsummed: the parameters that have an unsummed gradient, or had one, in order.
    """

    open: bool = False
    unsummed: dict[torch.nn.Parameter, None] = field(default_factory=dict)


_CLOSED = "_shardwright_closed"


def close_to_steps(parameter: torch.Tensor) -> None:
    """Refuse optimizer steps on a parameter, while the model has a whole tensor in its place."""
    setattr(parameter, _CLOSED, True)


def open_to_steps(parameter: torch.Tensor) -> None:
    """Undo `close_to_steps`."""
    if hasattr(parameter, _CLOSED):
        delattr(parameter, _CLOSED)


def expect_first_call(net: nn.Module) -> None:
    """Note that slices take the places of `net`'s parameters at a call that is to come, until `watch_steps`."""
    _STEPS.expect(net)


def watch_steps(net: nn.Module) -> None:
    """Check each step of any optimizer until `net` is gone: refuse an optimizer of a copy of `net`, or of parameters
    that `net` no longer has."""
    _STEPS.look_at(net)


def set_empty_aside(net: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Let optimizers skip parameters that are empty on this rank, until `net` is gone.

    A rank of a pipeline has many: all parameters of the other stages. Each would take as long in a step as a
    parameter that is there. Their gradients are set to None for the step and restored after it.
    """
    _STEPS.put_aside(net, parameters)


def before_next_step(work: Callable[[], None]) -> None:
    """Call `work` before the next optimizer step, in the thread that steps; where several threads step, each calls it.

    A later call replaces the earlier `work`.
    """
    _STEPS.do_first(work)


def step_through(stand_in: Callable[[torch.optim.Optimizer], torch.optim.Optimizer | None]) -> None:
    """Let each step be the step of another optimizer, which `stand_in` makes; None: of the optimizer itself."""
    _STEPS.stand_in = stand_in


def says_when_it_steps(optimizer: torch.optim.Optimizer) -> bool:
    """True where torch calls the step hooks for this optimizer: it does so for subclasses of its own class only."""
    return isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)


def not_summed(what: str) -> SettingError:
    """The error for `what`, requested between a backward under `no_sync` and the backward that sums."""
    return SettingError(
        f"{what} while gradients of a backward under no_sync() are still each rank's own",
        legal="the last backward before it outside of no_sync(), or zero_grad()",
    )


class _Aside(threading.local):
    """The gradients set aside during a step of this thread."""

    def __init__(self) -> None:
        self.gradients: list[tuple[nn.Parameter, torch.Tensor]] = []


class _Steps:
    """The state behind the step hooks, for each model that is alive.

    torch iterates over its global optimizer hooks while they run, and a model can be collected during that. One hook
    per model, removed with the model, would end the step of another model with "OrderedDict mutated during
    iteration". Hence there is one hook before a step and one after, registered for good by the first model or save.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._expected: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._empty: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Parameter]]] = weakref.WeakKeyDictionary()
        self._aside = _Aside()
        self._first: Callable[[], None] | None = None
        self.stand_in: Callable[[torch.optim.Optimizer], torch.optim.Optimizer | None] = lambda optimizer: None

    def look_at(self, net: nn.Module) -> None:
        with self._lock:
            self._expected.discard(net)
            self._looked_at.add(net)
            self._hook()

    def expect(self, net: nn.Module) -> None:
        with self._lock:
            self._expected.add(net)
            self._hook()

    def put_aside(self, net: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        with self._lock:
            self._empty.setdefault(net, []).extend(weakref.ref(parameter) for parameter in parameters)
            self._hook()

    def do_first(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._first = work
            self._hook()

    def _hook(self) -> None:
        if not self._hooked:
            register_optimizer_step_pre_hook(self._before)
            register_optimizer_step_post_hook(self._after)
            self._hooked = True

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        with self._lock:
            nets, expected = list(self._looked_at), list(self._expected)
            empty = [ref for refs in self._empty.values() for ref in refs]
        argument = kwargs.get("closure", args[1] if len(args) > 1 else None)
        closure = argument if callable(argument) else None

        def look() -> None:
            for net in nets:
                _look(optimizer, net)

        losses: list[object] = []

        def closed() -> object:
            assert closure is not None
            loss = losses.pop() if losses else closure()
            look()  # at the closure's gradients
            return loss

        if closure is not None and _calls_first(optimizer, expected):
            with torch.enable_grad():
                losses.append(closure())
            with self._lock:
                nets = list(self._looked_at)
        if closure is None:
            look()
        first = self._first
        if first is not None:
            first()
            if self._first is first:
                self._first = None
        stepping = self.stand_in(optimizer) or optimizer
        for parameter in [ref() for ref in empty]:
            if parameter is not None and parameter.grad is not None:
                self._aside.gradients.append((parameter, parameter.grad))
                parameter.grad = None
        if closure is None:
            return None if stepping is optimizer else ((stepping, *args[1:]), kwargs)
        if len(args) > 1:
            return (stepping, closed, *args[2:]), kwargs
        return (stepping,), kwargs | {"closure": closed}

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for parameter, gradient in self._aside.gradients:
            if parameter.grad is None:
                parameter.grad = gradient
        self._aside.gradients.clear()


_STEPS = _Steps()


def _calls_first(optimizer: torch.optim.Optimizer, nets: Sequence[nn.Module]) -> bool:
    """True where the closure of a step of torch's own may make the first call of one of the models, after which the
    optimizer has slices. LBFGS looks its parameters up before it calls the closure; with slices the step is that of
    another optimizer."""
    made_by = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    if not (dist.is_available() and dist.is_initialized()) or made_by not in vars(torch.optim).values():
        return False
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    return any(p in parameters for net in nets for p in net.parameters())


def _look(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with DisableTorchFunctionSubclass():
        gradients = [p.grad for p in parameters]
    for parameter, gradient in zip(parameters, gradients):
        if replaced_name(parameter) is not None:
            raise SettingError(
                f"{type(optimizer).__name__} holds the parameter {replaced_name(parameter)!r} as it was "
                "before the first call of the model, which has slices in its place since",
                legal="an optimizer of net.parameters(), built before the first call or after it, but not of "
                "a list made before and an optimizer after",
            )
        if hasattr(parameter, _CLOSED):
            raise SettingError(
                f"{type(optimizer).__name__}.step() inside of whole(), where the model has whole tensors",
                legal="steps before it or after it",
            )
        if getattr(gradient, "digits", None) is not None:
            raise not_summed(f"{type(optimizer).__name__}.step()")
    if any(gradient is not None for gradient in gradients):
        return
    theirs, ours = list(net.parameters()), set(parameters)
    if any(p in ours for p in theirs) or not any(p.grad is not None for p in theirs):
        return
    if [p.shape for p in parameters] == [p.shape for p in theirs]:
        raise SettingError(
            f"{type(optimizer).__name__} holds the parameters of a copy of the model: none of them has a "
            "gradient, those of the model that ran do",
            legal="an optimizer of the parameters of the model that is wrapped",
        )
