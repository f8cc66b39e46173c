"""Sharded gradients between backward and step: edits on each rank's own slice, norms, and the check of GradScaler.

1. Edits.

       p.grad[:2] = 0              rows of the whole gradient: each rank sets the rows that it has
       p.grad.mul_(mask)           a plain tensor has the whole gradient's shape: each rank takes its part
       torch.randn_like(p.grad)    the numbers of the whole gradient; each rank keeps its part
       p.grad[0].mul_(2)           refused where the row is a gathered copy: the gradient would not change

   Nothing is communicated unless an index or a value is a DTensor of another layout than the gradient's.

2. Norms (`norms`), and the check of `torch.amp.GradScaler` (`unscale`), in one all-reduce for a list of gradients.

       norm of one gradient   = (Σ_r n_r ** p) ** (1 / p)         n_r: the norm of rank r's slice; maximum for p = inf
       overflow of a list     = max_r f_r                          f_r: 1 where a slice of rank r has an inf or a NaN

   A slice that several ranks hold counts on the first of them alone; the others send the norm of no elements. The
   numbers of all gradients of the list are in one tensor, and one all-reduce of all ranks makes them equal on all
   ranks, to the bit. No rank is asked where each rank has all gradients whole: a norm is then known here. Nothing is
   copied from host to device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...accelerators import random_state, set_random_state
from ...errors import SettingError
from ...partition.padded_dims import true_slice
from ...torch_private import foreach_norm, local_tensor, pytree, spec_of, storage_id, unscale_
from .dtensors import layout_of
from .rank_positions import WaitPoint, waiting

__all__ = [
    "NORMS",
    "RANDOM",
    "VIEWS",
    "changes",
    "drawing",
    "drawn_like",
    "is_copy",
    "lost",
    "norms",
    "part_of",
    "put",
    "unscale",
]

# -- edits


#: Functions that return a view of a tensor on one device.
VIEWS = frozenset(
    {
        Tensor.__getitem__,
        Tensor.select,
        Tensor.narrow,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.ravel,
        Tensor.unflatten,
        Tensor.unbind,
        Tensor.split,
        Tensor.chunk,
        Tensor.squeeze,
        Tensor.unsqueeze,
        Tensor.transpose,
        Tensor.t,
        Tensor.permute,
        Tensor.movedim,
        Tensor.diagonal,
        Tensor.unfold,
        Tensor.expand,
        Tensor.view_as,
        Tensor.T.__get__,  # type: ignore[attr-defined]  # a property, which torch types as its value
        Tensor.mT.__get__,  # type: ignore[attr-defined]  # likewise
        Tensor.data.__get__,  # type: ignore[attr-defined]  # likewise
        torch.select,
        torch.narrow,
        torch.reshape,
        torch.flatten,
        torch.ravel,
        torch.unbind,
        torch.split,
        torch.chunk,
        torch.squeeze,
        torch.unsqueeze,
        torch.transpose,
        torch.t,
        torch.permute,
        torch.movedim,
        torch.diagonal,
    }
)

#: Functions that draw random numbers of a tensor's shape.
RANDOM = frozenset({torch.randn_like, torch.rand_like})

_OPERATORS = frozenset(
    {
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__idiv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
    }
)


#: The wait point of random numbers that are those of rank 0.
_DRAWING = WaitPoint("random numbers of a parameter, outside of the model, which every rank draws")


def changes(function: object) -> bool:
    """True for a function that writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def lost(function: Any) -> SettingError:
    """The error for an edit that would change a copy."""
    return SettingError(
        f"{function.__name__} of a part of a gradient that is cut over several ranks: the part is a copy, "
        "and the gradient would stay as it is",
        legal="p.grad[:2] = p.grad[:2] * 2, p.grad[:2] = 0, or p.grad.mul_(mask) with a mask of the "
        "gradient's whole shape",
    )


