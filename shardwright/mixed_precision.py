"""Mixed precision: parameters stored in one type, computed with in another, their gradients summed in a third.

    stored       what the user's model has: float32, say. The optimizer, clipping and checkpoints see nothing else.
    computed     each call casts a parameter to `param_dtype` where it is stored, then brings it to its use: a gather, or the
                 send to another stage, moves the cast values, which are half as many bytes
    gradient     comes in `param_dtype`, is summed over ranks in `reduce_dtype`, and is handed over in the stored type

The casts are no operators of the captured graph. A parameter is captured in the type that operators read, so that a
mark, a layout, a search sees the model as it computes; `Value.master` says how it is stored, and the conversion that
brings it from its storage to its use casts on the way (`plan.instructions.Move`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from .errors import SettingError
from .graph import Master
from .pytree_objects import closed, opened
from .torch_private import pytree

__all__ = ["MixedPrecision", "captured_types", "casts", "masters", "one_device"]

_LEGAL = (
    "shardwright.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), or a dict of its arguments"
)


@dataclass(frozen=True)
class MixedPrecision:
    """In which types a model is stored, computed, and its gradients summed: the policy of `torch.distributed.fsdp`
    (`MixedPrecisionPolicy`), with its words.

    The parameters stay as the model has them, float32 say: master weights, which the optimizer updates and checkpoints
        hold.
    Every call casts them, and nothing else has to be done: no autocast. Floating parameters of every width are cast,
        others
    (integers, bools, complex numbers) are not; buffers keep their type. Under a `param_dtype` of 16 bits batch norms
    keep their parameters too, in the float32 of their running statistics, as torch's kernels ask (FSDP2 casts them, and
    torch then refuses). Parameters of `loss_fn` keep their type: the loss gets what the model returns.

    Args:
        param_dtype: the type in which the model computes, and in which parameters are gathered and sent; None: as they
            are stored.
        reduce_dtype: the type in which gradients of parameters are summed over devices; None: `param_dtype`. Each
            device's own gradient is in `param_dtype`; accumulated over backwards (`no_sync`) or micro-batches it is in
            the stored type. Where all devices are in one process, the sum of a parameter's gradient may be part of the
            operator that makes it: then it is rounded once, to `param_dtype`.
        output_dtype: the type to which floating results of the model are cast, before the loss; None: as they are.
        cast_forward_inputs: whether floating inputs of the model are cast to `param_dtype`.

    Raises:
        SettingError: not a floating type, or not a bool.

    Example:
        >>> model = sw.AutoParallel(net, loss_fn, mixed_precision=sw.MixedPrecision(torch.bfloat16,
        reduce_dtype=torch.float32))
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype) or dtype not in _TYPES:
                raise SettingError(
                    f"mixed_precision: {name}={dtype!r}", legal=f"{', '.join(map(str, _TYPES))}, or None"
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise SettingError(
                f"mixed_precision: cast_forward_inputs={self.cast_forward_inputs!r}", legal="True or False"
            )

    @classmethod
    def of(cls, given: Any) -> MixedPrecision | None:
        """A policy from what a user gives: one, one of FSDP2's, a dict of the arguments, a type (`param_dtype`), or
        None.

        Raises:
            SettingError: none of these, or an argument that there is not.
        """
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, torch.dtype):
            return cls(given)
        names = [f.name for f in fields(cls)]
        if is_dataclass(given) and type(given).__name__ == "MixedPrecisionPolicy":  # as this version of torch has it
            said = {f.name: getattr(given, f.name) for f in fields(given)}
            given = {name: said[name] for name in said if name in names or said[name] != getattr(type(given)(), name)}
        if not isinstance(given, Mapping) or set(given) - set(names):
            raise SettingError(f"mixed_precision={given!r}", legal=_LEGAL)
        return cls(**given)

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """Those that it names."""
        return tuple(t for t in (self.param_dtype, self.reduce_dtype, self.output_dtype) if t is not None)


