"""Private names of operators.

1. One operator: its schema, the name of its overload, the overload of a custom operator.
2. Operators by name, those alone that this version of torch has (`operators`, `fused_optimizers`, `foreach_edits`).

Example: ``overload_name(torch.ops.aten.add.Tensor)`` is "Tensor", and ``overload_name(torch.add)`` is "".
``operators("_softmax", "nowhere")`` has the one overload ``aten._softmax.default``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import version_lookup

__all__ = [
    "CROSS_MAP_NORM",
    "OpOverload",
    "OpOverloadPacket",
    "direct_apply",
    "foreach_edits",
    "fused_optimizers",
    "operators",
    "overload_name",
    "overload_of",
    "schema_of",
    "torch_function",
    "use_foreach",
]

#: Types of ``torch.ops.aten.add.Tensor`` and of ``torch.ops.aten.add``; their names are private, the types are not.
if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)


#: The name of the `torch.autograd.Function` of ``nn.CrossMapLRN2d``.
CROSS_MAP_NORM = "torch.nn.modules._functions.CrossMapLRN2d"


def schema_of(target: Any) -> Any:
    """The schema of an overload; None for anything else, such as a plain function."""
    try:
        return target._schema
    except AttributeError:
        if isinstance(target, OpOverload):
            raise version_lookup.missing_error("torch._ops.OpOverload._schema", "reading a captured model") from None
        return None


def overload_name(target: object) -> str:
    """``"Tensor"`` for ``aten.add.Tensor``; empty for anything but an overload."""
    name = getattr(target, "_overloadname", None)
    if name is None and isinstance(target, OpOverload):
        raise version_lookup.missing_error("torch._ops.OpOverload._overloadname", "reading a captured model")
    return name or ""


def overload_of(custom_op: object) -> object:
    """The overload of a function made with ``torch.library.custom_op``; None for anything else."""
    if isinstance(custom_op, version_lookup.name_of_torch("CustomOpDef")):
        return version_lookup.read_private(custom_op, "_opoverload", "a rule for a torch.library.custom_op")
    return None


def direct_apply(function: type[torch.autograd.Function]) -> Any:
    """``function.apply`` without its preparation for torch.func, which takes the host as long as two `torch.add`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # a class of torch's in C++


def operators(*names: str) -> tuple[Any, ...]:
    """Overloads of ATen that not every version of torch has, or whose names are private: those of this version.

    Args:
        names: such as ``"_softmax.default"``; a name without an overload means the default one.
    """
    found = (version_lookup.lookup(f"torch.ops.aten.{name if '.' in name else name + '.default'}") for name in names)
    return tuple(overload for overload in found if overload is not None)


def torch_function(name: str) -> object:
    """The function ``torch.NAME`` of torch's C++ part, without a Python layer; None if there is none."""
    return getattr(version_lookup.lookup("torch._C._VariableFunctions"), name, None)


def fused_optimizers() -> frozenset[Any]:
    """The kernels that are whole optimizer steps over lists of tensors."""
    return frozenset(version_lookup.lookup(f"torch._fused_{name}_") for name in ("sgd", "adam", "adamw", "adagrad")) - {
        None
    }


def foreach_edits() -> frozenset[Any]:
    """The functions that change each tensor of a list in place, by one number, one scalar tensor, or a number each."""
    found = (
        version_lookup.lookup(f"torch._foreach_{name}_")
        for name in ("mul", "div", "add", "sub", "clamp_min", "clamp_max")
    )
    return frozenset(function for function in found if function is not None)


def use_foreach(kind: type) -> None:
    """Have ``clip_grad_norm_`` and its kin take tensors of a subclass in lists, as DTensors."""
    known = version_lookup.lookup("torch.utils._foreach_utils._foreach_supported_types")
    if known is not None and kind not in known:
        known.append(kind)
