"""Normalization as operators without side effects, and the operators of its expansion over cut dims.

1. *Running statistics*. torch's batch and instance norm change their running statistics though their schemas do not
   say so; here the new values are outputs.

2. *Statistics over cut dims* combine those of the parts by Chan's formula, for P parts of equal size:

       mean = Σ mean_p / P          var = Σ (var_p + (mean_p − mean)²) / P

   The formula needs one exchange and has no cancellation, however far the mean is from zero. Each operator is a
   composition of torch's own, so that autograd, meta tensors and torch.compile see through it.

3. *Rules of the normalization layers*, over a cut dim by the combined statistics:

       out = (x − mean) / √(variance + eps) · weight + bias          rms: x / √(Σ x² / count + eps) · weight

   A batch norm in training normalizes by the whole batch, as on one device. Its running statistics are replicas: where
   the channels are cut, each rank computes the new values of its own channels, and these are gathered. The backward of
   all but rms is one sum over the ranks: of the gradients of mean and variance together.

Example: the parts (1, 3) and (5, 7) have the means 2 and 6 and the variances 1 and 1. Together: mean 4, and variance
((1 + 4) + (1 + 4)) / 2 = 5.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import Op, Value
from ..torch_private import CROSS_MAP_NORM, BatchNorm
from .dims import compound, cut_size, named, operand, operands, whole, wide
from .notation import Assignment, Bound
from .registry import Builder, Expansion, Local, Rule, register

__all__ = [
    "batch_norm",
    "batch_normalise",
    "combined_moments",
    "cumulative_momentum",
    "instance_norm",
    "moments",
    "normalise",
    "own_batch_norm",
    "running_averages",
    "without_side_effects",
]

aten = torch.ops.aten

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")


def _operator(schema: str) -> Callable[[Callable[..., object]], Any]:
    """Define an operator of that schema, differentiated through the operators that its function calls."""

    def make(function: Callable[..., object]) -> object:
        _LIBRARY.define(schema)
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.shardwright, name).default

    return make


# -- with running statistics -------------------------------------------------------------------------------------------


@_operator(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "Tensor? tracked, float momentum, float eps, bool cudnn_enabled) -> (Tensor, Tensor, Tensor)"
)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    tracked: Tensor | None,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm in training.

    Args:
        tracked: the number of batches seen; with it the running statistics are averages over all batches.

    Returns:
        The result, the new running mean and the new running variance.
    """
    if tracked is None:
        mean, var = mean.detach().clone(), var.detach().clone()
        return torch.batch_norm(x, weight, bias, mean, var, True, momentum, eps, cudnn), mean, var
    seen = torch.zeros_like(mean), torch.zeros_like(var)
    out = torch.batch_norm(x, weight, bias, *seen, True, 1.0, eps, cudnn)
    return out, *running_averages(torch.stack(seen), [mean, var], [tracked], [momentum], [1.0, 1.0])