#: The types in which operators compute and sums are taken.
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: What may have running statistics.
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def masters(policy: MixedPrecision | None, net: nn.Module) -> dict[str, Master]:
    """How the parameters of a model are stored, by all their names, of those for which that is not how they are
    computed.

    Raises:
        SettingError: one that is trained and has fewer bits than float32 to be updated in; running statistics beside
            which torch normalises nothing of the policy's type.
    """
    if policy is None:
        return {}
    named, types = list(net.named_parameters(remove_duplicate=False)), captured_types(policy, net)
    narrow = [
        n
        for n, p in named
        if policy.param_dtype is not None and p.requires_grad and p.dtype.is_floating_point and p.dtype.itemsize < 4
    ]
    if narrow:
        first = dict(named)[narrow[0]]
        more = f" and {len(narrow) - 1} more" if len(narrow) > 1 else ""
        raise SettingError(
            f"mixed_precision: the parameter {narrow[0]!r}{more} is stored as {first.dtype}, in which the "
            "optimizer would lose most of its updates",
            strategy=f"mixed_precision: param_dtype={policy.param_dtype}",
            legal="net.float() before AutoParallel: the policy casts; or requires_grad_(False)",
        )
    out = {}
    for name, parameter in named:
        computed = types.get(id(parameter), parameter.dtype)
        made = Master(parameter.dtype, policy.reduce_dtype or computed)
        if parameter.dtype.is_floating_point and made != (computed, computed):
            out[name] = made
    return out


def captured_types(policy: MixedPrecision | None, net: nn.Module) -> dict[int, torch.dtype]:
    """In which types a model's parameters are captured, by their ids, where those are not their own.

    Raises:
        SettingError: running statistics beside which torch normalises nothing of the policy's type.
    """
    if policy is None or policy.param_dtype is None:
        return {}
    kept = _beside_statistics(policy.param_dtype, net)
    return {
        id(p): policy.param_dtype
        for p in net.parameters()
        if p.dtype.is_floating_point and p.dtype != policy.param_dtype and id(p) not in kept
    }


def _beside_statistics(computed: torch.dtype, net: nn.Module) -> set[int]:
    """The parameters that keep the type of the running statistics beside them, by their ids."""
    kept: set[int] = set()
    for path, module in net.named_modules():
        running = getattr(module, "running_mean", None)
        if not isinstance(module, _NORMS) or running is None or running.dtype == computed:
            continue
        own = {p.dtype for p in module.parameters(recurse=False)}
        if computed.itemsize > 2 or running.dtype != torch.float32 or own - {torch.float32}:
            raise SettingError(
                f"mixed_precision: {path or 'the model'} has running statistics of {running.dtype}, beside which "
                f"torch normalises nothing of {computed}",
                strategy=f"mixed_precision: param_dtype={computed}",
                legal=f"statistics and parameters of {computed}, or of torch.float32 under a param_dtype of 16 bits",
            )
        kept.update(id(p) for p in module.parameters(recurse=False))
    return kept


@contextlib.contextmanager
def casts(policy: MixedPrecision | None, net: nn.Module) -> Iterator[None]:
    """While active, a call of the model casts what comes in and goes out, as the policy says."""
    if policy is None:
        yield
        return

    def entering(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _cast((args, kwargs), policy.param_dtype)

    hooks = []
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        hooks.append(net.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
    if policy.output_dtype is not None:
        hooks.append(net.register_forward_hook(lambda _, args, result: _cast(result, policy.output_dtype)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def one_device(policy: MixedPrecision | None, net: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """What a model returns on one device under a policy, in plain PyTorch; its parameters get gradients in their own
    type."""
    if policy is None:
        return net(*args, **kwargs)
    types = captured_types(policy, net)
    cast: dict[int, torch.Tensor] = {}
    state = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if id(parameter) in types:
            state[name] = cast.setdefault(id(parameter), parameter.to(types[id(parameter)]))
    with casts(policy, net):
        return torch.func.functional_call(net, state, args, dict(kwargs), tie_weights=False)


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Every floating tensor of a tree, or in an object of it, in one type."""

    def leaf(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dtype != dtype else x

    return closed(pytree.tree_map(leaf, opened(tree)))
