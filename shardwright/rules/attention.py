"""Scaled dot product attention:  out = softmax(scale · q kᵀ + mask) v.

1. Batch, heads and the width of the value may be split without further operators.
2. Queries may be split too: the causal mask is then computed explicitly, and each rank takes the rows of its queries.
3. Where the keys or the width of the scores are split too, or weights are dropped, the attention is expanded: the
   softmax over split keys and the sums over ranks follow from the operators of the expansion.
4. Weights that are dropped by torch's own numbers (``random="fast"``) stay inside one attention
   (`attention_with_dropout`), where keys and widths are whole.
5. With grouped queries a head of the queries is a pair (head of the keys, member of its group). Heads may be split
   further than there are key heads; the keys are then repeated.

A row whose every key is masked gives zeros.

The operator of case 4:

    out = scaled_dot_product_attention(q, k, v, mask, p)      with the generator of the device seeded before

torch takes its fused kernel where the device has one, and the scores [l, s] are never stored. The seed follows from the
operator's number and from the start of the rank's slice, as for every fast number (`counter_rng`):
replicas agree, slices differ, and a recomputed attention drops the same weights. The state of the generator is the same
before and after.

A compiled program calls torch's attention, too. The generator is seeded once, before the program.

Example: 8 rows and 4 heads, rows cut in 4 parts and heads in 2. Each of 8 ranks calls torch with [2, 2, l, d] and a
seed of its own; two ranks that hold the same rows and heads have the same seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..graph import Graph, Op, Value
from ..layout import Digits
from ..torch_private import FakeTensor
from .dims import cut_size, named, operand, operands, positions, wide
from .notation import Assignment, Bound
from .random_numbers.counter_rng import PLAIN, fast_seed
from .random_numbers.dropout import drop
from .random_numbers.traced_numbers import traced
from .random_operators import dropped, numbers_of, pieces, placed
from .registry import Builder, Expansion, Rule, register

__all__ = ["attention_with_dropout", "compiled_attention", "seeded", "with_fast_attention", "written_out_attention"]


aten = torch.ops.aten

GROUPED = "(h g)"


def with_fast_attention(graph: Graph) -> Graph:
    """The graph of a model whose random numbers are "fast": its attentions with dropout say so (`Op.fast`)."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    drops = [op.target is attention and bool(op.argument("dropout_p")) for op in graph.ops]
    if not any(drops):
        return graph
    return graph.with_ops(tuple(replace(op, fast=True) if d else op for op, d in zip(graph.ops, drops)))


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generator of a device inside the ``with`` block."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
        torch.get_device_module(device).manual_seed(seed)
        yield


def _attention(
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    whole: Sequence[int],
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    micro: Sequence[int] = (),
    enable_gqa: bool = False,
) -> Tensor:
    """The attention of a rank's slice.

    Args:
        seed, starts, micro: see `counter_rng`.
        dims: the cut dims of the result [..., l, e].
        whole: sizes of the whole result without its last dim.
        number: of the random operator.
        enable_gqa: True where a key head serves several query heads.
    """
    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
    if query.is_meta or isinstance(query, FakeTensor):
        # No numbers without values. Without dropout a CPU has a fused kernel too, which saves what a device's saves.
        return attend(query, key, value, attn_mask, 0.0, is_causal)
    if enable_gqa:
        rows = (*torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value))), query.shape[-3])
    else:
        rows = (*torch.broadcast_shapes(*(x.shape[:-2] for x in (query, key, value))),)
    size = (*rows, query.shape[-2])
    with seeded(query.device, fast_seed(seed, starts, dims, size, whole, number, micro)):
        return attend(query, key, value, attn_mask, dropout_p, is_causal)


_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define(
    "attention_with_dropout(Tensor seed, Tensor[] starts, int[] dims, int[] whole, int number, Tensor query, "
    "Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, int[] micro=[], "
    "bool enable_gqa=False) -> Tensor"
)
_library.impl("attention_with_dropout", _attention, "CompositeImplicitAutograd")


