"""What would go wrong silently in an optimizer's step, seen before it.

An optimizer that holds other parameter objects than the model finds no gradients there and does nothing; one that steps
while gradients are not summed would take each rank elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import SettingError

__all__ = ["replace_noted", "set_empty_aside", "watch_steps"]

_REPLACED = "_shardwright_replaced"


def replace_noted(old: torch.Tensor, name: str) -> None:
    """Note on a parameter object that the model has another one in its place."""
    setattr(old, _REPLACED, name)


def watch_steps(net: nn.Module) -> None:
    """See, before each step of any optimizer, that it is not one of a copy of `net`, nor of parameters that `net` no longer
    has. Until `net` is gone."""
    alive = weakref.ref(net)

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = alive()
        if model is not None:
            _look(optimizer, model)
    weakref.finalize(net, register_optimizer_step_pre_hook(look).remove)


def set_empty_aside(net: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Let optimizers pass by parameters that are empty on this rank, in each step: of a pipeline's other stages there are
    many, and each would take as long as one that is there. Their gradients are back after it. Until `net` is gone."""
    held = [weakref.ref(parameter) for parameter in parameters]
    aside: list[tuple[nn.Parameter, torch.Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in [ref() for ref in held]:
            if parameter is not None and parameter.grad is not None:
                aside.append((parameter, parameter.grad))
                parameter.grad = None

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in aside:
            if parameter.grad is None:
                parameter.grad = gradient
        aside.clear()
    weakref.finalize(net, register_optimizer_step_pre_hook(before).remove)
    weakref.finalize(net, register_optimizer_step_post_hook(after).remove)


def _look(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        if hasattr(parameter, _REPLACED):
            raise SettingError(f"{type(optimizer).__name__} holds the parameter {getattr(parameter, _REPLACED)!r} as it was "
                               "before the first call of the model, which has slices in its place since",
                               legal="an optimizer of net.parameters(), built before the first call or after it, but not of "
                                     "a list made before and an optimizer after")
        if getattr(parameter.grad, "digits", None) is not None:
            from .gradients import not_summed  # imports DTensor, which is loaded where there is such a gradient
            raise not_summed(f"{type(optimizer).__name__}.step()")
    if any(p.grad is not None for p in held):
        return
    theirs, ours = list(net.parameters()), {id(p) for p in held}
    if any(id(p) in ours for p in theirs) or not any(p.grad is not None for p in theirs):
        return
    if [p.shape for p in held] == [p.shape for p in theirs]:
        raise SettingError(f"{type(optimizer).__name__} holds the parameters of a copy of the model: none of them has a "
                           "gradient, those of the model that ran do",
                           legal="an optimizer of the parameters of the model that is wrapped")
