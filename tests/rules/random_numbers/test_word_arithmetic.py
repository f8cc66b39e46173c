"""Random numbers on a device without integers of 64 bits, computed in halves of 32 bits, and without float64."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.rules.random_numbers import counter_rng
from shardwright.rules.random_numbers.counter_rng import (
    KINDS,
    chosen,
    fill_as_able,
    fill_in_halves,
    host_words,
    placed_stream,
)
from shardwright.rules.random_numbers.word_arithmetic import Halves
from shardwright.torch_private import pytree

mask = torch.ops.shardwright.mask.default


aten = torch.ops.aten
#: Operators that look at integers of 64 bits, or copy them, and compute nothing.
LOOKS = {
    aten.view.dtype,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.copy_.default,
    aten.detach.default,
}


class Narrow(TorchDispatchMode):
    """A device on which no operator computes with integers of 64 bits, nor has float64.

    Args:
        looks: True where integers of 64 bits may be looked at.
        words: True where operators compute with them.
    """

    def __init__(self, looks: bool = False, words: bool = False) -> None:
        super().__init__()
        self.looks, self.words = looks, words

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        may = self.words or (self.looks and func in LOOKS)
        for x in pytree.tree_leaves((args, kwargs, made)):
            if isinstance(x, Tensor) and (x.dtype == torch.float64 or (x.dtype == torch.int64 and not may)):
                raise NotImplementedError(f"{func} of {x.dtype}")
        return made


def both(seed: Tensor, dims: list[int], starts: list[int], size: list[int], whole: list[int], p: float, *micro: Any):
    """The mask of the operator, and the mask in halves."""
    begins = [torch.tensor([start]) for start in starts]
    expected = mask(seed, begins, None, dims, size, whole, 3, p, torch.bool, None, *micro)
    at, stream, _ = placed_stream(seed, begins, dims, size, whole, 3, *(micro or ((),)))
    out = torch.empty(size, dtype=torch.bool)
    with Narrow():
        fill_in_halves(out, at, stream, round(p * 2**32) - (1 << 31))
    return expected, out


@pytest.mark.parametrize("trial", range(200))
def test_slices_of_random_tensors(trial: int) -> None:
    draws = random.Random(trial)
    whole = [draws.randint(1, 9) for _ in range(draws.randint(0, 4))]
    size, dims, starts = list(whole), [], []
    for d, extent in enumerate(whole):
        if draws.random() < 0.5:
            size[d] = draws.randint(1, extent)
            dims.append(d)
            starts.append(draws.randint(0, extent - size[d]))
    seed = torch.tensor([draws.getrandbits(63), draws.randint(0, 9), 1, 0])
    expected, got = both(seed, dims, starts, size, whole, draws.choice([0.1, 0.5, 0.9]))
    assert torch.equal(expected, got)


@pytest.mark.parametrize("first", [0, 5, 2**31 - 3, 2**32 - 3, 2**45 + 7])
def test_positions_beyond_32_bits(first: int) -> None:
    """A slice of 4 rows and 9 columns in a tensor of 2⁶⁰ elements, which ends in the words after the bound."""
    expected, got = both(torch.tensor([7, 1, 1, 0]), [0, 1], [first >> 10, 3], [4, 9], [2**50, 1025], 0.5)
    assert torch.equal(expected, got) and expected.any() and not expected.all()


@pytest.mark.parametrize("k", range(3))
def test_micro_batches(k: int) -> None:
    expected, got = both(torch.tensor([7, 1, 1, k]), [0], [2], [4, 5], [8, 5], 0.5, [0, 3, 2])
    assert torch.equal(expected, got)


def test_arithmetic_of_halves() -> None:
    draws = random.Random(0)
    for _ in range(500):
        a, b, bits = draws.getrandbits(64), draws.getrandbits(64), draws.randint(1, 31)
        x, y = (Halves.of(n, (1,), torch.device("cpu")) for n in (a, b))
        for made, expected in (
            (x.plus(y), a + b),
            (x.times(b), a * b),
            (x.times(y), a * b),
            (x.shifted(bits), a >> bits),
            (x.shifted(bits + 31), a >> bits + 31),
        ):
            assert (int(made.upper) & 0xFFFFFFFF) << 32 | int(made.lower) & 0xFFFFFFFF == expected & (1 << 64) - 1


def test_the_question_for_words() -> None:
    counter_rng.has_words.cache_clear()
    try:
        assert counter_rng.has_words("cpu")
        counter_rng.has_words.cache_clear()
        with Narrow():
            assert not counter_rng.has_words("cpu")
    finally:
        counter_rng.has_words.cache_clear()


# -- numbers without float64 -------------------------------------------------------------------------------------------


def at(n: list[int]) -> Tensor:
    """Words whose upper 53 bits are these."""
    return torch.tensor([(x << 11) - (1 << 64) if x >> 52 else x << 11 for x in n])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_words_are_those_of_float64(kind: str) -> None:
    """Uniform numbers and integers bit for bit, the others to the rounding of float32: all over, in the tails, and
    around ½."""
    draws = random.Random(0)
    tails = [draws.getrandbits(53) >> draws.randrange(53) for _ in range(4000)]
    middle = [(1 << 52) + sign * (draws.getrandbits(52) >> draws.randrange(52)) for sign in (1, -1) for _ in tails]
    upper = [(1 << 53) - 1 - (n | 1 << 30) for n in tails]  # nearer to 1 a float64 rounds the ½ away
    word = torch.cat((at([*tails, *middle, *upper]), host_words(5, 2**63 + 1, np.array([0]), 100_000)[0]))
    if kind == "integer":
        expected, dtypes = word >> 1 & 2**63 - 1, (torch.int64,)
    elif kind == "uniform":
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
    else:
        u = ((word >> 11 & 2**53 - 1).double() + 0.5) * 2.0**-53
        expected, dtypes = torch.special.ndtri(u) if kind == "normal" else -torch.log(u), (torch.float32,)
        if kind == "normal":  # 0 is not a number that float64 reaches from u
            near = ((word >> 11 & 2**53 - 1) - 2**52).double() + 0.5
            expected = torch.where(near.abs() < 2**30, near * 2.0**-53 * math.sqrt(2 * math.pi), expected)
    for dtype in dtypes:
        with Narrow(looks=True):
            got = Halves.of_words(word).numbers(kind, dtype)
        if kind == "uniform":
            expected = torch.empty(len(word), dtype=dtype)
            counter_rng._put_uniform(word.clone(), expected)
        if kind in ("uniform", "integer"):
            assert torch.equal(got, expected)
        else:
            assert ((got.double() - expected) / expected).abs().max() < 5e-7


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_without_float64_draws_the_same(kind: str, words: bool) -> None:
    args = torch.tensor([7, 1, 1, 0]), [torch.tensor([3])], [1], [4, 50], [4, 90]
    dtype = torch.int64 if kind == "integer" else torch.float32
    expected = torch.ops.shardwright.draw.default(*args[:2], None, *args[2:], 3, kind, dtype, None)
    at, stream, _ = placed_stream(*args, 3, ())
    out = torch.empty(4, 50, dtype=dtype)
    with Narrow(looks=True, words=words):
        fill_as_able(out, at, stream, kind, words, False)
    torch.testing.assert_close(out, expected, rtol=5e-7 if kind in ("normal", "exponential") else 0, atol=0)


@pytest.mark.parametrize("replacement", [True, False])
def test_classes_are_chosen_without_float64(replacement: bool) -> None:
    weights = torch.rand(64, 40) * (torch.rand(64, 40) < 0.7)
    seed, where = torch.tensor([7, 1, 1, 0]), ([], None, [])
    expected = torch.ops.shardwright.choose.default(seed, [], weights, [], [64], 3, 12, replacement)
    drawn = {
        (kind, n): torch.ops.shardwright.draw.default(seed, *where, [64, n], [64, n], 3, kind, torch.float32, None)
        for kind, n in (("uniform", 12), ("exponential", 40))
    }
    with Narrow(words=True):
        got = chosen(weights, lambda *which: drawn[which], 12, replacement)
    assert got.dtype == torch.int64 and (got == expected).float().mean() > 0.999
    assert weights.gather(1, got).min() > 0


def test_the_question_for_float64() -> None:
    counter_rng.has_doubles.cache_clear()
    try:
        assert counter_rng.has_doubles("cpu")
        counter_rng.has_doubles.cache_clear()
        with Narrow():
            assert not counter_rng.has_doubles("cpu")
    finally:
        counter_rng.has_doubles.cache_clear()
