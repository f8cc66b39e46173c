"""Norms of gradients, and the check of `torch.amp.GradScaler`, in one all-reduce for a list of gradients.

    norm of one gradient   = (Σ_r n_r ** p) ** (1 / p)         n_r: the norm of rank r's slice; maximum for p = inf
    overflow of a list     = max_r f_r                          f_r: 1 where a slice of rank r has an inf or a NaN

A slice that several ranks hold counts on the first of them alone; the others send the norm of no elements. The numbers
of all gradients of the list are in one tensor, and one all-reduce of all ranks makes them equal on all ranks, to the
bit. No rank is asked where each rank has all gradients whole: a norm is then known here. Nothing is copied from host to
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...torch_private import foreach_norm, local_tensor, spec_of, unscale_
from .watch.rank_positions import WaitPoint, waiting

__all__ = ["NORMS", "norms", "unscale"]

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
    held = [x for x in slices if x.numel()]
    narrow = dtype or any(x.dtype in (torch.float16, torch.bfloat16) for x in held)
    found = iter(foreach_norm(held, order, wide if narrow else None) if held else ())
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