def is_copy(gradient: DTensor, part: DTensor, function: object, args: tuple[object, ...]) -> bool:
    """True where `part`, the result of a function of `VIEWS` on a gradient, lies in other memory than the gradient.

    Args:
        gradient: the gradient.
        part: the result.
        function: the function.
        args: of the function.
    """
    if function is Tensor.__getitem__ and any(
        isinstance(i, (Tensor, list)) for i in pytree.tree_leaves(args[1], is_leaf=lambda i: isinstance(i, list))
    ):
        return False  # a copy on one device, too
    mine, whole = (storage_id(local_tensor(x).untyped_storage()) for x in (part, gradient))
    return mine != whole


def _own_slices(gradient: DTensor) -> tuple[slice, ...] | None:
    """The slices of the whole gradient that this rank has; None: all of it."""
    if not any(isinstance(p, Shard) for p in gradient.placements):
        return None
    layout = layout_of(gradient)
    if layout is None:
        raise SettingError(
            "a change of a part of a gradient that lies in no layout of the model's parameters",
            legal="a change of the parameter's own gradient, p.grad",
        )
    return true_slice(layout, tuple(gradient.shape), dist.get_rank() - int(gradient.device_mesh.mesh.min()))


def part_of(gradient: DTensor, whole: Tensor) -> Tensor | None:
    """This rank's part of a plain tensor that is broadcast against the whole gradient; None where the shapes do
    not fit."""
    own_slices = _own_slices(gradient)
    if own_slices is None:
        return whole
    shape, missing = gradient.shape, gradient.dim() - whole.dim()
    if missing < 0 or any(size not in (1, shape[d + missing]) for d, size in enumerate(whole.shape)):
        return None
    return whole[tuple(slice(None) if size == 1 else own_slices[d + missing] for d, size in enumerate(whole.shape))]


def put(gradient: DTensor, index: Any, value: Any) -> None:
    """Compute ``gradient[index] = value``, with index and value of the whole gradient."""
    spec, local = spec_of(gradient), local_tensor(gradient)
    value = _whole(value.detach()) if isinstance(value, Tensor) else value
    if (
        isinstance(index, DTensor)
        and (index.device_mesh, index.placements) == (spec.mesh, spec.placements)
        and index.shape == gradient.shape
        and not (isinstance(value, Tensor) and value.dim())
    ):
        local[local_tensor(index)] = value
        return
    index = pytree.tree_map_only(DTensor, _whole, index)
    own_slices = _own_slices(gradient) if local.numel() else None
    if not local.numel():
        return
    if own_slices is None:
        local[index] = value
        return
    changed = torch.zeros(gradient.shape, dtype=torch.bool, device=local.device)
    made = torch.empty(gradient.shape, dtype=local.dtype, device=local.device)
    changed[index], made[index] = True, value
    local.copy_(torch.where(changed[own_slices], made[own_slices], local))


@contextlib.contextmanager
def drawing(device: torch.device, options: Mapping[str, object]) -> Iterator[None]:
    """While active, torch's generator of the device is that of rank 0; a generator of the user's stays as it is. Ranks
    whose generators were like rank 0's go on like it, others with their own."""
    if options.get("generator") is not None:
        yield
        return
    state_before = random_state(device)
    sent = state_before.to(device, copy=True)
    with waiting(_DRAWING):
        dist.broadcast(sent, 0)
    of_first = sent.to(state_before.device)
    alike = torch.equal(state_before, of_first)
    if not alike:
        set_random_state(device, of_first)
    try:
        yield
    finally:
        if not alike:
            set_random_state(device, state_before)


def drawn_like(function: Callable[..., Tensor], gradient: DTensor, options: Mapping[str, object]) -> Tensor:
    """This rank's part of the random numbers that one device would draw."""
    local = local_tensor(gradient)
    if not any(isinstance(p, Shard) for p in gradient.placements):
        return function(local, **options)
    drawn = function(torch.empty(gradient.shape, dtype=local.dtype, device=local.device), **options)
    if not local.numel():  # an empty rank draws too: generators stay alike
        return drawn.new_empty(local.shape)
    return drawn[_own_slices(gradient)].contiguous()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# -- norms


#: The wait points of the all-reduces of this module: exposed time counts them, and a rank that does not come is named.
NORMS = WaitPoint("the all_reduce of norms of gradients")
_UNSCALING = WaitPoint("the all_reduce of GradScaler's check for inf and NaN")


