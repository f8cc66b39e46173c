"""Edits of a sharded gradient between backward and step, on each rank's own slice.

    p.grad[:2] = 0              rows of the whole gradient: each rank sets the rows that it has
    p.grad.mul_(mask)           a plain tensor has the whole gradient's shape: each rank takes its part
    torch.randn_like(p.grad)    the numbers of the whole gradient; each rank keeps its part
    p.grad[0].mul_(2)           refused where the row is a gathered copy: the gradient would not change

Nothing is communicated unless an index or a value is a DTensor of another layout than the gradient's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...errors import SettingError
from ...partition.padded_dims import true_slice
from ...torch_private import local_tensor, pytree, spec_of, storage_id
from .dtensors import layout_of

__all__ = ["RANDOM", "VIEWS", "changes", "drawn_like", "is_copy", "lost", "part_of", "put"]

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


def changes(function: Any) -> bool:
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


def is_copy(gradient: DTensor, part: DTensor, function: Any, args: tuple[object, ...]) -> bool:
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


def _here(gradient: DTensor) -> tuple[slice, ...] | None:
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
    own_slices = _here(gradient)
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
    own_slices = _here(gradient) if local.numel() else None
    if not local.numel():
        return
    if own_slices is None:
        local[index] = value
        return
    changed = torch.zeros(gradient.shape, dtype=torch.bool, device=local.device)
    made = torch.empty(gradient.shape, dtype=local.dtype, device=local.device)
    changed[index], made[index] = True, value
    local.copy_(torch.where(changed[own_slices], made[own_slices], local))


def drawn_like(function: Callable[..., Tensor], gradient: DTensor, options: Mapping[str, Any]) -> Tensor:
    """This rank's part of the random numbers that one device would draw."""
    local = local_tensor(gradient)
    if not any(isinstance(p, Shard) for p in gradient.placements):
        return function(local, **options)
    drawn = function(torch.empty(gradient.shape, dtype=local.dtype, device=local.device), **options)
    if not local.numel():  # an empty rank draws too: generators stay alike
        return drawn.new_empty(local.shape)
    return drawn[_here(gradient)].contiguous()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
