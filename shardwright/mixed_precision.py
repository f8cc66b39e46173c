"""Mixed precision: parameters stored in one dtype, computed with in another, their gradients summed in a third.

    stored       the dtype of the user's model: float32, say. The optimizer, clipping and checkpoints see nothing else.
    computed     each call casts a parameter to `param_dtype` where it is stored, then redistributes it to its use: a
                 gather, or the send to another stage, moves the cast values, which are half as many bytes
    gradient     is computed in `param_dtype`, summed over ranks in `reduce_dtype`, and handed over in the stored dtype

Example: a parameter of 1024 x 1024 in float32 is cut over 4 ranks, with param_dtype=torch.bfloat16: a rank stores
1 MiB, and its slice in the gather is 0.5 MiB.

The casts are no operators of the captured graph. A parameter is captured in the dtype that operators read, so that
marks, layouts and searches see the model as it computes. `Value.master` has the stored dtype, and the redistribution
of a parameter from its storage to its use casts on the way (`partition.local_program.Redistribute`).

Unlike `autocast`, which adds casts operator by operator, a policy casts parameters and inputs once a call. A parameter
that operators read through casts to one narrower dtype alone, under autocast or by the forward itself, is stored and
captured in the same way (`with_masters`): it is gathered after the cast, and its gradient is summed as it is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from .errors import SettingError
from .graph import Graph, Master, Op, Value, map_values, values_in
from .pytree_objects import closed, opened
from .torch_private import pytree

__all__ = [
    "MixedPrecision",
    "captured_types",
    "casts",
    "is_float_cast",
    "masters",
    "narrowed_to",
    "one_device",
    "with_masters",
]

_LEGAL = (
    "shardwright.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), or a dict of its arguments"
)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which a model is stored and computed, and in which its gradients are summed: the policy of
    `torch.distributed.fsdp` (`MixedPrecisionPolicy`), with the same arguments.

    The parameters stay as the model has them, float32 say: master weights, which the optimizer updates and
    checkpoints hold. Every call casts them; no autocast is needed. Floating parameters of every width are cast, other
    parameters (integers, bools, complex numbers) are not; buffers keep their dtype. Under a `param_dtype` of 16 bits
    batch norms keep their parameters too, in the float32 of their running statistics, as torch's kernels require
    (FSDP2 casts them, and torch then refuses). Parameters of `loss_fn` keep their dtype: the loss gets the results of
    the model.

    Args:
        param_dtype: the dtype in which the model computes, and in which parameters are gathered and sent; None: as
            they are stored.
        reduce_dtype: the dtype in which gradients of parameters are summed over devices; None: `param_dtype`. Each
            device's own gradient is in `param_dtype`; accumulated over backwards (`no_sync`) or micro-batches it is
            in the stored dtype. Where all devices are in one process, the sum of a parameter's gradient may be part
            of the operator that computes it: then it is rounded once, to `param_dtype`.
        output_dtype: the dtype to which floating results of the model are cast, before the loss; None: as they are.
        cast_forward_inputs: True: floating inputs of the model are cast to `param_dtype`.

    Raises:
        SettingError: not a floating dtype, or not a bool.

    Example:
        >>> policy = sw.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
        >>> model = sw.AutoParallel(net, loss_fn, mixed_precision=policy)
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
    def of(cls, policy: object) -> MixedPrecision | None:
        """The policy of a user's argument: a policy, one of FSDP2's, a dict of the arguments, a dtype
        (`param_dtype`), or None.

        Raises:
            SettingError: none of these, or an unknown argument.
        """
        if policy is None or isinstance(policy, cls):
            return policy
        if isinstance(policy, torch.dtype):
            return cls(policy)
        names = [f.name for f in fields(cls)]
        # FSDP2's policy: its fields differ between versions of torch; unknown ones are dropped at their default
        if is_dataclass(policy) and not isinstance(policy, type) and type(policy).__name__ == "MixedPrecisionPolicy":
            settings = {f.name: getattr(policy, f.name) for f in fields(policy)}
            policy = {
                name: settings[name]
                for name in settings
                if name in names or settings[name] != getattr(type(policy)(), name)
            }
        if not isinstance(policy, Mapping) or set(policy) - set(names):
            raise SettingError(f"mixed_precision={policy!r}", legal=_LEGAL)
        return cls(**policy)

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the policy names."""
        return tuple(t for t in (self.param_dtype, self.reduce_dtype, self.output_dtype) if t is not None)


