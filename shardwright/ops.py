"""Collectives that a user places in the model, in ``hybrid_parallel``: each rank runs its own program.

    rank r computes x_r.     all_reduce: y_r = Σ_s x_s     all_gather: y_r = (x_0, x_1, …)     broadcast: y_r = x_root
    reduce_scatter: y_r = part r of Σ_s x_s                  all_to_all: y_r = (part r of x_0, part r of x_1, …)
    all_reduce of another op: y_r = max_s x_s, min_s x_s, Π_s x_s or the mean

Gradients are those of one program on all ranks. With L the mean of the ranks' losses (`loss_fn` inside, or
`gradients_mean`, the default), dL/dx_r is the sum of the contributions of every rank's y to x_r:

    all_reduce: Σ_s dL/dy_s      all_gather: part r of Σ_s dL/dy_s      reduce_scatter: (dL/dy_0, dL/dy_1, …)
    all_to_all: an all_to_all the other way                    broadcast: Σ_s dL/dy_s on the root, zero elsewhere
    all_reduce of max, min: Σ_s dL/dy_s on the ranks that hold the extreme, which share it; zero elsewhere
    all_reduce of prod: Σ_s dL/dy_s · Π_{s≠r} x_s

Where all ranks compute one loss, it counts once, as on one device: their mean is that loss. Example on 2 ranks: both
compute the same loss from y = all_reduce(x); each rank's y contributes half of the gradient, and Σ_s dL/dy_s is the
gradient of one loss. (The gradients of torch.distributed's own collectives are those of the losses' sum: here twice
as large.)

A group is one of these; on one device every collective is the identity:

    None                    all ranks
    mesh("mp")              of ``mesh = Layout((2, 4), ("dp", "mp"))``: the ranks that differ along "mp" alone
    [0, 1, 2, 3]            these ranks; the other ranks run the same program, in groups of the same distances: here of
                            8 ranks [4, 5, 6, 7]
    [[0, 2], [1, 3]]        all groups, where they are listed
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .errors import SettingError
from .layout import Digit, Digits, Layout, beside, digits_of, digits_size, groups
from .process_runtime import world_size

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]


#: A group of ranks; see the module's header.
Group = Layout | Sequence[int] | Sequence[Sequence[int]] | None

#: The reductions of `all_reduce`.
REDUCTIONS = ("sum", "mean", "max", "min", "prod")


def all_reduce(x: Tensor, op: str = "sum", *, group: Group = None) -> Tensor:
    """The sum over the ranks of a group, or another reduction, on each of them.

    Args:
        x: this rank's term, of one shape on all ranks.
        op: "sum", "mean", "max", "min" or "prod". A product gathers all terms, the others send as much as a sum.
        group: the group; None: all ranks.

    Returns:
        A tensor of the shape of `x`, the same on all ranks of the group.

    Raises:
        SettingError: another `op`, or no group.

    Example:
        >>> class Total(nn.Module):
        ...     def forward(self, x):  # 4 of 32 rows on each of 8 ranks
        ...         return sw.ops.all_reduce(x.sum(0))
        >>> each = sw.AutoParallel(Total(), parallel_mode="hybrid_parallel")(x).view(8, 16)  # each[r]: of rank r
        >>> torch.allclose(each[5], x.sum(0), atol=1e-5)
        True
    """
    if op not in REDUCTIONS:
        raise SettingError(f"all_reduce of {op!r}", legal=", ".join(map(repr, REDUCTIONS)))
    digits = _digits(group)
    if op == "prod":
        return _all_gather(x.unsqueeze(0), 0, *_written(digits)).prod(0)
    total = _all_reduce(x, "sum" if op == "mean" else op, *_written(digits))
    return total / digits_size(digits) if op == "mean" else total


def all_gather(x: Tensor, dim: int = 0, *, group: Group = None) -> Tensor:
    """The tensors of the ranks of a group, in rank order, concatenated along `dim`.

    Args:
        x: this rank's part, of one shape on all ranks.
        dim: the dim.
        group: the group; None: all ranks.

    Returns:
        A tensor of the shape of `x` but for `dim`, which is as many times longer as the group has ranks.

    Raises:
        SettingError: no such dim, or no group.

    Example:
        >>> class Gathered(nn.Module):
        ...     def forward(self, x):  # 4 of 32 rows on each of 8 ranks
        ...         return sw.ops.all_gather(x)
        >>> each = sw.AutoParallel(Gathered(), parallel_mode="hybrid_parallel")(x).view(8, 32, 16)  # each[r]: of rank r
        >>> torch.equal(each[5], x)
        True
    """
    return _all_gather(x, _dim(x, dim), *_written(_digits(group)))


def reduce_scatter(x: Tensor, dim: int = 0, *, group: Group = None) -> Tensor:
    """This rank's part, along `dim`, of the sum over the ranks of a group.

    Args:
        x: this rank's term, of one shape on all ranks.
        dim: the dim.
        group: the group; None: all ranks.

    Returns:
        A tensor of the shape of `x` but for `dim`, which is divided by the number of ranks of the group.

    Raises:
        SettingError: no such dim or one that the ranks do not divide, or no group.

    Example:
        >>> class Scattered(nn.Module):
        ...     def forward(self, x):  # 4 of 32 rows on each of 8 ranks
        ...         return sw.ops.reduce_scatter(x, dim=1)
        >>> each = sw.AutoParallel(Scattered(), parallel_mode="hybrid_parallel")(x).view(8, 4, 2)  # each[r]: of rank r
        >>> torch.allclose(each[5], x.view(8, 4, 16).sum(0)[:, 10:12], atol=1e-5)
        True
    """
    digits, dim = _digits(group), _dim(x, dim)
    _divides(x, dim, digits, "reduce_scatter")
    return _reduce_scatter(x, dim, *_written(digits))


def all_to_all(x: Tensor, split_dim: int = 0, concat_dim: int = 0, *, group: Group = None) -> Tensor:
    """`x` cut along one dim, one part to every rank of a group; the received parts concatenated along another dim.

    Args:
        x: this rank's tensor, of one shape on all ranks.
        split_dim: the dim that is cut.
        concat_dim: the dim along which the received parts are concatenated, in rank order.
        group: the group; None: all ranks.

    Returns:
        A tensor of the shape of `x`, but that the group's number of ranks divides `split_dim` and multiplies
        `concat_dim`.

    Raises:
        SettingError: no such dim or one that the ranks do not divide, or no group.

    Example:
        >>> class Exchanged(nn.Module):
        ...     def forward(self, x):  # 4 of 32 rows on each of 8 ranks
        ...         return sw.ops.all_to_all(x, split_dim=1, concat_dim=0)
        >>> each = sw.AutoParallel(Exchanged(), parallel_mode="hybrid_parallel")(x).view(8, 32, 2)  # each[r]: of rank r
        >>> torch.equal(each[5], x[:, 10:12])
        True
    """
    digits, split, concat = _digits(group), _dim(x, split_dim), _dim(x, concat_dim)
    _divides(x, split, digits, "all_to_all")
    if split != concat:
        return _all_to_all(x, split, concat, *_written(digits))
    n = digits_size(digits)
    parts = x.unflatten(split, (1, n, x.shape[split] // n))
    return _all_to_all(parts, split + 1, split, *_written(digits)).flatten(split, split + 2)


def broadcast(x: Tensor, root: int = 0, *, group: Group = None) -> Tensor:
    """The tensor of rank number `root` of a group, on each of its ranks.

    Args:
        x: this rank's tensor, of one shape on all ranks.
        root: the position of a rank in the group.
        group: the group; None: all ranks.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        SettingError: no such rank, or no group.

    Example:
        >>> class Sent(nn.Module):
        ...     def forward(self, x):  # 4 of 32 rows on each of 8 ranks
        ...         return sw.ops.broadcast(x, root=3)
        >>> each = sw.AutoParallel(Sent(), parallel_mode="hybrid_parallel")(x).view(8, 4, 16)  # each[r]: of rank r
        >>> torch.equal(each[5], x[12:16])
        True
    """
    digits = _digits(group)
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < digits_size(digits):
        raise SettingError(
            f"broadcast from rank {root!r} of a group of {digits_size(digits)}", legal=f"0 to {digits_size(digits) - 1}"
        )
    return all_gather(x.unsqueeze(0), 0, group=group).select(0, root)


# -- operators of a graph ----------------------------------------------------------------------------------------------

# Digits are passed as two lists, of sizes and of strides. The planner of hybrid_parallel replaces these operators by
# redistributions, so that plans, dumps and both runtimes treat them like any other; on one device they are identities.


def _operator(name: str, arguments: str, shape: Any) -> Any:
    @torch.library.custom_op(
        f"shardwright::{name}", mutates_args=(), schema=f"(Tensor x, {arguments}int[] sizes, int[] strides) -> Tensor"
    )
    def run(x: Tensor, *args: Any) -> Tensor:
        if any(size > 1 for size in args[-2]):
            raise SettingError(
                f"{name} is called outside of a wrapped model",
                legal='AutoParallel(net, parallel_mode="hybrid_parallel"), which runs it on all ranks',
            )
        return x.clone()

    def fake(x: Tensor, *args: Any) -> Tensor:
        return x.new_empty(shape(list(x.shape), math.prod(args[-2]), *args[:-2]))

    run.register_fake(fake)
    # A capture only needs to see that there is a gradient; on one device it is that of the identity.
    run.register_autograd(lambda ctx, gradient: (gradient,) + (None,) * (arguments.count(",") + 2))
    return run


def _scaled(shape: list[int], changes: dict[int, tuple[int, int]]) -> list[int]:
    return [s * changes[d][0] // changes[d][1] if d in changes else s for d, s in enumerate(shape)]


_all_reduce = _operator("all_reduce", "str op, ", lambda shape, n, op: shape)
_all_gather = _operator("all_gather", "int dim, ", lambda shape, n, dim: _scaled(shape, {dim: (n, 1)}))
_reduce_scatter = _operator("reduce_scatter", "int dim, ", lambda shape, n, dim: _scaled(shape, {dim: (1, n)}))
_all_to_all = _operator(
    "all_to_all",
    "int split_dim, int concat_dim, ",
    lambda shape, n, split, concat: _scaled(_scaled(shape, {split: (1, n)}), {concat: (n, 1)}),
)

#: The operators that stand for collectives in a captured graph.
COLLECTIVES = frozenset(
    getattr(torch.ops.shardwright, name).default
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
)


# -- arguments ---------------------------------------------------------------------------------------------------------


#: The number of ranks of the model that is being captured; None outside a capture.
_DEVICES: contextvars.ContextVar[int | None] = contextvars.ContextVar("shardwright_ranks", default=None)


@contextlib.contextmanager
def for_ranks(devices: int | None) -> Iterator[None]:
    """Set the number of ranks of an unnamed group, inside the ``with`` block."""
    token = _DEVICES.set(devices)
    try:
        yield
    finally:
        _DEVICES.reset(token)


def _digits(group: Group) -> Digits:
    devices = _DEVICES.get()
    if devices is None:
        devices = world_size()
    if group is None:
        return (Digit(devices, 1),) if devices > 1 else ()
    if isinstance(group, Layout) and group.dims is not None and len(group.dims) == 1:
        return tuple(sorted(group.dims[0], key=lambda d: -d.stride))
    if isinstance(group, (tuple, list, range)) and group:
        each = [list(g) if isinstance(g, (tuple, list, range)) else None for g in group]
        if all(g is not None for g in each):
            return _of_ranks([g for g in each if g is not None], devices, group)
        if all(g is None for g in each):
            return _of_ranks([list(cast("Sequence[int]", group))], devices, group)
    legal = 'mesh("mp") of mesh = Layout((2, 4), ("dp", "mp")), a list of ranks, or None'
    if isinstance(group, Layout) and group.dims is None and group.alias_name is not None:
        legal = f"one of its axes, such as layout({group.alias_name[-1]!r})"
    raise SettingError(f"{group!r} is no group of ranks", legal=legal)


def _of_ranks(each: list[list[int]], devices: int, group: object) -> Digits:
    """The digits in which the ranks of the groups differ.

    Raises:
        SettingError: ranks that there are not or that repeat; groups that no digits give; not all groups.
    """
    ranks = [rank for one in each for rank in one]
    if any(type(rank) is not int or not 0 <= rank < devices for rank in ranks) or len(set(ranks)) < len(ranks):
        raise SettingError(
            f"the group {group!r} is not of ranks from 0 to {devices - 1}, each once", legal=f"{[*range(devices)][:4]}"
        )
    digits = digits_of([rank - min(each[0]) for rank in sorted(each[0])])
    fits = digits is not None and beside(devices, digits)
    whole = {one for one in groups(devices, digits)} if fits and digits is not None else set()
    if not whole.issuperset(tuple(sorted(one)) for one in each) or (len(each) > 1 and len(ranks) < devices):
        raise SettingError(
            f"the group {group!r} of {devices} ranks leaves no equal groups for the others: every rank runs the same "
            "program, in a group of its own",
            legal="neighbours such as [0, 1], or ranks of equal distances such as [0, 2], that divide all ranks"
            if len(each) == 1
            else "groups of equal distances that hold every rank once, such as [[0, 1], [2, 3]]",
        )
    assert digits is not None
    return digits


def _written(digits: Digits) -> tuple[list[int], list[int]]:
    return [d.size for d in digits], [d.stride for d in digits]


def _dim(x: Tensor, dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise SettingError(f"dim {dim!r} of a tensor of shape {tuple(x.shape)}", legal=f"{-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def _divides(x: Tensor, dim: int, digits: Digits, what: str) -> None:
    if x.shape[dim] % digits_size(digits):
        raise SettingError(
            f"{what}: dim {dim} of {tuple(x.shape)} has size {x.shape[dim]}, which "
            f"{digits_size(digits)} ranks do not divide",
            legal="a size that they divide",
        )
