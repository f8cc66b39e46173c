"""Parameters whose dims their cuts do not divide: a rank holds what there is, and computes on slices of one length.

    memory      a buffer of the padded slice's shape, zeros where there is nothing
    DTensor     a view of the buffer's beginning: this rank's part of the parameter, which may be empty
    leaf        the whole buffer; of its gradient the DTensor gets the same beginning
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..layout import Layout
from ..plan.padding import true_slice

__all__ = ["beginning", "leaf_of", "slice_in_buffer"]


def slice_in_buffer(whole: Tensor, layout: Layout, rank: int, device: torch.device) -> Tensor:
    """A rank's slice of a tensor, at the beginning of memory that holds a padded one."""
    part = whole[true_slice(layout, whole.shape, rank)]
    length = layout.local_shape(layout.padded(whole.shape))
    if tuple(part.shape) == length:
        return part.to(device).clone(memory_format=torch.contiguous_format)
    buffer = torch.zeros(length, dtype=whole.dtype, device=device)
    return beginning(buffer, part.shape).copy_(part)


def leaf_of(parameter: DTensor) -> Tensor:
    """A plain tensor on the memory of a DTensor's slice, the padding included."""
    local = parameter.to_local().detach()
    cuts = [1] * parameter.dim()
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            cuts[placement.dim] *= parameter.device_mesh.size(axis)
    length = tuple(-(-size // cut) for size, cut in zip(parameter.shape, cuts))
    if length == tuple(local.shape):
        return local
    return local.as_strided(length, torch.empty(length, device="meta").stride(), local.storage_offset())


def beginning(x: Tensor, shape: torch.Size) -> Tensor:
    """The part of `x` that has this shape: a view, or `x` itself."""
    return x if x.shape == shape else x[tuple(slice(size) for size in shape)]
