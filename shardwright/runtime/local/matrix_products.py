"""Matrix products for all ranks at once, each computed as one product of larger matrices.

    y[R, …, m, n] = Σ_k x[X, …, m, k] · w[W, …, k, n]          R: the axes along which x or w differs

An axis of the ranks is one more index of the product:

1. of the rows, where only x differs along it;
2. of the columns, where only w differs along it;
3. of a batch, where both differ;
4. of the contraction, where the gradient of an operand is a sum of the ranks' terms.

So slices that are neighbours in a whole tensor are multiplied as on one device, and a gradient is written once,
already summed. Example: x of 4 ranks in rows, (4, m, k), and one w (k, n) are one product of 4m rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["product"]


#: The number of operand shapes that a contraction remembers, for all products of its kind together.
REMEMBERED = 64


Labels = tuple[int, ...]


#: For each dim its factor; empty where the dim broadcasts.
Dims = Sequence[tuple[int, ...]]


Operand = tuple[bool, Dims]


#: Shape and strides.
Like = tuple[tuple[int, ...], tuple[int, ...]]


def product(axes: int, x: Operand, w: Operand, out: Dims) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function (x, w, bias) -> x · w + bias on tensors with leading axes for the ranks; the bias's dims are
    aligned on the right.

    Args:
        axes: the number of these axes.
        x, w: for each, whether it has the axes, and the factors of its other dims.
        out: the factors of the result's dims.
    """
    last = max((f for dims in (x[1], w[1], out) for dim in dims for f in dim), default=0)
    ranks, fresh = tuple(range(axes)), count(axes + last + 1)
    left, right, made = (
        ranks * led + tuple(axes + dim[0] if dim else next(fresh) for dim in dims) for led, dims in (x, w, (True, out))
    )
    turned = next((k in made for k in right[axes * w[0] :] if k not in left or k not in made), False)
    spec = _Spec(
        _contraction(left, right, made),
        _contraction(made, right, left),
        _contraction(made, left, right) if turned else _contraction(left, made, right),
        turned,
    )

    def run(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return _Product.apply(spec, x, w, bias)

    return run


@lru_cache(1 << 10)
def _contraction(left: Labels, right: Labels, out: Labels) -> Contraction:
    """One contraction for all products of its kind: the layers of a model are alike, and so are its programs for other
    sizes."""
    return Contraction(left, right, out)


class _Spec(NamedTuple):
    forward: Contraction
    of_x: Contraction
    of_w: Contraction
    turned: bool  # True where the rows of w's gradient are the result's columns


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: _Spec, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        _, of_x, of_w, _ = ctx.needs_input_grad
        ctx.spec, ctx.bias = spec, None if bias is None else bias.shape
        ctx.like = (x.shape, x.stride()), (w.shape, w.stride())
        ctx.save_for_backward(x if of_w else None, w if of_x else None)
        return spec.forward(x, w, bias=bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        spec, (_, of_x, of_w, of_bias) = ctx.spec, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True
            of_both = _product_gradients(spec.forward, x, w, ctx.like, gradient)
            return None, *of_both, gradient.sum_to_size(ctx.bias) if of_bias else None
        pair = (gradient, x) if spec.turned else (x, gradient)
        return (
            None,
            spec.of_x(gradient, w, ctx.like[0]) if of_x else None,
            spec.of_w(*pair, ctx.like[1]) if of_w else None,
            gradient.sum_to_size(ctx.bias) if of_bias else None,
        )


def _product_gradients(
    forward: Contraction, x: Tensor | None, w: Tensor | None, like: tuple[Like, Like], gradient: Tensor
) -> list[Tensor | None]:
    """The gradients of a product's operands, by plain operators, which autograd differentiates again.

    Args:
        forward: the product.
        x, w: the operands; None: the other one needs no gradient.
        like: shapes and strides of the operands.
        gradient: of the result.
    """
    factors = [t if t is not None else gradient.new_zeros(size) for t, (size, _) in zip((x, w), like)]
    wanted = [w is not None, x is not None]
    with torch.enable_grad():
        # New tensors in the graph, since one operand may be computed from the other: each gets a gradient of its own.
        operands = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in factors]
        names: dict[int, int] = {}  # label -> number, from 0

        def taken(labels: Labels, t: Tensor) -> tuple[Tensor, list[int]]:
            dims = [d for d, size in enumerate(t.shape) if size != 1]
            return t.reshape([t.shape[d] for d in dims]), [names.setdefault(labels[d], len(names)) for d in dims]

        (a, left), (b, right) = (taken(ls, t) for ls, t in zip((forward.left, forward.right), operands))
        out = [k for k in forward.out if names.get(k) in {*left, *right}]
        made = torch.einsum(a, left, b, right, [names[k] for k in out]).reshape(gradient.shape)
        found = torch.autograd.grad(
            made, [t for t, want in zip(operands, wanted) if want], gradient, create_graph=True, allow_unused=True
        )
    gradients = iter(found)
    return [next(gradients) if want else None for want in wanted]


class Contraction:
    """A product of two tensors, summed over the labels that the result lacks.

    Labels number the dims. The label of a dim of size 1 is ignored. A dim of stride 0 that the result keeps is
    computed once, and has stride 0 in the result.

    Args:
        left, right, out: the labels of the dims.
    """

    def __init__(self, left: Labels, right: Labels, out: Labels) -> None:
        self.left, self.right, self.out = left, right, out
        self._known: dict[tuple[object, ...], Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {}

    def __call__(self, left: Tensor, right: Tensor, like: Like | None = None, bias: Tensor | None = None) -> Tensor:
        """The product.

        Args:
            left, right: the operands.
            like: the shape of the result, and strides that its memory follows where possible.
            bias: added to the product; its dims are aligned on the right.
        """
        key = (
            left.shape,
            left.stride(),
            right.shape,
            right.stride(),
            like,
            None if bias is None else (bias.shape, bias.stride()),
        )
        run = self._known.get(key)
        if run is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            run = self._known[key] = self._planned(left, right, like, bias)
        return run(left, right, bias)

    def _planned(
        self, left: Tensor, right: Tensor, like: Like | None, bias: Tensor | None
    ) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        out = self.out if like is None else tuple(k for k, size in zip(self.out, like[0]) if size != 1)
        lengths = [dict(zip(labels, x.shape)) for labels, x in ((self.left, left), (self.right, right))]
        shape = (
            tuple(like[0])
            if like is not None
            else tuple(
                found.pop() if len(found := {h[k] for h in lengths if k in h} - {1}) == 1 else 1 for k in self.out
            )
        )
        if not left.numel() or not right.numel():
            return lambda left, right, bias: left.new_zeros(shape) if bias is None else left.new_zeros(shape) + bias
        a, b = (_extents(x.shape, x.stride(), labels, out) for x, labels in ((left, self.left), (right, self.right)))
        alone = [
            [labels.index(k) for k in x if k not in y and k not in out]
            for labels, x, y in ((self.left, a, b), (self.right, b, a))
        ]
        if any(alone):  # labels of one operand alone are summed before the product
            return lambda left, right, bias: self(_summed(left, alone[0]), _summed(right, alone[1]), like, bias)
        memory = _extents(*like, self.out, ()) if like is not None else {}

        def order(labels: Sequence[int], extents: dict[int, tuple[int, int]]) -> list[int]:
            return sorted(
                labels, key=lambda k: (memory if k in memory and memory[k][1] else extents)[k][1], reverse=True
            )

        large = a if left.numel() > right.numel() else b
        batch = order([k for k in a if k in b and k in out], large)
        summed_over = sorted((k for k in a if k in b and k not in out), key=lambda k: large[k][1], reverse=True)
        rows, columns = order([k for k in a if k not in b], a), order([k for k in b if k not in a], b)
        get_left, get_right = _grouped(a, (batch, rows, summed_over)), _grouped(b, (batch, summed_over, columns))
        sizes = a | b
        made = _strides([*batch, *rows, *columns], sizes)
        # Some kernels take a dim of size 1 and stride 0 for an expanded one, and are slow.
        stride = tuple(made.get(k, 0 if size > 1 else 1) for k, size in zip(self.out, shape))
        multiply, multiply_and_add = (torch.bmm, torch.baddbmm) if batch else (torch.mm, torch.addmm)
        added = _extents(bias.shape, bias.stride(), self.out[-bias.dim() :], ()) if bias is not None else {}
        if any(k not in batch and k not in columns for k in added):

            def added_last(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
                assert bias is not None
                return multiply(get_left(left), get_right(right)).as_strided(shape, stride) + bias

            return added_last
        bias_dims = {k: (sizes[k][0], added[k][1] if k in added else 0) for k in (*batch, *columns)}
        get_bias = _grouped(bias_dims, (batch, (), columns))

        def run(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
            made = (
                multiply(get_left(left), get_right(right))
                if bias is None
                else multiply_and_add(get_bias(bias), get_left(left), get_right(right))
            )
            return made.as_strided(shape, stride)

        return run


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims, True) if dims else x


def _extents(shape: Sequence[int], strides: Sequence[int], labels: Labels, out: Labels) -> dict[int, tuple[int, int]]:
    """Label -> (size, stride) of the dims that are not ignored."""
    return {
        k: (size, stride) for k, size, stride in zip(labels, shape, strides) if size != 1 and (stride or k not in out)
    }


def _strides(labels: Sequence[int], sizes: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Label -> stride, of a contiguous tensor of these dims."""
    out, stride = {}, 1
    for k in reversed(labels):
        out[k] = stride
        stride *= sizes[k][0]
    return out


def _grouped(extents: dict[int, tuple[int, int]], groups: tuple[Sequence[int], ...]) -> Callable[[Tensor], Tensor]:
    """A function that views a tensor as a matrix, or a batch of matrices: each group of labels becomes one dim,
    an empty first group none."""
    groups = groups if groups[0] else groups[1:]
    split = [[extents[k] for k in group] for group in groups]
    shape = [math.prod(size for size, _ in group) for group in split]
    merged = [_merged(group) for group in split]
    strides = [stride for stride in merged if stride is not None]
    if len(strides) == len(merged):
        return lambda x: x.as_strided(shape, strides)
    sizes, each = zip(*(pair for group in split for pair in group))
    return lambda x: x.as_strided(sizes, each).reshape(shape)


def _merged(group: Sequence[tuple[int, int]]) -> int | None:
    """The stride of several dims as one dim; None where their memory does not allow it."""
    if not group:
        return 1
    if any(a[1] != b[0] * b[1] for a, b in zip(group, group[1:])):
        return None
    return group[-1][1]
