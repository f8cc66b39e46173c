"""Parameter objects that a model had before its first call, when slices have taken their places.

A script may hold such an object: ``params = list(net.parameters())``, then ``clip_grad_norm_(params, 1.0)`` after each
backward. The object becomes a `Replaced`: each function of torch that is called on it is called on its successor. A
gradient that a backward has for such an object itself, of a value from before, is refused. An optimizer of such objects
is refused too (`optimizer_guard`), since its state would belong to none of the model's parameters.

Tensors that are not exactly an `nn.Parameter`, as those of quantization libraries, stay as they are.

Example: ``old = net.fc.weight`` [32, 16], read before the first call on 4 ranks. After the call ``old.grad`` is
``net.fc.weight.grad``, whose local tensor is [8, 16], and ``old * 2`` is ``net.fc.weight * 2``.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import SettingError
from ..torch_private import pytree

__all__ = ["replace_noted", "replaced_name", "stand_for_successor", "successor_of"]

_NAME, _SUCCESSOR = "_shardwright_replaced", "_shardwright_successor"


def replace_noted(old: torch.Tensor, name: str, successor: torch.Tensor) -> None:
    """Mark the parameter object `old` as replaced in the model by `successor`; `name` is the parameter's name."""
    setattr(old, _NAME, name)
    setattr(old, _SUCCESSOR, successor)


def replaced_name(parameter: torch.Tensor) -> str | None:
    """The name of a parameter that another object has replaced in its model; None for any other."""
    name: str | None = getattr(parameter, _NAME, None)
    return name


def successor_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter object that has replaced `parameter` in its model; `parameter` itself where none has."""
    found: torch.Tensor = getattr(parameter, _SUCCESSOR, parameter)
    return found


def stand_for_successor(old: torch.Tensor) -> None:
    """Let each function that is called on `old`, which `replace_noted` has marked, be called on its successor."""
    if type(old) is nn.Parameter:
        if old.requires_grad:
            old.register_hook(functools.partial(_refuse, replaced_name(old)))
        old.__class__ = Replaced


def _refuse(name: str | None, gradient: torch.Tensor) -> NoReturn:
    raise SettingError(
        f"a gradient of a value that was computed of the parameter {name!r} before the first call of the model, which "
        "has slices in its place since: the gradient would be lost",
        legal="such a value, a penalty for example, computed after the first call",
    )


class Replaced(nn.Parameter):
    """A parameter as it was before the first call; functions that are called on it are called on its successor."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        met: list[Replaced] = []

        def present(x: Replaced) -> torch.Tensor:
            met.append(x)
            return successor_of(x)

        args, kwargs = pytree.tree_map_only(Replaced, present, (args, kwargs or {}))
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not met or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise SettingError(
                f"of the parameter {replaced_name(met[0])!r} this rank has a slice since the first call, and "
                f"{function.__name__} is called on it together with a plain tensor",
                legal="a tensor that is copied from the parameter after the first call; whole tensors of the model "
                "inside of `with model.whole():`",
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(successor_of(self), name)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(successor_of(self))

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return memo.setdefault(id(self), copy.deepcopy(successor_of(self), memo))
