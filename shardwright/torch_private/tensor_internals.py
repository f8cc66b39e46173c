"""Private names of tensors and parameters.

1. Any tensor: its number of changes in place, its storage, whether it is a view, how it is compared.
2. A DTensor: its slice on this rank, its mesh and placements.
3. A leaf: the hooks of its gradient, which can be moved to another leaf.

Example: ``version_of(x)`` of ``x = torch.zeros(2)`` is 0, and 1 after ``x.add_(1)``. ``is_view(x[:1])`` is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import version_lookup

__all__ = [
    "PARAMETER",
    "GradientHooks",
    "gradient_hooks",
    "is_view",
    "local_tensor",
    "move_gradient_hooks",
    "set_local_tensor",
    "shell",
    "spec_of",
    "storage_id",
    "take_comparisons",
    "version_of",
]

PARAMETER = "_is_param"  # attribute of a tensor that ``isinstance(tensor, nn.Parameter)`` asks for


def version_of(x: Tensor) -> int:
    """A number that grows when `x` is written to in place."""
    return version_lookup.read_private(x, "_version", "noticing a tensor that is changed in place")


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that tells one storage from another, for fake and meta tensors too."""
    return version_lookup.read_private(storage, "_cdata", "telling views of one tensor from other tensors")


def is_view(x: Tensor) -> bool:
    """True where autograd knows `x` as a view of another tensor."""
    return version_lookup.read_private(x, "_is_view", "pipelines that split the backward")()


def local_tensor(x: object) -> Tensor:
    """The slice of a DTensor on this rank itself; ``to_local()`` would make an autograd node and a view (60 us)."""
    return version_lookup.read_private(x, "_local_tensor", "parameters that are DTensors")


def set_local_tensor(x: object, local: Tensor) -> None:
    """Give a DTensor another slice, of the same shape and dtype."""
    local_tensor(x)  # an error where this torch has no such name
    x._local_tensor = local  # type: ignore[attr-defined]  # a slot of DTensor


def spec_of(x: object) -> Any:
    """The mesh, placements, shape and strides of a DTensor in one object; None for a plain tensor."""
    spec = getattr(x, "_spec", None)
    if spec is None and hasattr(x, "placements"):
        raise version_lookup.missing_error("torch.distributed.tensor.DTensor._spec", "parameters that are DTensors")
    return spec


def take_comparisons(take: Callable[[object, object], tuple[object, object]]) -> Callable[[], None]:
    """Let ``torch.testing.assert_close`` compare what a function gives for its two arguments.

    Args:
        take: (actual, expected) -> the two that are handed on to torch.

    Returns:
        A function that puts torch's own back. Both do nothing where torch takes no DTensors apart, as in torch 2.9.
    """
    module, name = version_lookup.lookup("torch.testing._comparison"), "_unwrap_dtensor_for_comparison"
    plain = getattr(module, name, None)
    if plain is None:
        return lambda: None

    def taken(actual: object, expected: object) -> object:
        return plain(*take(actual, expected))

    setattr(module, name, taken)
    return lambda: setattr(module, name, plain) if getattr(module, name) is taken else None


def gradient_hooks(tensor: Tensor) -> GradientHooks:
    """The hooks of a leaf from ``register_hook`` and ``register_post_accumulate_grad_hook``."""
    return GradientHooks(
        version_lookup.read_private(tensor, "_backward_hooks", "hooks of parameters") or {},
        version_lookup.read_private(tensor, "_post_accumulate_grad_hooks", "hooks of parameters") or {},
    )


def move_gradient_hooks(old: Tensor, new: Tensor) -> None:
    """Put a leaf's hooks onto another leaf. The handles of the old hooks still remove them.

    A hook that the old leaf gets later is its own."""
    hooks = gradient_hooks(old)
    if hooks.before:
        if old is not new:
            old._backward_hooks = None
        new._backward_hooks = hooks.before
    if hooks.after:
        new._post_accumulate_grad_hooks = hooks.after


class GradientHooks(NamedTuple):
    """The hooks of a leaf, by number: `before` get its gradient, `after` get the leaf once its gradient is added."""

    before: dict[int, Any]
    after: dict[int, Any]


def shell(kind: type[Tensor], like: Any, storage_offset: int = 0, parameter: bool = False) -> Any:
    """A tensor of a subclass without elements.

    Args:
        kind: the subclass.
        like: (shape, strides, dtype, device, requires_grad).
        parameter: True where ``isinstance(made, nn.Parameter)`` is to be true.
    """
    shape, strides, dtype, device, requires_grad = like
    made = kind._make_wrapper_subclass(
        kind,
        shape,
        strides=strides,
        storage_offset=storage_offset,
        dtype=dtype,
        device=device,
        requires_grad=requires_grad,
    )
    if parameter:
        setattr(made, PARAMETER, True)
    return made