@_operator(
    "instance_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "float momentum, float eps, bool cudnn_enabled) -> (Tensor, Tensor, Tensor)"
)
def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance norm in training: the result, the new running mean and the new running variance."""
    mean, var = mean.detach().clone(), var.detach().clone()
    return torch.instance_norm(x, weight, bias, mean, var, True, momentum, eps, cudnn), mean, var


@_operator(
    "own_batch_norm(Tensor input, Tensor? weight, Tensor? bias, int parts, ScalarType dtype, float eps, "
    "bool cudnn_enabled) -> (Tensor, Tensor)"
)
def own_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, parts: int, dtype: torch.dtype, eps: float, cudnn: bool
) -> tuple[Tensor, Tensor]:
    """Normalize each of `parts` equal parts of the batch by its own statistics.

    Returns:
        The result, and [2, channels] in `dtype`: the sums over the parts of their means and unbiased variances.
    """

    def one(part: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(2, x.shape[1], dtype=dtype, device=x.device)
        mean, variance = seen.unbind()
        return torch.batch_norm(part, weight, bias, mean, variance, True, 1.0, eps, cudnn), seen

    if parts == 1:
        return one(x)
    outs, seen = zip(*map(one, x.chunk(parts)))
    return torch.cat(outs), torch.stack(seen).sum(0)


@_operator(
    "running_averages(Tensor stats, Tensor[] old, Tensor[] tracked, float[] momenta, float[] scales) -> Tensor[]"
)
def running_averages(
    stats: Tensor, old: Sequence[Tensor], tracked: Sequence[Tensor], momenta: Sequence[float], scales: Sequence[float]
) -> list[Tensor]:
    """The next running means and variances of one layer or of several.

    Args:
        stats: means and variances: two rows, layer after layer.
        old: mean and variance of the first layer, then those of the next.
        tracked: per layer the number of batches seen, including this one, where the running statistics are averages
            over all batches; empty otherwise.
        momenta: per layer the weight of `stats`, without `tracked`.
        scales: factors of means and of variances, where `stats` are sums or biased variances.

    Returns:
        The new values, in the order of `old`.
    """
    sizes = [mean.numel() for mean in old[::2]]
    rows = []
    for i, (seen, scale) in enumerate(zip(stats.reshape(2, -1).unbind(), scales)):
        before = torch.cat(list(old[i::2])).to(seen.dtype)  # all layers at once: many small operators are slow
        away = seen * scale - before
        if tracked:
            rows.append(before + torch.cat([a / count for a, count in zip(away.split(sizes), tracked)]))
        elif len(set(momenta)) == 1:
            rows.append(before + away * momenta[0])
        else:
            rows.append(before + torch.cat([a * momentum for a, momentum in zip(away.split(sizes), momenta)]))
    return [row.to(o.dtype) for pair in zip(*(row.split(sizes) for row in rows)) for row, o in zip(pair, old)]


# -- over cut dims -----------------------------------------------------------------------------------------------------


@_operator("moments(Tensor input, int[] dims, int[] parts) -> Tensor")
def moments(x: Tensor, dims: Sequence[int], parts: Sequence[int]) -> Tensor:
    """Mean and biased variance over `dims`, of each part where dim ``dims[i]`` is cut into ``parts[i]``.

    Returns:
        [product of parts, 2, *x.shape with 1 in place of `dims`]; for half precision inputs, in float32.
    """
    return _Moments.apply(x, list(dims), list(parts))


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], parts: list[int]) -> Tensor:
        cut, cut_dims = _in_parts(x, dims, parts)
        if x.device.type == "cpu":  # on a CPU twice the speed of var_mean, and as exact
            mean = cut.mean(cut_dims, True, dtype=_wide(x.dtype))
            var = (cut - mean).square_().mean(cut_dims, True)
        else:
            var, mean = torch.var_mean(cut.to(_wide(x.dtype)), cut_dims, correction=0, keepdim=True)
        ctx.save_for_backward(x, mean)
        ctx.dims, ctx.parts = dims, parts
        keepdim_shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        return torch.stack([(m if cut is x else _parts_first(m)).reshape(-1, *keepdim_shape) for m in (mean, var)], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, mean = ctx.saved_tensors
        cut, cut_dims = _in_parts(x, ctx.dims, ctx.parts)
        if torch.is_grad_enabled():  # create_graph=True: the mean depends on x
            mean = cut.mean(cut_dims, True, dtype=_wide(x.dtype))
        of_mean, of_var = (
            (g.reshape(mean.shape) if cut is x else _parts_back(g, cut, cut_dims))
            for g in (gradient / (x.numel() // mean.numel())).unbind(1)
        )
        return torch.addcmul(of_mean, cut - mean, 2 * of_var).reshape(x.shape).to(x.dtype), None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _in_parts(x: Tensor, dims: list[int], parts: list[int]) -> tuple[Tensor, list[int]]:
    """`x` with every dim split into (part, place in the part), and the dims that the statistics of a part reduce.

    `x` itself and `dims` where there is one part.
    """
    if math.prod(parts) == 1:
        return x, dims
    count = dict(zip(dims, parts))
    shape = [n for d, size in enumerate(x.shape) for n in (count.get(d, 1), size // count.get(d, 1))]
    return x.reshape(shape), [2 * d + 1 for d in dims]


def _parts_first(m: Tensor) -> Tensor:
    return m.permute(*range(0, m.dim(), 2), *range(1, m.dim(), 2))


def _parts_back(gradient: Tensor, cut: Tensor, cut_dims: list[int]) -> Tensor:
    """The gradient [product of parts, …] with the parts moved beside the dims that they cut."""
    rank = cut.dim() // 2
    shape = [*cut.shape[::2], *(1 if d in cut_dims else cut.shape[d] for d in range(1, cut.dim(), 2))]
    return gradient.reshape(shape).permute([d // 2 + rank * (d % 2) for d in range(cut.dim())])


@_operator("combined_moments(Tensor moments) -> Tensor")
def combined_moments(parts: Tensor) -> Tensor:
    """Means and biased variances of equal parts [parts, 2, …] -> those of all parts together [2, …]."""
    means, variances = parts.unbind(1)
    mean = means.mean(0)
    return torch.stack([mean, (variances + (means - mean).square()).mean(0)])


@_operator("normalise(Tensor input, Tensor stats, Tensor? weight, Tensor? bias, float eps) -> Tensor")
def normalise(x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias, all broadcast to x. `stats`: mean and variance, stacked."""
    mean, var = stats.unbind()
    made = (x - mean) * torch.rsqrt(var + eps)
    made = made if weight is None else made * weight
    return (made if bias is None else made + bias).to(x.dtype)


