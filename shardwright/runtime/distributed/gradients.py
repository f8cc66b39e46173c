"""What the gradients of the processes runtime's parameters are: DTensors, on the parameters' own meshes.

How they come there from the leaves that a program computes on is told in `buckets`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...errors import SettingError
from ...layout import Digits
from ...redistribution import digits_value
from ...torch_private import (
    DisableTorchFunctionSubclass,
    foreach_mul_,
    foreach_norm,
    fused_optimizers,
    gradient_hooks,
    local_tensor,
    pytree,
    spec_of,
)
from ..optimizer_guard import not_summed
from .gradient_edits import RANDOM, VIEWS, changes, drawn_like, is_copy, lost, part_of, put
from .parameter_hooks import call_after, put_within, seen_by_hooks

__all__ = [
    "Accumulation",
    "Due",
    "Fusion",
    "Gradient",
    "StageGradient",
    "Unsummed",
    "copy_of_gradient",
    "fusion_of",
    "hand_nothing",
    "hand_over",
    "keep_unsummed",
    "of_stage",
    "take_unsummed",
    "unsummed_over",
]

#: Attribute of a parameter that belongs to a stage of a pipeline.
_OF_STAGE = "_shardwright_of_stage"

#: Attribute of a parameter that lies on other ranks: its gradient here.
_NOTHING = "_shardwright_nothing"

#: What optimizers do to a parameter or their state element by element with a gradient, in place.
_ELEMENTWISE = frozenset(
    {
        Tensor.add_,
        Tensor.sub_,
        Tensor.mul_,
        Tensor.div_,
        Tensor.lerp_,
        Tensor.addcmul_,
        Tensor.addcdiv_,
        Tensor.copy_,
        Tensor.masked_fill_,
        Tensor.__iadd__,
        Tensor.__isub__,
        Tensor.__imul__,
        Tensor.__itruediv__,
    }
)

#: Norms of a whole tensor.
_NORMS = frozenset({torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm})

#: Whole optimizer steps in one kernel, element by element too, over lists of parameters, gradients and their state;
#: DTensor knows some of them.
_FUSED = fused_optimizers()


class Gradient(DTensor):
    """The gradient of a parameter. Its norm is a plain number, so that ``clip_grad_norm_`` can put together the norms
    of gradients which lie on different meshes."""

    __slots__ = ()
    is_sparse = False  # optimizers ask it of every gradient, which took a dispatch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: DTensor's own does nothing either, behind wrappers that take as long as all the rest."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:
        return memo.setdefault(id(self), copy_of_gradient(self))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _ELEMENTWISE and not (torch.is_grad_enabled() and _any_requires_grad(args)):
            local = _locals(args)
            if local is not None:  # a third of what DTensor's dispatch takes
                # Most empty ones are of a stage elsewhere: of those an optimizer has more than of its own.
                if local[0].numel():
                    function(*local, **(kwargs or {}))
                return args[0]
        if (
            function is Tensor.detach
        ):  # DTensor's makes a plain DTensor, which torch 2.9 does not take for a view of this
            return _detached(args[0])
        if function is Tensor.__setitem__ and isinstance(args[0], Gradient):
            return put(*args)
        if function in RANDOM:
            return Gradient(drawn_like(function, *args, kwargs or {}), spec_of(args[0]), requires_grad=False)
        with DisableTorchFunctionSubclass():
            if function in _FUSED:
                return function(
                    *pytree.tree_map_only(DTensor, _local, args), **pytree.tree_map_only(DTensor, _local, kwargs or {})
                )
            if function is foreach_mul_:  # of lists, DTensor takes those on one mesh alone
                return [gradient.mul_(factor) for gradient, factor in zip(args[0], _each(args[1], len(args[0])))]
            if function in VIEWS and isinstance(args[0], Gradient):  # of a subclass torch 2.9's DTensor makes no view
                result = function(
                    DTensor(local_tensor(args[0]), spec_of(args[0]), requires_grad=False), *args[1:], **(kwargs or {})
                )
            else:
                result = function(*args, **(kwargs or {}))
        if function in _NORMS:
            return _plain(result)
        if function is foreach_norm:
            return [_plain(norm) for norm in result]
        if function in VIEWS and isinstance(args[0], Gradient):
            return pytree.tree_map_only(DTensor, lambda part: _view(args[0], part, function, args), result)
        if (
            type(result) is DTensor and not result.requires_grad
        ):  # what is made of a gradient is treated as one: see Rprop
            return Gradient(local_tensor(result), spec_of(result), requires_grad=False)
        return result


def _locals(args: Sequence[Any]) -> list[Any] | None:
    """The slices of DTensors that have one placement and of plain tensors beside them, and single numbers as they are;
    None: not all are such."""
    spec = spec_of(args[0])
    if spec is None:
        return None
    out = []
    for a in args:
        if isinstance(a, Tensor):
            theirs = spec_of(a)
            if theirs is None and a.dim():
                a = part_of(args[0], a) if local_tensor(args[0]).numel() else a
                if a is None:
                    return None
            elif (
                theirs is not None
                and theirs is not spec
                and (
                    (
                        a.dim()
                        and (theirs.mesh, theirs.placements, theirs.shape) != (spec.mesh, spec.placements, spec.shape)
                    )
                    or (not a.dim() and not all(isinstance(p, Replicate) for p in theirs.placements))
                )
            ):
                return None
            a = a if theirs is None else local_tensor(a)
        out.append(a)
    return out


def _any_requires_grad(args: Sequence[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _view(gradient: Gradient, part: DTensor, function: Any, args: tuple) -> Gradient:
    kind = GatheredPart if isinstance(gradient, GatheredPart) or is_copy(gradient, part, function, args) else Gradient
    return kind(local_tensor(part), spec_of(part), requires_grad=False)


def _detached(x: Gradient) -> Gradient:
    kind = GatheredPart if isinstance(x, GatheredPart) else Gradient
    return kind(local_tensor(x).detach(), spec_of(x), requires_grad=False)


def _local(x: DTensor) -> Tensor:
    return local_tensor(x)


def _each(factor: Any, count: int) -> Sequence[Any]:
    return factor if isinstance(factor, (list, tuple)) else [factor] * count


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class GatheredPart(Gradient):
    """A part of a gradient that was gathered from several ranks: to be read."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if changes(function) and isinstance(args[0], cls):
            raise lost(function)
        return super().__torch_function__(function, types, args, kwargs)


