"""Gradients of the processes runtime's parameters: DTensors, on the parameters' own meshes.

1. `Gradient`: a DTensor on which optimizers' elementwise functions run without DTensor's dispatch, and whose norm is
   a plain number. `GatheredPart` is a read-only copy of a part of it. `StageGradient` has the norm of a pipeline's
   whole parameter on all ranks of all stages. `Unsummed` is a rank's own term under `no_sync`.
2. `hand_over`, `hand_nothing`, `keep_unsummed`, `take_unsummed`: write and read a parameter's ``grad``, and run its
   hooks.

`gradient_sums` brings the gradients here from the leaves that a program computes on; `gradient_edits` has the edits of
slices; `cost.communication_schedule` has the user's settings for their sums.

Example: a weight [32, 16] in slices [8, 16] on 4 ranks, whose gradient is 1.0 everywhere. The `Gradient` on a rank has
the shape [32, 16] and a local tensor [8, 16]. Its norm is the same plain number on each rank, √512 = 22.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...layout import Digits
from ...redistribution import digits_value
from ...torch_private import (
    DisableTorchFunctionSubclass,
    foreach_edits,
    foreach_norm,
    fused_optimizers,
    gradient_hooks,
    local_tensor,
    pytree,
    spec_of,
    unscale_,
    use_foreach,
)
from ..optimizer_guard import not_summed
from .dtensors import SUBCLASSES_HAVE_VIEWS
from .gradient_edits import NORMS, RANDOM, VIEWS, changes, drawn_like, is_copy, lost, norms, put, unscale
from .parameter_hooks import call_after, in_step_or_hook, put_within, seen_by_hooks
from .rank_positions import waiting
from .sliced_tensors import ELEMENTWISE, READS, SlicedTensor, locals_of

__all__ = [
    "Gradient",
    "StageGradient",
    "Unsummed",
    "copy_of_gradient",
    "hand_nothing",
    "hand_over",
    "is_of_stage",
    "keep_unsummed",
    "of_stage",
    "take_unsummed",
    "unsummed_over",
]

#: Attribute of a parameter that belongs to a stage of a pipeline.
_OF_STAGE = "_shardwright_of_stage"

#: Attribute of a parameter that is stored on other ranks: its empty gradient here.
_NOTHING = "_shardwright_nothing"

#: Norms of a whole tensor.
_NORMS = frozenset({torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm})

#: Whole optimizer steps in one kernel, also elementwise, over lists of parameters, gradients and their state; DTensor
#: supports some of them.
_FUSED = fused_optimizers()

#: Changes of each gradient of a list by numbers.
_EDITS = foreach_edits()


class Gradient(SlicedTensor):
    """The gradient of a parameter. Its norm is a plain number, so that ``clip_grad_norm_`` can combine the norms of
    gradients on different meshes."""

    __slots__ = ()
    is_sparse = False  # optimizers read it of every gradient; saves a dispatch

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Do nothing: DTensor's own does nothing either, behind wrappers that take as long as all the rest."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:
        return memo.setdefault(id(self), copy_of_gradient(self))

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if function in ELEMENTWISE and not (torch.is_grad_enabled() and _any_requires_grad(args)):
            local = locals_of(args)
            if local is not None:  # takes a third of the time of DTensor's dispatch
                # Most empty gradients belong to other stages; an optimizer has more of these than of its own stage's.
                if local[0].numel():
                    function(*local, **(kwargs or {}))
                return args[0]
        # DTensor's `detach` returns a plain DTensor, which torch 2.9 does not accept as a view of this.
        if function is Tensor.detach:
            return _detached(args[0])
        if function is Tensor.__setitem__ and isinstance(args[0], Gradient):
            put(*args)
            return None
        if function in RANDOM:
            return Gradient(drawn_like(function, args[0], kwargs or {}), spec_of(args[0]), requires_grad=False)
        with DisableTorchFunctionSubclass():
            if function in _FUSED:
                return function(
                    *pytree.tree_map_only(DTensor, _local, args), **pytree.tree_map_only(DTensor, _local, kwargs or {})
                )
            if function in _EDITS and _is_plain(args[1:], kwargs):  # DTensor takes only lists on one mesh
                return function(*pytree.tree_map_only(DTensor, _local, args), **(kwargs or {}))
            if function is unscale_:
                unscale(*args, **(kwargs or {}))
                return None
            if function in _NORMS or function is foreach_norm:
                found = _found_together(function, args, kwargs or {})
                if found is not None:
                    return found
            # torch 2.9's DTensor makes no views of a subclass; the norm of a matrix begins with one.
            result: Any = None
            of_plain = (function in VIEWS or function in _NORMS) and isinstance(args[0], Gradient)
            if of_plain and not _has_tensors(args[1:]):
                result = function(
                    DTensor(local_tensor(args[0]), spec_of(args[0]), requires_grad=False), *args[1:], **(kwargs or {})
                )
            elif not SUBCLASSES_HAVE_VIEWS:
                result = function(*args, **(kwargs or {}))
            else:
                of_plain = False
        if SUBCLASSES_HAVE_VIEWS and not of_plain:
            result = SlicedTensor.__torch_function__(function, types, args, kwargs)
        if function in _NORMS:
            return _plain(result)
        if function is foreach_norm:
            return [_plain(norm) for norm in result]
        if function in VIEWS and isinstance(args[0], Gradient):
            return pytree.tree_map_only(DTensor, lambda part: _view(args[0], part, function, args), result)
        # A value computed from a gradient is treated as a gradient: Rprop needs this.
        if type(result) in (DTensor, SlicedTensor) and not result.requires_grad:
            return Gradient(local_tensor(result), spec_of(result), requires_grad=False)
        return result


def _any_requires_grad(args: Sequence[object]) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _has_tensors(args: Sequence[object]) -> bool:
    return any(isinstance(a, (Tensor, list)) for a in pytree.tree_leaves(args, is_leaf=lambda a: isinstance(a, list)))


def _view(gradient: Gradient, part: DTensor, function: object, args: tuple[object, ...]) -> Gradient:
    kind = GatheredPart if isinstance(gradient, GatheredPart) or is_copy(gradient, part, function, args) else Gradient
    return kind(local_tensor(part), spec_of(part), requires_grad=False)


def _detached(x: Gradient) -> Gradient:
    kind = GatheredPart if isinstance(x, GatheredPart) else Gradient
    return kind(local_tensor(x).detach(), spec_of(x), requires_grad=False)


def _local(x: DTensor) -> Tensor:
    return local_tensor(x)


def _is_plain(args: Sequence[object], kwargs: dict[str, object] | None) -> bool:
    """True for numbers, a scalar tensor, and a list of numbers; False for a list of tensors."""
    return not kwargs and not any(isinstance(a, (list, tuple)) and any(isinstance(x, Tensor) for x in a) for a in args)


def _found_together(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """The norms that `gradient_edits` computes; None for norms along dims, of matrices, and of one stage alone."""
    places = ("x", "ord", "dtype") if function is foreach_norm else ("x", "ord")
    arguments = dict(zip(places, args)) | kwargs
    arguments = {
        "ord" if name == "p" else "x" if name in ("self", "input", "A") else name: x for name, x in arguments.items()
    }
    measured, order, dtype = arguments.pop("x", None), arguments.pop("ord", None), arguments.pop("dtype", None)
    if measured is None or len(args) > len(places) or any(x is not None and x is not False for x in arguments.values()):
        return None
    if function is torch.linalg.norm and order is not None:  # a matrix has norms of its own
        return None
    order = 2.0 if order is None or order == "fro" else order
    if not isinstance(order, (int, float)):
        return None
    gradients = measured if function is foreach_norm else [measured]
    found = norms(gradients, float(order), dtype, [isinstance(g, StageGradient) for g in gradients])
    return found if found is None or function is foreach_norm else found[0]


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class GatheredPart(Gradient):
    """A part of a gradient that was gathered from several ranks: read-only."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if changes(function) and isinstance(args[0], cls):
            raise lost(function)
        return super().__torch_function__(function, types, args, kwargs)


