"""Steps of torch's own optimizers on each rank's slices, in place of the DTensors that the optimizers hold.

    the user's optimizer     parameters, gradients and state are DTensors, as checkpoints and other code see them
    the step's `_StandIn`    the same memory as plain tensors: no dispatch, and lists of any mix of meshes

A step that computes element by element gives on slices what it gives on whole tensors. Optimizers of torch with other
steps:

    Adafactor, Muon     parameters are `Gradient`, whose norms are those of whole parameters; one by one, not in lists.
                        Muon gathers each matrix once a step; its state stays cut
    LBFGS               joins all parameters to one vector: refused unless each rank has all of them whole
    SparseAdam          refused: gradients here are dense

An optimizer that torch does not have, or a class with a step of its own, steps on the DTensors.

``swa_utils.AveragedModel`` averages lists of parameters and, where asked, of buffers, which are plain tensors. The
average of a list that has a DTensor is that of the slices (`_average`).

Example: Adam on a weight [32, 16] in slices [8, 16] on 4 ranks. The state ``exp_avg`` that the user's optimizer holds
is a DTensor [32, 16]; the step of the stand-in writes this rank's [8, 16] of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...capture.annotations import CUT
from ...errors import SettingError
from ...torch_private import DisableTorchFunctionSubclass, dtensor_handlers, local_tensor, operators, spec_of
from .dtensors import gathered_as, padded_slice, refuse_slices_of_others
from .gradient_edits import part_of
from .gradient_tensors import Gradient, is_of_stage

__all__ = ["stand_in"]

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop".split()
)

#: Entries of the state that are one number, whatever the parameter's shape.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})


class _Matrix(Gradient):
    """A matrix of Muon, which computes a product in bfloat16 of it: that of the whole matrix, on each rank."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        narrowed = function is Tensor.to and torch.bfloat16 in (*args[1:], *(kwargs or {}).values())
        if narrowed or function is Tensor.bfloat16:
            whole = gathered_as(args[0], padded_slice(args[0], local_tensor(args[0])))
            return function(whole, *args[1:], **(kwargs or {}))
        result = super().__torch_function__(function, types, args, kwargs)
        return _as(cls, result) if type(result) is Gradient else result


#: Optimizers of whole parameters -> the kind of their tensors.
_WHOLE = {
    getattr(torch.optim, name): kind
    for name, kind in (("Adafactor", Gradient), ("Muon", _Matrix))
    if hasattr(torch.optim, name)
}


def stand_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer whose step the optimizer's step is, on this rank's slices; None where it steps as it is.

    Raises:
        SettingError: no step of this optimizer gives what it gives on one device.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, DTensor) for p in parameters):
        return None
    made_by = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    if made_by is torch.optim.SparseAdam:
        _refuse(optimizer, "changes the rows of sparse gradients, and gradients of a planned model are dense", "AdamW")
    if made_by is torch.optim.LBFGS:
        cut = next((p for p in parameters if isinstance(p, DTensor) and (is_of_stage(p) or _is_cut(p))), None)
        if cut is not None:
            _refuse(
                optimizer,
                f"joins all parameters to one vector, and not all ranks have {getattr(cut, CUT, '')!r} whole",
                "AdamW; or LBFGS where all ranks have all parameters whole, as in data_parallel without hsdp",
            )
        return _kind(type(optimizer))(optimizer, _slice)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    if made_by in _WHOLE:
        return _kind(type(optimizer))(optimizer, functools.partial(_as, _WHOLE[made_by]))
    fits = all(_fits(p, x) for p in parameters for x in optimizer.state.get(p, {}).values())
    return _kind(type(optimizer))(optimizer, _slice) if fits and made_by in _ELEMENTWISE else None


def _refuse(optimizer: torch.optim.Optimizer, why: str, legal: str) -> NoReturn:
    raise SettingError(f"{type(optimizer).__name__}.step(): the optimizer {why}", legal=legal)


def _is_cut(parameter: DTensor) -> bool:
    return any(isinstance(placement, Shard) for placement in parameter.placements)