class StageGradient(Gradient):
    """The gradient of a parameter of a pipeline, or of its absence on a rank of another stage: empty there. Its norm is
    that of the whole parameter on every rank of every stage; all of them must ask for it.

    Attributes:
        counts: whether this rank says what the norm is: the first of the parameter's stage.
    """

    __slots__ = ("counts",)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        if function in _NORMS:
            return _said([result], args[:1])[0]
        return _said(result, args[0]) if function is foreach_norm else result


def _said(norms: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """What those that count say of each norm, on every rank."""
    said = torch.stack([n if getattr(g, "counts", True) else torch.zeros_like(n) for n, g in zip(norms, gradients)])
    dist.all_reduce(said)
    return list(said.unbind())


def of_stage(parameter: nn.Parameter, counts: bool) -> None:
    """Note on a parameter that it belongs to a stage of a pipeline, and whether this rank counts (`StageGradient`)."""
    setattr(parameter, _OF_STAGE, counts)


def _gradient(parameter: nn.Parameter, local: Tensor) -> Gradient:
    counts = getattr(parameter, _OF_STAGE, None)
    if counts is None:
        return Gradient(local, spec_of(parameter), requires_grad=False)
    made = StageGradient(local, spec_of(parameter), requires_grad=False)
    made.counts = counts
    return made


class Unsummed(Gradient):
    """A rank's own term of a parameter's gradient, of a backward under `no_sync`: no gradient yet, and refused to
    whoever would use it as one. What had been summed before counts as the first rank's.

    Attributes:
        digits: over which it is to be summed; or the `Scatter` that makes a part of what is a whole term here.
    """

    __slots__ = ("digits",)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in _REFUSED:
            raise not_summed("a norm, a part, or a change of gradients")
        if function is Tensor.detach:
            return _detached(args[0])
        with DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


_REFUSED = frozenset(
    {
        *_NORMS,
        Tensor.__setitem__,
        Tensor.__getitem__,
        foreach_norm,
        foreach_mul_,
        *_ELEMENTWISE,
        *_FUSED,
        DTensor.full_tensor,
        DTensor.redistribute,
    }
)


def hand_over(parameter: nn.Parameter, gradient: Tensor, rank: int) -> None:
    """Add a gradient, complete or in no need of a sum, to what a DTensor parameter has on `rank`. Its hooks see it."""
    hooks = gradient_hooks(parameter)
    if hooks.before:
        gradient = seen_by_hooks(parameter, gradient, rank)
    _add(parameter, gradient, rank)
    if hooks.after:
        run_after(parameter)


def _add(parameter: nn.Parameter, gradient: Tensor, rank: int) -> None:
    held = parameter.grad
    if held is None:
        # Not `from_local`, which makes a spec of its own and an autograd node: 61 us against 4. The spec is private:
        # mesh, placements, shape and strides in one, which the gradient shares.
        parameter.grad = _gradient(parameter, gradient)
    elif type(held) is Unsummed and not isinstance(held.digits, tuple):
        held.digits.include(local_tensor(held), gradient)
    elif type(held) is not Unsummed or not digits_value(held.digits, rank):
        local_tensor(held).add_(gradient)


def hand_nothing(parameter: nn.Parameter) -> None:
    """Give a parameter that lies on other ranks an empty gradient, as it is empty itself; hooks after it run here
    too."""
    if parameter.grad is None:
        if not hasattr(parameter, _NOTHING):
            setattr(parameter, _NOTHING, _gradient(parameter, torch.empty_like(local_tensor(parameter))))
        parameter.grad = getattr(parameter, _NOTHING)
    if gradient_hooks(parameter).after:
        run_after(parameter)


def run_after(parameter: nn.Parameter) -> None:
    """Call the hooks that want a parameter after its gradient has come.

    In a pipeline the ranks of one stage are in it, and others elsewhere: a norm is that of the stage's ranks meanwhile.
    """
    gradient = parameter.grad
    if isinstance(gradient, StageGradient):
        parameter.grad = alone = Gradient(local_tensor(gradient), spec_of(gradient), requires_grad=False)
        call_after(parameter)
        if parameter.grad is alone:
            parameter.grad = gradient
    else:
        call_after(parameter)


def keep_unsummed(parameter: nn.Parameter, term: Tensor, digits: Digits, rank: int) -> None:
    """Add the term of `rank` to what a DTensor parameter has, to be summed over `digits` later."""
    held = parameter.grad
    if type(held) is Unsummed:
        assert held.digits == digits
        local_tensor(held).add_(term)
        return
    if held is not None and not digits_value(digits, rank):
        term = term + local_tensor(held)
    parameter.grad = Unsummed(term, spec_of(parameter), requires_grad=False)
    parameter.grad.digits = digits


def copy_of_gradient(gradient: Gradient) -> Gradient:
    """A gradient with values of its own.

    Raises:
        SettingError: it is still to be summed.
    """
    if isinstance(gradient, Unsummed):
        raise not_summed("copy.deepcopy")
    made = type(gradient)(local_tensor(gradient).clone(), spec_of(gradient), requires_grad=False)
    if isinstance(gradient, StageGradient):
        made.counts = gradient.counts
    return made


def unsummed_over(parameter: nn.Parameter) -> Any:
    """Over which digits, or by which `Scatter`, the gradient that a parameter has is still to be summed; None: it has
    none such."""
    held = parameter.grad
    return held.digits if type(held) is Unsummed else None


def take_unsummed(parameter: nn.Parameter) -> Tensor:
    """The rank's own term that a parameter has, which it has no longer.

    Raises:
        SettingError: a hook of the parameter would see the sum of several backwards.
    """
    if any(gradient_hooks(parameter)):
        raise put_within(parameter)
    term, parameter.grad = local_tensor(parameter.grad), None
    return term


# ----------------------------------------------------------------------------------------------------
# What a user says of the sums of gradients: which travel together, and whether they are due in this backward.
# ----------------------------------------------------------------------------------------------------

# Bytes of a bucket where the user leaves it to us. Ours, ms a step of 8 layers of 1024×1024 (32 MiB of gradients), Gloo
# processes of one thread on 2 shared cores, by MiB of a bucket (benchmarks/data_parallel.py --buckets --only mlp):
#     MiB          0.25    1    2    4    8   16   32   64   DDP
#     2 processes    64   61   65   63   68   64   71   71    63
#     4 processes   149  143  142  143  133  130  145  146   132
#     8 processes   332  340  332  346  282  262  290  294   257
# (none alone but those of a bucket's size)
AUTO = 16 << 20
# Bytes for each of the ranks that sum it, at which a bucket is full before that, and from which a gradient travels by
# itself: the pieces that ranks send each other are then long enough, and a copy into a bucket takes longer than another
# start (`RING` in `collectives` has the times). With half of it, gradients of 4 MiB among four went alone, and a step
# took 146 ms instead of
# 130. A bucket lies in memory three times: its gradients, together, and what has come.
PIECE = 2 << 20

LEGAL = (
    '{"mode": "auto"}, {"mode": "size", "config": 25} (MB a bucket), or {"mode": "index", "config": [10, 20]} '
    "(parameters before which a new bucket begins)"
)


@dataclass(frozen=True)
class Due:
    """A gradient that will have to be summed.

    Attributes:
        name: of the parameter.
        nbytes: of the gradient on one rank.
        kind: gradients of another kind (other ranks, another type) cannot travel with it.
        index: of the parameter among those that are trained, in the model's order.
        ranks: over how many it is summed.
    """

    name: str
    nbytes: int
    kind: Hashable
    index: int
    ranks: int


@dataclass(frozen=True)
class Fusion:
    """How gradients travel together.

    Attributes:
        limit: bytes at which a bucket is full, and from which a gradient travels by itself; 0: all do. None: `AUTO`,
            and no more than `PIECE` for each rank.
        ends: instead of it, indices of parameters before which a new bucket begins.
    """

    limit: int | None = None
    ends: tuple[int, ...] | None = None

    def check(self, trained: int) -> None:
        """See that the model has the parameters that the indices speak of.

        Raises:
            SettingError: it has no more than `trained`.
        """
        if self.ends is not None and self.ends[-1] >= trained:
            raise SettingError(
                f"comm_fusion: the index {self.ends[-1]}, but the model trains {trained} parameters",
                strategy=list(self.ends),
                legal=f"indices from 1 to {trained - 1}",
            )

    def buckets(self, gradients: Sequence[Due]) -> tuple[tuple[str, ...], ...]:
        """The names of the gradients that travel together, in the order in which buckets are filled.

        Args:
            gradients: in the order in which they come.
        """
        if self.ends is not None:
            parts: dict[Hashable, list[str]] = {}
            last = {}
            for place, due in enumerate(gradients):
                key = (bisect_right(self.ends, due.index), due.kind)
                parts.setdefault(key, []).append(due.name)
                last[key] = place
            return tuple(tuple(parts[key]) for key in sorted(parts, key=last.__getitem__))
        full: list[tuple[str, ...]] = []
        open_: dict[Hashable, list[Due]] = {}
        for due in gradients:
            pieces = due.ranks * PIECE
            limit = min(AUTO, pieces) if self.limit is None else self.limit
            if due.nbytes >= min(limit, pieces):  # as it is: in a bucket it would be in memory twice
                full.append((due.name,))
                continue
            bucket = open_.setdefault(due.kind, [])
            bucket.append(due)
            if sum(d.nbytes for d in bucket) >= limit:
                full.append(tuple(d.name for d in open_.pop(due.kind)))
        return (*full, *(tuple(d.name for d in bucket) for bucket in open_.values()))


@dataclass
class Accumulation:
    """Whether the gradients of a backward are kept as each rank has them (`AutoParallel.no_sync`), and whose are so.

    Attributes:
        open: whether they are kept, now.
        kept: id of a parameter -> the parameter, for those that hold such a gradient, or did.
    """

    open: bool = False
    kept: dict[int, Any] = field(default_factory=dict)


def fusion_of(given: Any) -> Fusion:
    """What ``comm_fusion(allreduce=…)`` says.

    Args:
        given: "auto", a number of MB, a list of indices, or ``{"mode": …, "config": …}``.

    Raises:
        SettingError: none of these.
    """
    if isinstance(given, dict):
        if "mode" not in given or set(given) - {"mode", "config"}:
            raise SettingError(f"comm_fusion: {given!r} must have a mode, and may have a config", legal=LEGAL)
        mode, config = given["mode"], given.get("config")
    else:
        mode = given if isinstance(given, str) else "index" if isinstance(given, (list, tuple)) else "size"
        config = None if isinstance(given, str) else given
    if mode == "auto":
        if config is not None:
            raise SettingError(f'comm_fusion: the mode "auto" takes no config, not {config!r}', legal=LEGAL)
        return Fusion()
    if mode == "size":
        if isinstance(config, bool) or not isinstance(config, (int, float)) or not 0 < config < math.inf:
            raise SettingError(f"comm_fusion: a bucket of {config!r} MB", legal="a number above 0")
        return Fusion(limit=int(config * (1 << 20)))
    if mode == "index":
        whole = isinstance(config, (list, tuple)) and all(
            isinstance(i, int) and not isinstance(i, bool) for i in config
        )
        if not whole or not config or config[0] < 1 or any(a >= b for a, b in zip(config, config[1:])):
            raise SettingError(
                f"comm_fusion: the indices {config!r}",
                legal="a list of whole numbers of at least 1, each above the one before",
            )
        return Fusion(ends=tuple(config))
    raise SettingError(f"comm_fusion: unknown mode {mode!r}", legal=LEGAL)