@_operator("batch_normalise(Tensor input, Tensor stats, Tensor? weight, Tensor? bias, float eps) -> Tensor")
def batch_normalise(x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`normalise` along dim 1 by torch's fused kernel, with a gradient for the statistics too."""
    return _BatchNormalise.apply(x, stats, weight, bias, eps)


def _normalise_gradients(
    x: Tensor, stats: Tensor, weight: Tensor | None, ctx: Any, gradient: Tensor
) -> list[Tensor | None]:
    """The gradients of `batch_normalise` by plain operators, which autograd differentiates again."""
    channels = (-1, *[1] * (x.dim() - 2))
    with torch.enable_grad():
        # New tensors in the graph, since the statistics are computed from x: each gets a gradient of its own.
        x, stats = (t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (x, stats))
        if weight is not None:
            weight = weight.view_as(weight) if weight.requires_grad else weight.detach().requires_grad_()
        bias = None if ctx.bias_type is None else x.new_zeros(stats[0].numel(), dtype=ctx.bias_type).requires_grad_()
        scale, shift = (t if t is None else t.view(channels) for t in (weight, bias))
        mean, var = stats.reshape(2, *channels).unbind()
        made = (x - mean) * torch.rsqrt(var + ctx.eps)
        made = made if scale is None else made * scale
        made = (made if shift is None else made + shift).to(x.dtype)
        wanted = [t for t in (x, stats, weight, bias) if t is not None]
        found = iter(torch.autograd.grad(made, wanted, gradient, create_graph=True))
    return [None if t is None else next(found) for t in (x, stats, weight, bias)]


class _BatchNormalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        mean, var = stats.reshape(2, -1).unbind()
        ctx.save_for_backward(x, stats, weight)
        ctx.eps, ctx.bias_type = eps, bias.dtype if bias is not None else None
        weight, bias = (t if t is None else t.to(stats.dtype) for t in (weight, bias))
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute Σ g for the bias and Σ g·x̂ for the weight, with x̂ the normalized x, and from these the gradients

        of the mean      −weight/√(var + eps) · Σ g
        of the variance  −weight/2(var + eps) · Σ g·x̂
        """
        x, stats, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return (*_normalise_gradients(x, stats, weight, ctx, gradient), None)
        mean, var = stats.reshape(2, -1).unbind()
        scale = weight.to(stats.dtype) if weight is not None else None
        of_x, along, total = aten.native_batch_norm_backward(
            gradient, x, scale, mean, var, None, None, False, ctx.eps, [ctx.needs_input_grad[0], True, True]
        )
        root = torch.rsqrt(var + ctx.eps)
        slope = -root if scale is None else -root * scale
        of_stats = torch.stack([slope * total, slope * root * along / 2]).reshape(stats.shape)
        return (
            of_x if ctx.needs_input_grad[0] else None,
            of_stats,
            along.to(weight.dtype) if weight is not None else None,
            total.to(ctx.bias_type) if ctx.bias_type is not None else None,
            None,
        )


# -- for the capture ---------------------------------------------------------------------------------------------------

#: Operators that change running statistics without saying so in their schema: the argument that makes them do so, and
#: the operator that returns the new statistics instead.
_SILENT = {
    aten.batch_norm.default: ("training", batch_norm),
    aten.instance_norm.default: ("use_input_stats", instance_norm),
}


def without_side_effects(target: Any, arguments: dict[str, object]) -> object | None:
    """The operator that returns the running statistics which this call would change; None where it changes none."""
    when, plain = _SILENT.get(target, ("", None))
    return plain if plain is not None and arguments[when] and arguments["running_mean"] is not None else None


@contextlib.contextmanager
def cumulative_momentum(module: nn.Module) -> Iterator[None]:
    """Make batch norms with momentum None pass on NaN, while active: they would read a number from a tensor's value."""
    changed = [
        m
        for m in module.modules()
        if isinstance(m, BatchNorm)
        and m.training
        and m.momentum is None
        and m.track_running_stats
        and m.num_batches_tracked is not None
    ]
    for norm in changed:
        norm.momentum = math.nan
    try:
        yield
    finally:
        for norm in changed:
            norm.momentum = None


# -- rules of the normalization layers


def _dims(op: Op) -> list[str]:
    return named(len(op.inputs[0].shape))


def _cuts(bound: Bound, assignment: Assignment, dims: Sequence[int]) -> list[int]:
    """The number of parts of each of these dims of the first input."""
    layout = bound.input_layout(0, assignment)
    assert layout is not None
    return [layout.cuts[d] for d in dims]


def _stats(b: Builder, x: Value, dims: Sequence[int], cuts: Sequence[int]) -> Value:
    """Mean and biased variance of x over `dims`, stacked; the dims stay, with size 1."""
    made = b.call(moments, x, list(dims), list(cuts))
    gathered = b.lay(made, ((), *b.layouts[made.name].tensor_dims[1:]))
    return b.call(combined_moments, gathered)


# -- over the last dims ------------------------------------------------------------------------------------------------


def _last_dims(op: Op) -> list[int]:
    rank = len(op.inputs[0].shape)
    return list(range(rank - len(op.argument("normalized_shape")), rank))


def _layer_text(op: Op) -> str:
    names, last = _dims(op), operand([f"d{d}" for d in _last_dims(op)])
    return f"{operands(op, input=operand(names), weight=last, bias=last)} -> {operand(names)}"


def _expand_layer(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    dims = _last_dims(op)
    cuts = _cuts(bound, assignment, dims)
    if math.prod(cuts) == 1:
        return None
    x = op.inputs[0]
    return lambda b: b.call(
        normalise, x, _stats(b, x, dims, cuts), op.argument("weight"), op.argument("bias"), op.argument("eps")
    )


def _expand_rms(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    dims = _last_dims(op)
    if math.prod(_cuts(bound, assignment, dims)) == 1:
        return None
    x, weight, eps = op.inputs[0], op.argument("weight"), op.argument("eps")
    count = math.prod(x.shape[d] for d in dims)

    def work(b: Builder) -> Value:
        values = b.to(x, wide(x.dtype))
        total = b.call(aten.sum.dim_IntList, b.call(aten.square.default, values), dims, True)
        size = b.call(
            aten.add.Scalar,
            b.call(aten.div.Tensor, total, count),
            torch.finfo(values.dtype).eps if eps is None else eps,
        )
        made = b.call(aten.mul.Tensor, values, b.call(aten.rsqrt.default, size))
        return b.to(made if weight is None else b.call(aten.mul.Tensor, made, weight), op.output(0).dtype)

    return work


# -- by groups of channels ---------------------------------------------------------------------------------------------


def _group_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of group_norm: the channels are (groups, channels of a group), cut between groups first."""
    shape, groups = op.inputs[0].shape, op.argument("num_groups")
    names = operand(["n", "(g k)", *named(len(shape) - 2, "s")])
    return f"{operands(op, input=names, weight='(g k)', bias='(g k)')} -> {names}", {
        "g": groups,
        "k": shape[1] // groups,
    }


def _local_groups(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(num_groups=op.argument("num_groups") // cut_size(bound, assignment, ["g"]))
    return Local(op.target, args, kwargs)


def _expand_group(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x, groups = op.inputs[0], op.argument("num_groups")
    spatial = x.shape[2:]
    if cut_size(bound, assignment, ["k", *named(len(spatial), "s")]) == 1:
        return None
    grouped = [groups, x.shape[1] // groups]
    dims = list(range(2, 3 + len(spatial)))
    cuts = [cut_size(bound, assignment, ["k"]), *_cuts(bound, assignment, range(2, 2 + len(spatial)))]

    def work(b: Builder) -> Value:
        def by_group(affine: Value | None) -> Value | None:
            return affine if affine is None else b.call(aten.view.default, affine, grouped + [1] * len(spatial))

        values = b.call(aten.reshape.default, x, [x.shape[0], *grouped, *spatial])
        made = b.call(
            normalise,
            values,
            _stats(b, values, dims, cuts),
            by_group(op.argument("weight")),
            by_group(op.argument("bias")),
            op.argument("eps"),
        )
        return b.call(aten.reshape.default, made, list(x.shape))

    return work


# -- by channels -------------------------------------------------------------------------------------------------------


def _channel_text(op: Op) -> str:
    """The notation of batch and instance norm: the other operands, except `tracked`, have one element a channel."""
    names = ["n", "c", *named(len(op.inputs[0].shape) - 2, "s")]
    texts = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    outputs = [operand(names), *["c"] * (len(op.outputs) - 1)]
    return f"{operands(op, input=operand(names), tracked='...', **texts)} -> {', '.join(outputs)}"


def _updates(b: Builder, op: Op, stats: Value, count: int) -> Sequence[Value]:
    """The new running statistics of one layer; `count` is the number of values behind each statistic."""
    tracked = op.argument("tracked")
    return b.call(
        running_averages,
        b.call(aten.detach.default, stats),
        [op.argument("running_mean"), op.argument("running_var")],
        [] if tracked is None else [tracked],
        [op.argument("momentum")],
        [1.0, count / (count - 1) if count > 1 else math.nan],
    )


def _expand_batch(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x = op.inputs[0]
    dims = [d for d in range(len(x.shape)) if d != 1]
    cuts = _cuts(bound, assignment, dims)
    if math.prod(cuts) == 1 or not op.argument("training", True):
        return None

    def work(b: Builder) -> Sequence[Value]:
        stats = _stats(b, x, dims, cuts)
        made = b.call(batch_normalise, x, stats, op.argument("weight"), op.argument("bias"), op.argument("eps"))
        if len(op.outputs) == 1:
            return made
        return made, *_updates(b, op, stats, math.prod(x.shape[d] for d in dims))

    return work


def _expand_instance(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Expand an instance norm; the running statistics are those of the instances, averaged over the batch."""
    x = op.inputs[0]
    dims = list(range(2, len(x.shape)))
    cuts, updates = _cuts(bound, assignment, dims), len(op.outputs) > 1
    instances = _cuts(bound, assignment, [0])[0] if updates else 1
    if math.prod(cuts) * instances == 1 or not op.argument("use_input_stats", True):
        return None

    def work(b: Builder) -> Sequence[Value]:
        def by_channel(affine: Value | None) -> Value | None:
            return affine if affine is None else b.call(aten.view.default, affine, [-1] + [1] * len(dims))

        stats = _stats(b, x, dims, cuts)
        made = b.call(
            normalise, x, stats, by_channel(op.argument("weight")), by_channel(op.argument("bias")), op.argument("eps")
        )
        if not updates:
            return made
        total = b.call(aten.sum.dim_IntList, b.call(aten.detach.default, stats), [1])
        average = b.call(aten.div.Tensor, total, x.shape[0])
        return made, *_updates(b, op, average, math.prod(x.shape[d] for d in dims))

    return work


# -- operators of the expansions ---------------------------------------------------------------------------------------


def _moments_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of moments: a dim in parts may be cut between parts."""
    shape, dims, parts = op.inputs[0].shape, op.argument("dims"), op.argument("parts")
    sizes: dict[str, int] = {}
    before, after = _dims(op), _dims(op)
    for d, count in zip(dims, parts):
        before[d], after[d] = f"q{d}!", "1"
        if count > 1:
            sizes |= {f"p{d}": count, f"q{d}": shape[d] // count}
            before[d] = f"(p{d} q{d}!)"
    runs = compound([f"p{d}" for d, count in zip(dims, parts) if count > 1])
    return f"{operand(before)} -> {operand([runs, 'two!', *after])}", sizes


def _local_moments(op: Op, bound: Bound, assignment: Assignment) -> Local:
    parts = [
        count // cut_size(bound, assignment, [f"p{d}"]) for d, count in zip(op.argument("dims"), op.argument("parts"))
    ]
    args, kwargs = op.with_arguments(parts=parts)
    return Local(op.target, args, kwargs)


def _combined_text(op: Op) -> str:
    stats_dims = operand(["two!", *named(len(op.inputs[0].shape) - 2)])
    return f"p! {stats_dims} -> {stats_dims}"


def _aligned(shape: Sequence[int], rank: int) -> str:
    """The text of an operand that is broadcast to `rank` dims."""
    return operand(["1" if size == 1 else f"d{rank - len(shape) + i}" for i, size in enumerate(shape)])


def _normalise_text(op: Op) -> str:
    names = _dims(op)
    x, stats, *affine = (v.shape for v in op.inputs)
    texts = [operand(names), "two! " + _aligned(stats[1:], len(x)), *(_aligned(shape, len(x)) for shape in affine)]
    return f"{', '.join(texts)} -> {operand(names)}"


def _batch_normalise_text(op: Op) -> str:
    names = ["n", "c", *named(len(op.inputs[0].shape) - 2, "s")]
    stats = " ".join(["two!", "1", "c", *["1"] * (len(names) - 2)])
    return f"{operands(op, input=operand(names), stats=stats, weight='c', bias='c')} -> {operand(names)}"


def _running_text(op: Op) -> str:
    """The notation of running_averages: one layer may be cut by channels; several layers stay whole."""
    stats, old = op.argument("stats").shape, op.argument("old")
    counts = ["..."] * len(op.argument("tracked"))
    if len(old) > 2:
        sides = [operand(whole([f"c{i}"])) for i in range(len(old))]
        return f"{', '.join(['two! t!', *sides, *counts])} -> {', '.join(sides)}"
    rows = " ".join("c" if size > 1 else "1" for size in stats[1:])
    return f"{', '.join([f'two! {rows}', 'c', 'c', *counts])} -> c, c"


def _own_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of own_batch_norm: the batch may be cut between the parts with their own statistics."""
    shape, parts = op.inputs[0].shape, op.argument("parts")
    names = operand(["(p q!)", "c", *whole(named(len(shape) - 2, "s"))])
    return f"{operands(op, input=names, weight='c', bias='c')} -> {names}, two! c", {"p": parts, "q": shape[0] // parts}


def _local_own(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(parts=op.argument("parts") // cut_size(bound, assignment, ["p"]))
    return Local(op.target, args, kwargs)


register((aten.layer_norm.default,), Rule(_layer_text, expand=_expand_layer))
register((aten.rms_norm.default,), Rule(_layer_text, expand=_expand_rms))
register((aten.group_norm.default,), Rule(_group_text, localize=_local_groups, expand=_expand_group))
register((aten.batch_norm.default, batch_norm), Rule(_channel_text, expand=_expand_batch))
register((aten.instance_norm.default, instance_norm), Rule(_channel_text, expand=_expand_instance))
register((moments,), Rule(_moments_text, localize=_local_moments))
register((combined_moments,), Rule(_combined_text))
register((normalise,), Rule(_normalise_text))
register((batch_normalise,), Rule(_batch_normalise_text))
register((running_averages,), Rule(_running_text))
register((own_batch_norm,), Rule(_own_text, localize=_local_own))
# The autograd function of nn.CrossMapLRN2d, which sums over adjacent channels.
register((CROSS_MAP_NORM,), Rule("n c! h w -> n c! h w"))