def _fits(parameter: Tensor, value: object) -> bool:
    """True for an entry of the state that is a number, or lies as its parameter does."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return True
    if isinstance(value, DTensor):
        mine, theirs = spec_of(parameter), spec_of(value)
        if mine is not theirs:
            refuse_slices_of_others([value], parameter, getattr(parameter, CUT, ""))
        same = mine is theirs or (mine.mesh, mine.placements, mine.shape) == (
            theirs.mesh,
            theirs.placements,
            theirs.shape,
        )
        return same or not value.dim()
    return not value.dim() or value.shape == local_tensor(parameter).shape


def _slice(x: object, like: Any) -> object:
    """The memory of a DTensor on this rank as a plain tensor; a plain gradient's part that belongs to `like`."""
    if isinstance(x, DTensor):
        if like is not None and spec_of(x) is not spec_of(like) and x.dim() and x.placements != like.placements:
            x = x.redistribute(like.device_mesh, like.placements)
        return local_tensor(x)
    if isinstance(like, DTensor) and isinstance(x, Tensor) and x.shape == like.shape != local_tensor(like).shape:
        return part_of(like, x)
    return x


def _as(kind: type[Gradient], x: object, like: object = None) -> object:
    """A DTensor of another kind on the same memory; anything else as it is."""
    return kind(local_tensor(x), spec_of(x), requires_grad=False) if isinstance(x, DTensor) else x


class _State(dict[str, object]):
    """One parameter's state as plain tensors; what the step writes goes into the optimizer's own state too."""

    def __init__(self, state: Any, parameter: Tensor, seen: Callable[[object, object], object]) -> None:
        super().__init__({name: seen(value, None) for name, value in state.get(parameter, {}).items()})
        self._stored, self._parameter, self._seen = state, parameter, seen

    def __setitem__(self, name: str, value: object) -> None:
        known = name in self and self[name] is value
        super().__setitem__(name, value)
        if not known:
            self._stored[self._parameter][name] = self._as_stored(name, value)

    def setdefault(self, name: str, default: object = None) -> object:
        if name not in self:
            self[name] = default
        return self[name]

    def _as_stored(self, name: str, value: object) -> object:
        """A tensor as a DTensor, that of a slice's shape as one that lies as the parameter does."""
        p = self._parameter
        if isinstance(value, DTensor):
            return DTensor(local_tensor(value), spec_of(value), requires_grad=False)
        if self._seen is not _slice or not isinstance(value, Tensor) or not isinstance(p, DTensor) or name in _NUMBERS:
            return value
        return DTensor(value, spec_of(p), requires_grad=False) if value.shape == local_tensor(p).shape else value


class _StandIn:
    """Mixed into an optimizer's class: reads another optimizer's parameters, gradients and state."""

    def __init__(self, optimizer: torch.optim.Optimizer, seen: Callable[[Any, object], Any]) -> None:
        vars(self).update({k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "_params")})
        self._seen, self._optimizer = seen, optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._slices: dict[Tensor, Tensor] = {
            p: seen(p, None).detach() if isinstance(p, DTensor) else p for p in parameters
        }
        self.state: Mapping[Tensor, object] = {x: _State(optimizer.state, p, seen) for p, x in self._slices.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the gradients of this moment: a closure, or a hook, may have changed them."""
        with DisableTorchFunctionSubclass():
            gradients = [p.grad for p in self._slices]
        for (p, x), gradient in zip(self._slices.items(), gradients):
            if x is not p:
                x.grad = None if gradient is None else self._seen(gradient, p)
        one_by_one = {} if self._seen is _slice else {"foreach": False}
        return [
            {**g, **{k: v for k, v in one_by_one.items() if k in g}, "params": [self._slices[p] for p in g["params"]]}
            for g in self._optimizer.param_groups
        ]

    @property
    def _params(self) -> list[Tensor]:
        """LBFGS's own list, which it reads after each closure."""
        return self.param_groups[0]["params"]


def _mixed(optimizer: type) -> type:
    return type(optimizer.__name__, (_StandIn, optimizer), {})


_kind: Callable[[type], type] = functools.cache(_mixed)


def _average(operator: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
    """Move each tensor of a list towards that of another list, in place; the operator is called on slices."""
    averages, values, *weight = args
    operator([_slice(x, None) for x in averages], [_slice(x, y) for x, y in zip(values, averages)], *weight, **kwargs)


if isinstance(dtensor_handlers, dict):
    for _lerp in operators("_foreach_lerp_.Scalar"):
        dtensor_handlers.setdefault(_lerp, _average)
