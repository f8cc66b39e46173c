"""Scaled dot product attention:  out = softmax(scale · q kᵀ + mask) v.

1. Batch, heads and the width of the value may be split without further operators.
2. Queries may be split too: the causal mask is then computed explicitly, and each rank takes the rows of its queries.
3. Where the keys or the width of the scores are split too, or weights are dropped, the attention is expanded: the
   softmax over split keys and the sums over ranks follow from the operators of the expansion.
4. With grouped queries a head of the queries is a pair (head of the keys, member of its group). Heads may be split
   further than there are key heads; the keys are then repeated.

A row whose every key is masked gives zeros.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op, Value
from .dims import cut_size, named, operand, operands, positions, wide
from .notation import Assignment, Bound
from .random import dropped
from .registry import Expansion, Rule, register

aten = torch.ops.aten

GROUPED = "(h g)"


def _grouping(op: Op) -> tuple[int, int]:
    """The number of key heads, and the number of query heads for each key head."""
    queries, *rest = (op.argument(name).shape[-3] for name in ("query", "key", "value"))
    heads = math.gcd(*(size for size in rest if size > 1), queries) if max(rest) > 1 else 1
    return heads, queries // heads


def _grouped(op: Op) -> bool:
    """True where several query heads share a key head."""
    return bool(op.argument("enable_gqa")) and _grouping(op)[1] > 1


def _text(op: Op) -> str | tuple[str, dict[str, int]]:
    query, key, value = (op.argument(name) for name in ("query", "key", "value"))
    mask, sizes = op.argument("attn_mask"), {}
    batch = named(len(op.output(0).shape) - 2, "b")
    scores = [*batch, "l", "s"]
    if _grouped(op):
        heads, members = _grouping(op)
        sizes = {"h": heads, "g": members}
        batch[-1] = scores[-3] = GROUPED

    def dims(tensor: Value, *last: str) -> str:
        mine = batch[len(batch) - len(tensor.shape) + 2 :]
        if sizes:
            mine[-1] = {query.shape[-3]: GROUPED, heads: "h"}.get(tensor.shape[-3], "1")
        return operand([*mine, *last])

    both = "!" if mask is not None and op.argument("is_causal") else ""  # kernels differ in their treatment of both
    texts = {
        "query": dims(query, f"l{both}", f"d{both}"),
        "key": dims(key, f"s{both}", "d"),
        "value": dims(value, "s", f"e{both}"),
    }
    if mask is not None:
        mine = scores[len(scores) - len(mask.shape) :]
        texts["attn_mask"] = operand(["1" if size == 1 else name for name, size in zip(mine, mask.shape)])
    return f"{operands(op, **texts)} -> {operand([*batch, 'l', 'e'])}", sizes


def _expand(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    if op.argument("dropout_p") or cut_size(bound, assignment, ["s", "d"]) > 1:
        return lambda b: _worked_out(b, op)
    if op.argument("is_causal") and cut_size(bound, assignment, ["l"]) > 1:
        return lambda b: _masked(b, op)
    return None


def _causal(b, op: Op) -> Value:
    """True where a query may see a key: the position of the key is not after the query."""
    query, key = op.argument("query"), op.argument("key")
    rows = b.call(aten.unsqueeze.default, positions(b, query, query, -2), 1)
    return b.call(aten.ge.Tensor, rows, positions(b, key, key, -2))


def _masked(b, op: Op) -> Value:
    args, kwargs = op.with_arguments(attn_mask=_causal(b, op), is_causal=False)
    return b.call(op.target, *args, **kwargs)


def _worked_out(b, op: Op) -> Value:
    out, mask = op.output(0).dtype, op.argument("attn_mask")
    query, key, value = (b.to(op.argument(name), wide(out)) for name in ("query", "key", "value"))
    scale = op.argument("scale") or 1 / math.sqrt(query.shape[-1])
    heads, members = _grouping(op) if _grouped(op) else (0, 0)
    if heads:
        query, key, value = (_by_group(b, x, heads, members) for x in (query, key, value))
        mask = _by_group(b, mask, heads, members) if mask is not None and len(mask.shape) > 2 else mask
    scores = b.call(aten.matmul.default, b.call(aten.mul.Tensor, query, scale), b.call(aten.mT.default, key))
    if op.argument("is_causal"):
        mask = _causal(b, op)
    if mask is not None and mask.dtype == torch.bool:
        scores = b.call(aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = b.call(aten.add.Tensor, scores, mask)
    weights = _weights(b, scores)
    if op.argument("dropout_p"):
        weights = dropped(b, op, weights, op.argument("dropout_p"))
    made = b.call(aten.matmul.default, weights, value)
    if heads:
        made = b.call(aten.reshape.default, made, list(op.output(0).shape))
    return b.to(made, out)


def _by_group(b, x: Value, heads: int, members: int) -> Value:
    """The dim of heads as two dims, [..., key heads, members of a group, ·, ·], with size 1 for shared heads."""
    count = x.shape[-3]
    pair = [heads, members] if count == heads * members else [count, 1]
    return b.call(aten.reshape.default, x, [*x.shape[:-3], *pair, *x.shape[-2:]])


def _weights(b, scores: Value) -> Value:
    """The softmax over the last dim; zeros where every element is masked."""
    top = b.call(aten.amax.default, b.call(aten.detach.default, scores), [-1], True)
    top = b.call(aten.masked_fill.Scalar, top, b.call(aten.isinf.default, top), 0)  # inf - inf is NaN
    raised = b.call(aten.exp.default, b.call(aten.sub.Tensor, scores, top))
    total = b.call(aten.sum.dim_IntList, raised, [-1], True)
    total = b.call(aten.masked_fill.Scalar, total, b.call(aten.eq.Scalar, total, 0), 1)
    return b.call(aten.div.Tensor, raised, total)


register((aten.scaled_dot_product_attention.default,), Rule(_text, expand=_expand))