#: The dtypes in which operators compute and gradients are summed.
_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Modules that may have running statistics.
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
    """The stored dtypes of a model's parameters, by all their names, where stored and computed dtypes differ.

    Args:
        policy: the policy; None: no parameter differs.
        net: the model.

    Raises:
        SettingError: a trained parameter has fewer bits than float32, too few for its updates; or torch has no
            normalisation of the policy's dtype beside the running statistics of a module.
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
        computed = types.get(parameter, parameter.dtype)
        made = Master(parameter.dtype, policy.reduce_dtype or computed)
        if parameter.dtype.is_floating_point and made != (computed, computed):
            out[name] = made
    return out


def captured_types(policy: MixedPrecision | None, net: nn.Module) -> dict[torch.Tensor, torch.dtype]:
    """The dtypes in which a model's parameters are captured, where they differ from their own.

    Args:
        policy: the policy; None: no parameter differs.
        net: the model.

    Raises:
        SettingError: torch has no normalisation of the policy's dtype beside the running statistics of a module.
    """
    if policy is None or policy.param_dtype is None:
        return {}
    normalising = _beside_statistics(policy.param_dtype, net)
    return {
        p: policy.param_dtype
        for p in net.parameters()
        if p.dtype.is_floating_point and p.dtype != policy.param_dtype and p not in normalising
    }


def with_masters(graph: Graph) -> Graph:
    """The graph in which a parameter that is only read through casts to one narrower dtype is read in that dtype.

    The casts are dropped: a parameter is cast where it is stored. A cast commutes with a gather, so a gather moves the
    narrow values. The gradient passes such a cast by widening, which is exact for each term of a sum, so the terms are
    summed in the stored dtype.

    Example: under bfloat16 autocast, ``w -> w_bfloat16 -> linear`` becomes ``w (bfloat16, stored as float32) ->
    linear``. A weight that an embedding reads as well, in float32, stays as it is.
    """
    reads = graph.consumers()
    returned = {v.name for v in (*values_in(graph.outputs), *graph.updates.values())}
    now: dict[str, Value] = {}  # name of a parameter or of its cast -> the parameter as it is read
    dropped: set[str] = set()
    for name, value in graph.parameters.items():
        consumers = [op for op, _ in reads.get(value.name, ())]
        types = {narrowed_to(op) for op in consumers}
        if value.master is None and name not in graph.updates and value.name not in returned and len(types) == 1:
            if (dtype := types.pop()) is None or any(op.output(0).name in returned for op in consumers):
                continue
            read = replace(value, dtype=dtype, master=Master(value.dtype, value.dtype))
            now |= dict.fromkeys((value.name, *(op.output(0).name for op in consumers)), read)
            dropped.update(op.name for op in consumers)
    if not now:
        return graph
    change = lambda tree: map_values(tree, lambda v: now.get(v.name, v))
    return replace(
        graph,
        parameters=change(graph.parameters),
        ops=tuple(
            replace(op, args=change(op.args), kwargs=change(op.kwargs), inputs=change(op.inputs))
            for op in graph.ops
            if op.name not in dropped
        ),
    )


def is_float_cast(op: Op) -> bool:
    """True for an operator that changes the dtype of floating numbers and nothing else."""
    plain = op.target is torch.ops.aten.to.dtype and not op.argument("copy") and op.argument("memory_format") is None
    return plain and op.inputs[0].dtype.is_floating_point and op.output(0).dtype.is_floating_point


def narrowed_to(op: Op) -> torch.dtype | None:
    """The dtype to which an operator casts its input, where the dtype is narrower; else None."""
    if not is_float_cast(op) or op.mark is not None:
        return None
    before, after = op.inputs[0], op.output(0)
    narrower = torch.promote_types(before.dtype, after.dtype) == before.dtype != after.dtype
    return after.dtype if narrower and before.requires_grad == after.requires_grad else None


def _beside_statistics(computed: torch.dtype, net: nn.Module) -> set[torch.Tensor]:
    """The parameters that keep the dtype of the running statistics beside them."""
    out: set[torch.Tensor] = set()
    for path, module in net.named_modules():
        running = getattr(module, "running_mean", None)
        if not isinstance(module, _NORMS) or running is None or running.dtype == computed:
            continue
        dtypes = {p.dtype for p in module.parameters(recurse=False)}
        if computed.itemsize > 2 or running.dtype != torch.float32 or dtypes - {torch.float32}:
            raise SettingError(
                f"mixed_precision: {path or 'the model'} has running statistics of {running.dtype}, beside which "
                f"torch normalises nothing of {computed}",
                strategy=f"mixed_precision: param_dtype={computed}",
                legal=f"statistics and parameters of {computed}, or of torch.float32 under a param_dtype of 16 bits",
            )
        out.update(module.parameters(recurse=False))
    return out


@contextlib.contextmanager
def casts(policy: MixedPrecision | None, net: nn.Module) -> Iterator[None]:
    """Cast the model's inputs and results inside the ``with`` block, as the policy says."""
    if policy is None:
        yield
        return

    def entering(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
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


def one_device(
    policy: MixedPrecision | None, net: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """The result of a model on one device under a policy, in plain PyTorch. Its parameters get gradients in their own
    dtype."""
    if policy is None:
        return net(*args, **kwargs)
    types = captured_types(policy, net)
    cast: dict[torch.Tensor, torch.Tensor] = {}
    state = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if parameter in types:
            state[name] = cast.setdefault(parameter, parameter.to(types[parameter]))
    with casts(policy, net):
        return torch.func.functional_call(net, state, args, dict(kwargs), tie_weights=False)


def _cast(tree: object, dtype: torch.dtype | None) -> Any:
    """A tree with every floating tensor in one dtype, including tensors in objects of the tree."""

    def leaf(x: object) -> object:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dtype != dtype else x

    return closed(pytree.tree_map(leaf, opened(tree)))