def compiled_attention(
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    whole: Sequence[int],
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    micro: Sequence[int] = (),
    enable_gqa: bool = False,
) -> Tensor:
    """`attention_with_dropout` in a compiled program, which draws from the device's generator: it is seeded before the
    program (`runtime.device_seed`)."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def written_out_attention(
    seed: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int],
    whole: Sequence[int],
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    micro: Sequence[int] = (),
    enable_gqa: bool = False,
) -> Tensor:
    """The same with exact numbers, by operators that a compiler sees through: for programs whose attentions are cut in
    several ways, for which one seed of the generator does not do."""
    out, (rows, columns) = query.dtype, (query.shape[-2], key.shape[-2])
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    wide_query, wide_key, wide_value = (x.to(wide(out)) for x in (query, key, value))
    scores = (wide_query * (scale or 1 / math.sqrt(query.shape[-1]))) @ wide_key.mT
    if is_causal:
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        seen = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if seen else scores + attn_mask
    weights = scores.softmax(-1)
    weights = torch.where(scores.amax(-1, keepdim=True) == -math.inf, 0.0, weights)
    draw = traced(drop, query.device)
    of_all = (seed, starts, weights, dims, [*weights.shape], [*whole, columns], number, dropout_p, micro)
    return (draw(*of_all)[0] @ wide_value).to(out)


#: Its gradient is that of the operators it calls.
attention_with_dropout = torch.ops.shardwright.attention_with_dropout.default

PLAIN[attention_with_dropout] = _attention


def _grouping(op: Op) -> tuple[int, int]:
    """The number of key heads, and the number of query heads for each key head."""
    queries, *rest = (op.argument(name).shape[-3] for name in ("query", "key", "value"))
    heads = math.gcd(*(size for size in rest if size > 1), queries) if max(rest) > 1 else 1
    return heads, queries // heads


def _grouped(op: Op) -> bool:
    """True where several query heads share a key head."""
    return bool(op.argument("enable_gqa")) and _grouping(op)[1] > 1


def _texts(op: Op) -> tuple[dict[str, str], str, dict[str, int]]:
    """The texts of the tensor arguments by name, that of the result, and the sizes of factors."""
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
    return texts, operand([*batch, "l", "e"]), sizes


def _text(op: Op) -> tuple[str, dict[str, int]]:
    texts, out, sizes = _texts(op)
    return f"{operands(op, **texts)} -> {out}", sizes


def _expand(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    inside = op.fast and cut_size(bound, assignment, ["e"]) == 1 and _groups_stay(op, bound, assignment)
    if cut_size(bound, assignment, ["s", "d"]) > 1 or (op.argument("dropout_p") and not inside):
        return lambda b: _worked_out(b, op)
    if op.argument("dropout_p"):
        out, cut_queries = bound.output_layout(0, assignment), cut_size(bound, assignment, ["l"]) > 1
        assert out is not None and out.dims is not None
        rows = out.dims[:-1]
        return lambda b: _dropped_inside(b, op, rows, cut_queries)
    if op.argument("is_causal") and cut_size(bound, assignment, ["l"]) > 1:
        return lambda b: _masked(b, op)
    return None


def _groups_stay(op: Op, bound: Bound, assignment: Assignment) -> bool:
    """True where each rank has whole groups of query heads beside their key heads, or a part of one group."""
    if not _grouped(op):
        return True
    (heads, members), (parts, more) = _grouping(op), (cut_size(bound, assignment, [name]) for name in "hg")
    return (more == 1 and heads % parts == 0) or (parts == heads and members % more == 0)


def _dropping_text(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of `attention_with_dropout`: the seed, the starts, and an attention; a cut dim is (parts, size of a
    part), as in the notation of a mask.

    Of grouped heads in at most as many parts as there are key heads a part of the keys stands beside its queries. In
    more parts (p r), each of p key heads stands beside r parts of its queries.
    """
    texts, out, sizes = _texts(op)
    starts, placed_texts, more = placed(op, op.output(0).shape[:-1])
    names, cut = [*named(len(op.output(0).shape) - 2, "b"), "l"], {}
    for d, start, begin in zip(op.argument("dims"), range(len(starts)), op.argument("starts")):
        if not (sizes and d == len(names) - 2):
            cut[names[d]] = placed_texts[d]
            continue
        heads, parts = sizes["h"], begin.shape[0]
        if parts <= heads:
            cut |= {"Q": placed_texts[d], "h": f"(p{d} k{d}!)"}
            more[f"k{d}"] = heads // parts
        else:
            starts[start] = f"(p{d} r{d})"
            cut |= {"Q": f"(p{d} r{d} q{d}!)", "h": f"p{d}"}
            more[f"r{d}"] = parts // heads
    if "Q" not in cut:
        more |= sizes
    plain = f"{', '.join(texts.values())} -> {out}".replace(GROUPED, "Q")
    plain = re.sub(r"[a-zQ]+[0-9]*", lambda m: cut.get(m[0], m[0]), plain).replace("Q", GROUPED)
    return f"{', '.join(['seed!', *starts])}, {plain}", more


