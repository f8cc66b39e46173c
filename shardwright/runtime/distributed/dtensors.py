"""A rank's slice as a DTensor, and back: the layout of a DTensor, its whole tensor, and values written into it.

Where the cuts of a dim do not divide it, a rank stores only the elements that exist, and computes on slices of equal,
padded length:

    memory      a buffer of the padded slice's shape; the padding is zeros
    DTensor     a view of the buffer's beginning: this rank's part of the parameter, which may be empty
    leaf        the whole buffer; the DTensor gets the same beginning of its gradient

Example: a parameter of 5 rows on 4 ranks has padded slices of 2 rows; the ranks' parts are of 2, 2, 1 and 0 rows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...capture.annotations import whole_shape
from ...errors import SettingError
from ...layout import Digit, Layout
from ...partition.padded_dims import true_slice
from ...torch_private import dtensor_handlers, lost_names, operators, without_names
from .process_groups import ProcessGroups, earlier_worlds

__all__ = [
    "ELSEWHERE",
    "SUBCLASSES_HAVE_VIEWS",
    "as_dtensor",
    "beginning",
    "gathered",
    "gathered_as",
    "layout_of",
    "leaf_of",
    "padded_slice",
    "refuse_slices_of_others",
    "slice_in_buffer",
    "to_dtensor",
    "warn_of_slice",
    "with_values",
]


def as_dtensor(parameter: Tensor) -> DTensor:
    """The same object: a parameter that is cut is a DTensor, though torch types it as an `nn.Parameter`."""
    assert isinstance(parameter, DTensor), type(parameter)
    return parameter


#: Earlier versions of torch, 2.9 for one, make no views of a subclass of DTensor: parameters are plain DTensors there.
SUBCLASSES_HAVE_VIEWS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


#: True once this process has warned of a pickle that has a slice.
_has_warned = False

#: The axes of the mesh of a parameter that is on other ranks. PEFT takes the sizes of a layer from the slice of its
#: weight, unless the axes of the mesh have this name or none: then the layer computes the whole, as a model of this
#: library does.
ELSEWHERE = ("fsdp",)


def _whole_number(operator: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The number of a tensor of one element, in whole: torch's own would be that of this rank's slice."""
    number = args[0]
    if isinstance(number, DTensor) and not all(isinstance(p, Replicate) for p in number.placements):
        number = number.redistribute(placements=[Replicate()] * len(number.placements))
    return operator(number.to_local() if isinstance(number, DTensor) else number)


if isinstance(dtensor_handlers, dict):
    for _number in operators("_local_scalar_dense"):
        dtensor_handlers.setdefault(_number, _whole_number)


def slice_in_buffer(whole: Tensor, layout: Layout, rank: int, device: torch.device) -> Tensor:
    """A rank's slice of a whole tensor, at the beginning of memory that holds the padded slice."""
    part = whole[true_slice(layout, whole.shape, rank)]
    length = layout.local_shape(layout.padded(whole.shape))
    if tuple(part.shape) == length:
        return part.to(device).clone(memory_format=torch.contiguous_format)
    buffer = torch.zeros(length, dtype=whole.dtype, device=device)
    return beginning(buffer, part.shape).copy_(part)


def leaf_of(parameter: DTensor) -> Tensor:
    """A plain tensor on the memory of a DTensor's slice, padding included."""
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
    """The first elements of `x` along each dim, of this shape: a view, or `x` itself."""
    return x if x.shape == shape else x[tuple(slice(size) for size in shape)]


def to_dtensor(local: Tensor, layout: Layout, shape: tuple[int, ...], groups: ProcessGroups) -> DTensor:
    """A rank's slice as a DTensor on a mesh whose axes are the layout's digits, in the layout's own order."""
    digits: list[tuple[Digit, Any]] = [(d, Shard(dim)) for dim, ds in enumerate(layout.dims or ()) for d in ds]
    digits += [(d, Replicate()) for d in layout.replicas]
    kind = local.device.type
    several = [groups.of((digit,)) for digit, _ in digits]
    names = tuple(map(str, range(max(len(several), 1))))
    if len(several) < 2:
        mesh = DeviceMesh.from_group(several[0] if several else groups.of(()), kind, mesh_dim_names=names)
    else:
        ranks = _ranks(groups.base, [digit for digit, _ in digits])
        mesh = DeviceMesh.from_group(several, kind, mesh=ranks, mesh_dim_names=names)
    # No mesh of an earlier default group, and none of the user's, must be equal: torch caches results of operators on
    # the mesh that came first.
    mesh = without_names(mesh, earlier_worlds())
    if not digits:  # one device
        return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [p for _, p in digits], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _ranks(first: int, digits: Sequence[Digit]) -> Tensor:
    """The ranks of a mesh whose axes are digits: [c0, c1, …] = first + Σ c_i · stride_i."""
    ranks = torch.full((), first, dtype=torch.int, device="cpu")
    for digit in digits:
        ranks = ranks.unsqueeze(-1) + torch.arange(digit.size, dtype=torch.int, device="cpu") * digit.stride
    return ranks