def norms(
    gradients: Sequence[Tensor], order: float, dtype: torch.dtype | None, staged: Sequence[bool]
) -> list[Tensor] | None:
    """The norms of whole gradients, each a plain number; None where they have to be computed one by one.

    Args:
        gradients: DTensors, or plain tensors, which are each rank's own. All ranks call this together, unless each
            gradient is whole on each rank.
        order: p, as of ``torch.linalg.vector_norm``; `math.inf` or another number.
        dtype: of the norms; None: that of the gradients.
        staged: for each gradient, True where it lies on the ranks of one stage of a pipeline.
    """
    cut = [s or any(isinstance(p, Shard) for p in _placements(g)) for g, s in zip(gradients, staged)]
    world = dist.get_world_size()
    if any(c and not s and spec_of(g).mesh.size() != world for g, c, s in zip(gradients, cut, staged)):
        return None
    made = _of_slices([_slice(g) for g in gradients], order, dtype)
    results = [dtype or g.dtype.to_real() for g in gradients]
    if not any(cut):
        return [norm.to(result) for norm, result in zip(made, results)]
    nothing = _of_nothing(order, made[0].dtype, made[0].device)
    sent = torch.stack([norm if _counts(g) else nothing for norm, g, c in zip(made, gradients, cut) if c])
    sent = _over_ranks(sent, order)
    summed = iter(sent.unbind())
    return [(next(summed) if c else norm).to(result) for norm, c, result in zip(made, cut, results)]


def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients by `inv_scale`, and write 1 to `found_inf` on all ranks where one rank has an inf or a NaN.

    Args:
        gradients: DTensors or plain tensors of one dtype. All ranks call this together.
        found_inf: one number, 0 or 1.
        inv_scale: one number.
    """
    slices = [x for x in map(_slice, gradients) if x.numel()]
    if slices:
        unscale_(slices, found_inf, inv_scale)
    with waiting(_UNSCALING):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)


def _slice(x: Tensor) -> Tensor:
    return local_tensor(x) if isinstance(x, DTensor) else x


def _placements(x: Tensor) -> Sequence[object]:
    return x.placements if isinstance(x, DTensor) else ()


def _counts(gradient: Tensor) -> bool:
    """True on the first of the ranks that hold a slice."""
    mesh = spec_of(gradient).mesh
    coordinates = mesh.get_coordinate()
    return coordinates is not None and not any(
        coordinate for coordinate, p in zip(coordinates, _placements(gradient)) if isinstance(p, Replicate)
    )


def _of_slices(slices: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norms of this rank's slices, in one dtype of at least float32."""
    real = [dtype or x.dtype.to_real() for x in slices]
    wide = torch.float64 if torch.float64 in real else torch.float32
    filled = [x for x in slices if x.numel()]
    narrow = dtype or any(x.dtype in (torch.float16, torch.bfloat16) for x in filled)
    found = iter(foreach_norm(filled, order, wide if narrow else None) if filled else ())
    nothing = _of_nothing(order, wide, slices[0].device)
    return [next(found).to(wide) if x.numel() else nothing for x in slices]


def _of_nothing(order: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The norm of a slice without elements."""
    return torch.full((), 0.0 if order >= 0 else math.inf, dtype=dtype, device=device)


def _over_ranks(mine: Tensor, order: float) -> Tensor:
    """The norms of whole gradients from those of the slices, on all ranks."""
    extreme = math.isinf(order)
    least = order < 0
    term = mine if extreme or order in (0, 1) else mine.pow(order)
    if not extreme:
        with waiting(NORMS):
            dist.all_reduce(term)
        return term if order in (0, 1) else term.pow(1.0 / order)
    # The largest number of several may forget a NaN.
    missing = term.isnan()
    sent = torch.cat([term.nan_to_num(0.0, math.inf, -math.inf) * (-1 if least else 1), missing.to(term.dtype)])
    with waiting(NORMS):
        dist.all_reduce(sent, dist.ReduceOp.MAX)
    found, missing = sent.chunk(2)
    return torch.where(missing > 0, math.nan, -found if least else found)