def _causal(b: Builder, op: Op) -> Value:
    """True where a query may see a key: the position of the key is not after the query."""
    query, key = op.argument("query"), op.argument("key")
    rows = b.call(aten.unsqueeze.default, positions(b, query, query, -2), 1)
    return b.call(aten.ge.Tensor, rows, positions(b, key, key, -2))


def _masked(b: Builder, op: Op) -> Value:
    args, kwargs = op.with_arguments(attn_mask=_causal(b, op), is_causal=False)
    return b.call(op.target, *args, **kwargs)


def _dropped_inside(b: Builder, op: Op, rows: Sequence[Digits], cut_queries: bool) -> Value:
    query, key, value, mask = (op.argument(name) for name in ("query", "key", "value", "attn_mask"))
    causal = op.argument("is_causal")
    if causal and cut_queries:
        mask, causal = _causal(b, op), False
    p, scale = op.argument("dropout_p"), op.argument("scale")
    shape = op.output(0).shape[:-1]
    place, micro = numbers_of(b, op, shape, rows), pieces(op, shape)
    made: Value = b.call(
        attention_with_dropout, *place, query, key, value, mask, p, causal, scale, *(micro or [[]]), _grouped(op)
    )
    return made


def _worked_out(b: Builder, op: Op) -> Value:
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


def _by_group(b: Builder, x: Value, heads: int, members: int) -> Value:
    """The dim of heads as two dims, [..., key heads, members of a group, ·, ·], with size 1 for shared heads."""
    count = x.shape[-3]
    pair = [heads, members] if count == heads * members else [count, 1]
    return b.call(aten.reshape.default, x, [*x.shape[:-3], *pair, *x.shape[-2:]])


def _weights(b: Builder, scores: Value) -> Value:
    """The softmax over the last dim; zeros where every element is masked."""
    top = b.call(aten.amax.default, b.call(aten.detach.default, scores), [-1], True)
    top = b.call(aten.masked_fill.Scalar, top, b.call(aten.isinf.default, top), 0)  # inf - inf is NaN
    raised = b.call(aten.exp.default, b.call(aten.sub.Tensor, scores, top))
    total = b.call(aten.sum.dim_IntList, raised, [-1], True)
    total = b.call(aten.masked_fill.Scalar, total, b.call(aten.eq.Scalar, total, 0), 1)
    return b.call(aten.div.Tensor, raised, total)


register((aten.scaled_dot_product_attention.default,), Rule(_text, expand=_expand))
register((attention_with_dropout,), Rule(_dropping_text))
