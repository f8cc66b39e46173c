"""Changes of a cut gradient between backward and step, on each rank's own slice.

    p.grad[:2] = 0              rows of the whole gradient: each rank sets those that it has
    p.grad.mul_(mask)           a plain tensor is one of the whole gradient's shape: each rank takes its part
    torch.randn_like(p.grad)    the numbers of the whole gradient, of which each rank keeps its part
    p.grad[0].mul_(2)           refused where the row is a copy, gathered from the ranks that have it: nothing would change

Nothing is sent but where an index or a value is a DTensor that lies otherwise than the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...errors import SettingError
from ...partition.uneven import true_slice
from ...torch_private import local_tensor, pytree, spec_of, storage_id
from .dtensors import layout_of

__all__ = ["RANDOM", "VIEWS", "changes", "drawn_like", "is_copy", "lost", "part_of", "put"]

#: Functions that give a view of a tensor on one device.
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
        Tensor.T.__get__,
        Tensor.mT.__get__,
        Tensor.data.__get__,
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

#: Functions that draw numbers of a tensor's shape.
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
    """The error of a change that would be one of a copy."""
    return SettingError(
        f"{function.__name__} of a part of a gradient that is cut over several ranks: the part is a copy, "
        "and the gradient would stay as it is",
        legal="p.grad[:2] = p.grad[:2] * 2, p.grad[:2] = 0, or p.grad.mul_(mask) with a mask of the "
        "gradient's whole shape",
    )


def is_copy(gradient: DTensor, part: DTensor, function: Any, args: tuple) -> bool:
    """True where `part`, which a function of `VIEWS` has made of a gradient, lies in other memory.

    Args:
        args: of the function.
    """
    if function is Tensor.__getitem__ and any(
        isinstance(i, (Tensor, list)) for i in pytree.tree_leaves(args[1], is_leaf=lambda i: isinstance(i, list))
    ):
        return False  # it is a copy on one device, too
    mine, whole = (storage_id(local_tensor(x).untyped_storage()) for x in (part, gradient))
    return mine != whole


def _here(gradient: DTensor) -> tuple[slice, ...] | None:
    """The part of the whole gradient that this rank has; None: whole."""
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
    """This rank's part of a plain tensor that stands beside the whole gradient, broadcast as torch does; None: it does
    not fit."""
    here = _here(gradient)
    if here is None:
        return whole
    shape, missing = gradient.shape, gradient.dim() - whole.dim()
    if missing < 0 or any(size not in (1, shape[d + missing]) for d, size in enumerate(whole.shape)):
        return None
    return whole[tuple(slice(None) if size == 1 else here[d + missing] for d, size in enumerate(whole.shape))]


def put(gradient: DTensor, index: Any, value: Any) -> None:
    """``gradient[index] = value``, of the whole gradient."""
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
    here = _here(gradient) if local.numel() else None
    if not local.numel():
        return
    if here is None:
        local[index] = value
        return
    changed = torch.zeros(gradient.shape, dtype=torch.bool, device=local.device)
    made = torch.empty(gradient.shape, dtype=local.dtype, device=local.device)
    changed[index], made[index] = True, value
    local.copy_(torch.where(changed[here], made[here], local))


def drawn_like(function: Callable[..., Tensor], gradient: DTensor, given: Mapping[str, Any]) -> Tensor:
    """This rank's part of the random numbers that one device draws."""
    local = local_tensor(gradient)
    if not any(isinstance(p, Shard) for p in gradient.placements):
        return function(local, **given)
    drawn = function(torch.empty(gradient.shape, dtype=local.dtype, device=local.device), **given)
    if not local.numel():  # a rank that has nothing draws as many numbers as the others
        return drawn.new_empty(local.shape)
    return drawn[_here(gradient)].contiguous()


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