class StageGradient(Gradient):
    """The gradient of a pipeline's parameter; empty on ranks of other stages. Its norm is that of the whole
    parameter on every rank of every stage; all of these ranks must compute it together.

    Attributes:
        counts: True where this rank contributes the norm: on the first rank of the parameter's stage.
    """

    __slots__ = ("counts",)

    counts: bool

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        is_norm = function in _NORMS or function is foreach_norm
        if is_norm and in_step_or_hook():  # of an optimizer, which sees the parameters of this stage alone
            args = pytree.tree_map_only(StageGradient, _alone, args)
            return function(*args, **pytree.tree_map_only(StageGradient, _alone, kwargs or {}))
        if is_norm:
            found = _found_together(function, args, kwargs or {})
            if found is not None:
                return found
        result: Any = super().__torch_function__(function, types, args, kwargs)
        if function in _NORMS:
            return _norms_as_results([result], args[:1])[0]
        return _norms_as_results(result, args[0]) if function is foreach_norm else result


def _alone(gradient: DTensor) -> Gradient:
    """The same gradient, whose norm is that over the ranks of its stage alone."""
    return Gradient(local_tensor(gradient), spec_of(gradient), requires_grad=False)


for _kind in (Gradient, StageGradient):
    use_foreach(_kind)


def _norms_as_results(found: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norms that the counting ranks contribute, on every rank."""
    norms = torch.stack([n if getattr(g, "counts", True) else torch.zeros_like(n) for n, g in zip(found, gradients)])
    with waiting(NORMS):
        dist.all_reduce(norms)
    return list(norms.unbind())


def of_stage(parameter: nn.Parameter, counts: bool) -> None:
    """Mark a parameter as one of a pipeline's stage, and note whether this rank counts (`StageGradient`)."""
    setattr(parameter, _OF_STAGE, counts)


def is_of_stage(parameter: Tensor) -> bool:
    """True for a parameter of a pipeline's stage (`of_stage`)."""
    return hasattr(parameter, _OF_STAGE)


def _gradient(parameter: nn.Parameter, local: Tensor) -> Gradient:
    counts = getattr(parameter, _OF_STAGE, None)
    if counts is None:
        return Gradient(local, spec_of(parameter), requires_grad=False)
    made = StageGradient(local, spec_of(parameter), requires_grad=False)
    made.counts = counts
    return made


class Unsummed(Gradient):
    """A rank's own term of a parameter's gradient, from a backward under `no_sync`. It is not a gradient yet, and uses
    as a gradient are refused. A gradient that was summed before is part of the first rank's term.

    Attributes:
        digits: the digits over which the term is to be summed; or the `Scatter` that reduces a whole term to a part.
    """

    __slots__ = ("digits",)

    digits: Any

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if function in _REFUSED or getattr(function, "__name__", "") in READS:
            raise not_summed("a norm, a part, or a change of gradients")
        if function is Tensor.detach:
            return _detached(args[0])
        with DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


_REFUSED = frozenset(
    {
        *_NORMS,
        Tensor.__setitem__,
        Tensor.__getitem__,
        foreach_norm,
        unscale_,
        *_EDITS,
        *ELEMENTWISE,
        *_FUSED,
        DTensor.full_tensor,
        DTensor.redistribute,
    }
)


def hand_over(parameter: nn.Parameter, gradient: Tensor, rank: int) -> None:
    """Add a gradient to that of a DTensor parameter on `rank`, and run the parameter's hooks. The gradient is complete,
    or needs no sum."""
    with DisableTorchFunctionSubclass():
        hooks = gradient_hooks(parameter)
        if not hooks.before:
            _add(parameter, gradient, rank)
    if hooks.before:
        _add(parameter, seen_by_hooks(parameter, gradient, rank), rank)
    if hooks.after:
        run_after(parameter)


def _add(parameter: nn.Parameter, gradient: Tensor, rank: int) -> None:
    present = parameter.grad
    if present is None:
        # Not `from_local`, which makes a spec of its own and an autograd node, and takes 15 times as long. The spec
        # is private: mesh, placements, shape and strides in one; the gradient shares the parameter's.
        parameter.grad = _gradient(parameter, gradient)
    elif type(present) is Unsummed and not isinstance(present.digits, tuple):
        present.digits.include(local_tensor(present), gradient)
    elif type(present) is not Unsummed or not digits_value(present.digits, rank):
        local_tensor(present).add_(gradient)


def hand_nothing(parameter: nn.Parameter) -> None:
    """Give a parameter that is stored on other ranks, and empty here, an empty gradient. Post-accumulate hooks run here
    too."""
    if parameter.grad is None:
        if not hasattr(parameter, _NOTHING):
            setattr(parameter, _NOTHING, _gradient(parameter, torch.empty_like(local_tensor(parameter))))
        parameter.grad = getattr(parameter, _NOTHING)
    if gradient_hooks(parameter).after:
        run_after(parameter)


def run_after(parameter: nn.Parameter) -> None:
    """Call a parameter's post-accumulate hooks.

    In a pipeline only the ranks of one stage call them at this time. Meanwhile the norm of the gradient is that over
    the stage's ranks alone.
    """
    gradient = parameter.grad
    if isinstance(gradient, StageGradient):
        parameter.grad = alone = _alone(gradient)
        call_after(parameter)
        if parameter.grad is alone:
            parameter.grad = gradient
    else:
        call_after(parameter)


def keep_unsummed(parameter: nn.Parameter, term: Tensor, digits: Digits, rank: int) -> None:
    """Add the term of `rank` to that of a DTensor parameter, to be summed over `digits` later."""
    present = parameter.grad
    if type(present) is Unsummed:
        assert present.digits == digits
        local_tensor(present).add_(term)
        return
    if present is not None and not digits_value(digits, rank):
        term = term + local_tensor(present)
    unsummed = Unsummed(term, spec_of(parameter), requires_grad=False)
    unsummed.digits = digits
    parameter.grad = unsummed


def copy_of_gradient(gradient: Gradient) -> Gradient:
    """A gradient with values of its own.

    Raises:
        SettingError: the gradient is still to be summed.
    """
    if isinstance(gradient, Unsummed):
        raise not_summed("copy.deepcopy")
    made = type(gradient)(local_tensor(gradient).clone(), spec_of(gradient), requires_grad=False)
    if isinstance(gradient, StageGradient) and isinstance(made, StageGradient):
        made.counts = gradient.counts
    return made


def unsummed_over(parameter: nn.Parameter) -> Any:
    """The digits over which, or the `Scatter` by which, a parameter's gradient is still to be summed; None where it is
    summed or absent."""
    gradient = parameter.grad
    return gradient.digits if type(gradient) is Unsummed else None


def take_unsummed(parameter: nn.Parameter) -> Tensor:
    """The rank's own term of a parameter's gradient; it is removed from the parameter.

    Raises:
        SettingError: a hook of the parameter would see the sum of several backwards.
    """
    if any(gradient_hooks(parameter)):
        raise put_within(parameter)
    term, parameter.grad = local_tensor(parameter.grad), None
    return term


# -- settings for the sums of gradients
