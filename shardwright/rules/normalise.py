"""Normalisation layers. Over a cut dim, by the mean and variance of each part, put together in one exchange:

    out = (x − mean) / √(variance + eps) · weight + bias          rms: x / √(Σ x² / count + eps) · weight

A batch norm that trains normalises by the whole batch, as on one device. Its running statistics are replicas: where the
channels are cut, each rank works out the new values of its own and they are gathered.

The backward of all but rms is one sum over the ranks: of the gradients of mean and variance together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import normalisation as parts_of
from ..graph import Op, Value
from .dims import compound, cut_size, named, operand, operands, whole, wide
from .notation import Assignment, Bound
from .registry import Expansion, Local, Rule, register

aten = torch.ops.aten


def _dims(op: Op) -> list[str]:
    return named(len(op.inputs[0].shape))


def _cuts(bound: Bound, assignment: Assignment, dims: Sequence[int]) -> list[int]:
    """Into how many parts each of these dims of the first input is cut."""
    layout = bound.input_layout(0, assignment)
    assert layout is not None
    return [layout.cuts[d] for d in dims]


def _stats(b, x: Value, dims: Sequence[int], cuts: Sequence[int]) -> Value:
    """Mean and biased variance of x over `dims`, stacked; the dims stay, as ones."""
    made = b.call(parts_of.moments, x, list(dims), list(cuts))
    gathered = b.lay(made, ((), *b.layouts[made.name].dims[1:]))
    return b.call(parts_of.combined_moments, gathered)


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
    return lambda b: b.call(parts_of.normalise, x, _stats(b, x, dims, cuts), op.argument("weight"), op.argument("bias"),
                            op.argument("eps"))


def _expand_rms(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    dims = _last_dims(op)
    if math.prod(_cuts(bound, assignment, dims)) == 1:
        return None
    x, weight, eps = op.inputs[0], op.argument("weight"), op.argument("eps")
    count = math.prod(x.shape[d] for d in dims)

    def work(b):
        values = b.to(x, wide(x.dtype))
        total = b.call(aten.sum.dim_IntList, b.call(aten.square.default, values), dims, True)
        size = b.call(aten.add.Scalar, b.call(aten.div.Tensor, total, count),
                      torch.finfo(values.dtype).eps if eps is None else eps)
        made = b.call(aten.mul.Tensor, values, b.call(aten.rsqrt.default, size))
        return b.to(made if weight is None else b.call(aten.mul.Tensor, made, weight), op.outputs[0].dtype)
    return work


# -- by groups of channels ---------------------------------------------------------------------------------------------


def _group_text(op: Op) -> tuple[str, dict[str, int]]:
    """Channels are groups, each of so many: cut by groups first."""
    shape, groups = op.inputs[0].shape, op.argument("num_groups")
    names = operand(["n", "(g k)", *named(len(shape) - 2, "s")])
    return f"{operands(op, input=names, weight='(g k)', bias='(g k)')} -> {names}", \
        {"g": groups, "k": shape[1] // groups}


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

    def work(b):
        def by_group(affine: Value | None) -> Value | None:
            return affine if affine is None else b.call(aten.view.default, affine, grouped + [1] * len(spatial))
        values = b.call(aten.reshape.default, x, [x.shape[0], *grouped, *spatial])
        made = b.call(parts_of.normalise, values, _stats(b, values, dims, cuts), by_group(op.argument("weight")),
                      by_group(op.argument("bias")), op.argument("eps"))
        return b.call(aten.reshape.default, made, list(x.shape))
    return work


# -- by channels -------------------------------------------------------------------------------------------------------


def _channel_text(op: Op) -> str:
    """All that is not the input has one element a channel, but for the number of batches."""
    names = ["n", "c", *named(len(op.inputs[0].shape) - 2, "s")]
    texts = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    outputs = [operand(names), *["c"] * (len(op.outputs) - 1)]
    return f"{operands(op, input=operand(names), tracked='...', **texts)} -> {', '.join(outputs)}"


def _updates(b, op: Op, stats: Value, count: int) -> Sequence[Value]:
    """The new running statistics of one layer; `count` values were looked at for each."""
    tracked = op.argument("tracked")
    return b.call(parts_of.running_averages, b.call(aten.detach.default, stats),
                  [op.argument("running_mean"), op.argument("running_var")], [] if tracked is None else [tracked],
                  [op.argument("momentum")], [1.0, count / (count - 1) if count > 1 else math.nan])


def _expand_batch(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    x = op.inputs[0]
    dims = [d for d in range(len(x.shape)) if d != 1]
    cuts = _cuts(bound, assignment, dims)
    if math.prod(cuts) == 1 or not op.argument("training", True):
        return None

    def work(b):
        stats = _stats(b, x, dims, cuts)
        made = b.call(parts_of.batch_normalise, x, stats, op.argument("weight"), op.argument("bias"),
                      op.argument("eps"))
        if len(op.outputs) == 1:
            return made
        return made, *_updates(b, op, stats, math.prod(x.shape[d] for d in dims))
    return work


def _expand_instance(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """The running statistics are those of the instances, averaged over the batch."""
    x = op.inputs[0]
    dims = list(range(2, len(x.shape)))
    cuts, updates = _cuts(bound, assignment, dims), len(op.outputs) > 1
    instances = _cuts(bound, assignment, [0])[0] if updates else 1
    if math.prod(cuts) * instances == 1 or not op.argument("use_input_stats", True):
        return None

    def work(b):
        def by_channel(affine: Value | None) -> Value | None:
            return affine if affine is None else b.call(aten.view.default, affine, [-1] + [1] * len(dims))
        stats = _stats(b, x, dims, cuts)
        made = b.call(parts_of.normalise, x, stats, by_channel(op.argument("weight")), by_channel(op.argument("bias")),
                      op.argument("eps"))
        if not updates:
            return made
        total = b.call(aten.sum.dim_IntList, b.call(aten.detach.default, stats), [1])
        average = b.call(aten.div.Tensor, total, x.shape[0])
        return made, *_updates(b, op, average, math.prod(x.shape[d] for d in dims))
    return work


# -- the pieces --------------------------------------------------------------------------------------------------------


def _moments_text(op: Op) -> tuple[str, dict[str, int]]:
    """A dim that is worked on in parts is cut into these, or into runs of them."""
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
    parts = [count // cut_size(bound, assignment, [f"p{d}"])
             for d, count in zip(op.argument("dims"), op.argument("parts"))]
    args, kwargs = op.with_arguments(parts=parts)
    return Local(op.target, args, kwargs)


def _combined_text(op: Op) -> str:
    kept = operand(["two!", *named(len(op.inputs[0].shape) - 2)])
    return f"p! {kept} -> {kept}"


def _aligned(shape: Sequence[int], rank: int) -> str:
    """An operand that is broadcast to `rank` dims."""
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
    """Of one layer, cut by channels; of several, whole."""
    stats, old = op.argument("stats").shape, op.argument("old")
    counts = ["..."] * len(op.argument("tracked"))
    if len(old) > 2:
        sides = [operand(whole([f"c{i}"])) for i in range(len(old))]
        return f"{', '.join(['two! t!', *sides, *counts])} -> {', '.join(sides)}"
    rows = " ".join("c" if size > 1 else "1" for size in stats[1:])
    return f"{', '.join([f'two! {rows}', 'c', 'c', *counts])} -> c, c"


def _own_text(op: Op) -> tuple[str, dict[str, int]]:
    """The batch is cut between the parts that have statistics of their own."""
    shape, parts = op.inputs[0].shape, op.argument("parts")
    names = operand(["(p q!)", "c", *whole(named(len(shape) - 2, "s"))])
    return f"{operands(op, input=names, weight='c', bias='c')} -> {names}, two! c", {"p": parts, "q": shape[0] // parts}


def _local_own(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(parts=op.argument("parts") // cut_size(bound, assignment, ["p"]))
    return Local(op.target, args, kwargs)


register((aten.layer_norm.default,), Rule(_layer_text, expand=_expand_layer))
register((aten.rms_norm.default,), Rule(_layer_text, expand=_expand_rms))
register((aten.group_norm.default,), Rule(_group_text, localize=_local_groups, expand=_expand_group))
register((aten.batch_norm.default, parts_of.batch_norm), Rule(_channel_text, expand=_expand_batch))
register((aten.instance_norm.default, parts_of.instance_norm), Rule(_channel_text, expand=_expand_instance))
register((parts_of.moments,), Rule(_moments_text, localize=_local_moments))
register((parts_of.combined_moments,), Rule(_combined_text))
register((parts_of.normalise,), Rule(_normalise_text))
register((parts_of.batch_normalise,), Rule(_batch_normalise_text))
register((parts_of.running_averages,), Rule(_running_text))
register((parts_of.own_batch_norm,), Rule(_own_text, localize=_local_own))