@functools.lru_cache(256)
def _digits(mesh: DeviceMesh) -> tuple[Digit, ...]:
    """The digits that the axes of a mesh of `to_dtensor` are; none of a mesh of one rank."""
    ranks = mesh.mesh.to(torch.int)
    if ranks.numel() == 1:
        return ()
    rows = (ranks[(0,) * axis + (slice(2),) + (0,) * (ranks.dim() - axis - 1)].tolist() for axis in range(ranks.dim()))
    return tuple(Digit(size, row[1] - row[0]) for size, row in zip(ranks.shape, rows))


def layout_of(tensor: DTensor) -> Layout | None:
    """The layout of a DTensor that `to_dtensor` made, or of an operator's result on such a mesh; None for a foreign
    DTensor."""
    digits = _digits(tensor.device_mesh) if lost_names(tensor.device_mesh) else ()
    if not digits:
        return None
    dims: list[list[Digit]] = [[] for _ in tensor.shape]
    for digit, placement in zip(digits, tensor.placements):
        if isinstance(placement, Shard):
            dims[placement.dim].append(digit)
        elif not isinstance(placement, Replicate):
            return None
    return Layout.of(tensor.device_mesh.size(), dims)


def gathered(parameter: DTensor) -> Tensor:
    """The whole value of a parameter, on every rank of its mesh, in contiguous memory of its own.

    The ranks of the mesh call this together. (`full_tensor` does the same, and logs a warning where several digits
    cut one dim.)
    """
    return gathered_as(parameter, leaf_of(parameter).detach().clone())


def gathered_as(parameter: DTensor, value: Tensor) -> Tensor:
    """The whole of a tensor that is laid out as `parameter` is.

    Args:
        parameter: gives the layout.
        value: this rank's slice, padded to the length of all ranks' slices; not written to.
    """
    for axis, placement in reversed(list(enumerate(parameter.placements))):
        if isinstance(placement, Shard) and parameter.device_mesh.size(axis) > 1:
            value = value.contiguous()
            parts = [torch.empty_like(value) for _ in range(parameter.device_mesh.size(axis))]
            group = parameter.device_mesh.get_group(axis)
            dist.all_gather([_bytes(part) for part in parts], _bytes(value), group=group)
            value = torch.cat(parts, placement.dim)
    return beginning(value, parameter.shape).contiguous()


def padded_slice(parameter: DTensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is laid out as `parameter` is, padded to the length of all ranks' slices."""
    layout = layout_of(parameter)
    length = tuple(part.shape) if layout is None else layout.local_shape(layout.padded(tuple(parameter.shape)))
    if tuple(part.shape) == length:
        return part
    padded = part.new_zeros(length)
    beginning(padded, part.shape).copy_(part)
    return padded


def refuse_slices_of_others(tensors: Iterable[Tensor], like: DTensor, name: str = "") -> None:
    """Check that slices that are to be written beside those of `like` are this rank's. A DTensor that was pickled is
    read with the slice of the rank that pickled it.

    Args:
        tensors: any, of which DTensors are looked at.
        like: has this rank's slice.
        name: the parameter's, for the error.

    Raises:
        SettingError: a slice is that of another rank.
    """
    for x in tensors:
        if not isinstance(x, DTensor) or x.device_mesh is like.device_mesh:
            continue
        ranks, saved, rank = x.device_mesh.mesh, x.device_mesh.get_coordinate(), dist.get_rank()
        other = rank if saved is None else int(ranks[tuple(saved)])
        if other != rank and any(isinstance(placement, Shard) for placement in x.placements):
            target = repr(name) if name else "a tensor"
            raise SettingError(
                f"the slice of rank {other} is loaded on rank {rank}, into {target} of shape {list(x.shape)}: rank "
                f"{other} has saved its slices, with torch.save for example, and the file has no others",
                legal="torch.save(net.state_dict(), path) inside of `with model.whole(rank=0) as net:`; "
                "sw.save_checkpoint; a file for each rank, which the same rank loads",
            )


def warn_of_slice(x: DTensor, name: str) -> None:
    """Say once, where a tensor is pickled that is cut, that the other ranks' slices are not in the pickle."""
    global _has_warned
    if _has_warned or not any(isinstance(p, Shard) and x.device_mesh.size(i) > 1 for i, p in enumerate(x.placements)):
        return
    _has_warned = True
    target = repr(name) if name else "a tensor"
    warnings.warn(
        f"pickle, or torch.save, of {target} of shape {list(x.shape)}: rank {dist.get_rank()} saves its "
        f"slice of shape {list(x.to_local().shape)}, which it alone can load. Whole tensors: "
        "`with model.whole(rank=0) as net:`; a checkpoint of all ranks: sw.save_checkpoint",
        stacklevel=3,
    )


def _bytes(tensor: Tensor) -> Tensor:
    """Contiguous memory as bytes: every backend sends these, whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def with_values(parameter: DTensor, whole: Tensor) -> DTensor:
    """The parameter, with this rank's part of a whole tensor written into it. A parameter of other ranks stays
    empty."""
    if whole_shape(parameter) == parameter.shape:
        local, layout = parameter.to_local().detach(), layout_of(parameter)
        own_rank = dist.get_rank() - int(parameter.device_mesh.mesh.min())
        local.copy_(whole if layout is None else whole[true_slice(layout, tuple(parameter.shape), own_rank)])
        torch.autograd.graph.increment_version(parameter)
    return parameter
