"""Attention with dropout in one operator of torch, its numbers from torch's own generator (``random="fast"``).

    out = scaled_dot_product_attention(q, k, v, mask, p)      with the generator of the device seeded before

`attention` expands an attention with dropout into this operator where the keys and the widths are whole. torch then
takes its fused kernel where the device has one, and the scores [l, s] are never stored. The seed follows from the
operator's number and from the start of the rank's slice, as for every fast number (`counter_rng`): replicas agree,
slices differ, and a recomputed attention drops the same weights. The state of the generator is the same before and
after.

Example: 8 rows and 4 heads, rows cut in 4 parts and heads in 2. Each of 8 ranks calls torch with [2, 2, l, d] and a
seed of its own; two ranks that hold the same rows and heads have the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ...graph import Graph
from ...torch_private import FakeTensor
from .counter_rng import PLAIN, fast_seed

__all__ = ["attention_with_dropout", "with_fast_attention"]


def with_fast_attention(graph: Graph) -> Graph:
    """The graph of a model whose random numbers are "fast": its attentions with dropout say so (`Op.fast`)."""
    attention = torch.ops.aten.scaled_dot_product_attention.default
    drops = [op.target is attention and bool(op.argument("dropout_p")) for op in graph.ops]
    if not any(drops):
        return graph
    return graph.with_ops(tuple(replace(op, fast=True) if d else op for op, d in zip(graph.ops, drops)))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
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
) -> Tensor:
    """The attention of a rank's slice.

    Args:
        seed, starts, micro: see `counter_rng`.
        dims: the cut dims of the result [..., l, e].
        whole: sizes of the whole result without its last dim.
        number: of the random operator.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    if query.is_meta or isinstance(query, FakeTensor):
        # No numbers without values. Without dropout a CPU has a fused kernel too, which saves what a device's saves.
        return attend(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
    rows = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    size = (*rows, query.shape[-2])
    with _seeded(query.device, fast_seed(seed, starts, dims, size, whole, number, micro)):
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define(
    "attention_with_dropout(Tensor seed, Tensor[] starts, int[] dims, int[] whole, int number, Tensor query, "
    "Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, float? scale, int[] micro=[]) "
    "-> Tensor"
)
_library.impl("attention_with_dropout", _attention, "CompositeImplicitAutograd")

#: Its gradient is that of the operators it calls.
attention_with_dropout = torch.ops.shardwright.attention_with_dropout.default

PLAIN[attention_with_dropout] = _attention
