"""Attention, and what stands around it: concrete calls, see `rule_cases`."""

import math

import torch
from rule_cases import booleans, fixed, rand
from rule_reference import collected, runs

aten = torch.ops.aten
CASES, case = collected()

attention = aten.scaled_dot_product_attention.default


def qkv(*batch: int, length: int = 4, keys: int = 4, width: int = 4, depth: int = 4) -> list[torch.Tensor]:
    return [rand(*batch, length, width), rand(*batch, keys, width), rand(*batch, keys, depth)]


def grouped(heads: int, kv_heads: int) -> list[torch.Tensor]:
    return [rand(2, heads, 4, 2), rand(2, kv_heads, 4, 2), rand(2, kv_heads, 4, 2)]


def hidden(*shape: int) -> torch.Tensor:
    """A mask in which one row is masked altogether."""
    mask = booleans(*shape)
    mask[..., 1, :] = False
    return mask


case(6, attention, *qkv(2, 4, keys=8, width=2, depth=2))
case(6, attention, *qkv(2, 4), None, 0.0, True)
case(5, attention, *qkv(2, keys=8, width=2, depth=2), is_causal=True)  # more keys than queries
case(5, attention, *qkv(2, length=8, width=2, depth=2), is_causal=True, scale=0.3)
case(5, attention, *qkv(4), None, 0.0, False, scale=2.0)
case(4, attention, *qkv(), is_causal=True)
case(6, attention, rand(2, 4, 4, 2), rand(1, 4, 4, 2), rand(2, 1, 4, 2))  # batch and heads broadcast
case(6, attention, rand(4, 4, 2), rand(2, 1, 4, 2), rand(2, 4, 4, 2))
for shape in ((4, 4), (2, 1, 1, 4), (2, 1, 4, 1)):
    case(6, attention, *qkv(2, 2, width=2, depth=2), booleans(*shape))
for shape in ((4, 1), (1, 2, 4, 4)):
    case(6, attention, *qkv(2, 2, width=2, depth=2), rand(*shape))
case(6, attention, *qkv(2, 2, width=2), hidden(4, 4))
case(6, attention, *qkv(2, 2, width=2), torch.zeros(4, 4, dtype=torch.float64).masked_fill(~hidden(4, 4), -math.inf))
case(5, attention, (fixed(rand(4, 4, 2)) * 1e3).requires_grad_(), rand(4, 4, 2), rand(4, 4, 2))  # exp of scores: inf
both = *qkv(2, 2), fixed(rand(4, 4)), 0.0, True  # both a mask and a causal one
if runs(attention, *both):  # which torch 2.15 refuses
    case(2, attention, *both)
case(7, attention, *grouped(4, 2), enable_gqa=True)
case(7, attention, *grouped(8, 2), is_causal=True, enable_gqa=True)
case(7, attention, *grouped(4, 2), booleans(2, 1, 4, 4), enable_gqa=True, scale=0.7)
case(7, attention, *grouped(4, 2), rand(4, 4, 4), enable_gqa=True)
case(6, attention, *grouped(4, 1), rand(4, 4), enable_gqa=True)
case(6, attention, *grouped(4, 4), is_causal=True, enable_gqa=True)
case(7, attention, rand(2, 4, 4, 2), rand(2, 2, 4, 2), rand(2, 4, 4, 2), enable_gqa=True)  # each as many as it likes
case(6, attention, rand(2, 4, 4, 2), rand(2, 1, 4, 2), rand(2, 4, 4, 2), enable_gqa=True)

# Rotary embeddings: pairs as complex numbers, or as halves of a dim; keys repeated for grouped queries.

complexes = [rand(2, 4, 2, 2, dtype=torch.complex128), rand(4, 1, 2, dtype=torch.complex128)]
case(4, aten.mul.Tensor, *complexes)
case(3, aten.view_as_complex.default, rand(2, 4, 4, 2))
case(3, aten.view_as_real.default, rand(2, 4, 4, dtype=torch.complex128))
case(5, aten.view.default, rand(2, 4, 2, 8), [2, 4, 2, 4, 2])
case(5, aten.expand.default, rand(2, 2, 1, 4, 2), [2, 2, 2, 4, 2])
case(5, aten.reshape.default, rand(2, 2, 2, 4, 2), [2, 4, 4, 2])
case(4, aten.repeat_interleave.self_int, rand(2, 2, 4), 2, 1)
