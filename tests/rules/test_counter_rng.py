"""Masks on a device without integers of 64 bits: the same bits, computed in halves of 32 bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.rules import counter_rng
from shardwright.rules.counter_rng import Halves, _state, fill_in_halves
from shardwright.torch_private import pytree

mask = torch.ops.shardwright.mask.default


class NarrowIntegers(TorchDispatchMode):
    """A device on which no operator computes with integers of 64 bits, nor with float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, kwargs, made)):
            if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.float64):
                raise NotImplementedError(f"{func} of {x.dtype}")
        return made


def both(seed: Tensor, dims: list[int], starts: list[int], size: list[int], whole: list[int], p: float, *micro: Any):
    """The mask of the operator, and the mask in halves."""
    begins = [torch.tensor([start]) for start in starts]
    expected = mask(seed, begins, None, dims, size, whole, 3, p, torch.bool, None, *micro)
    at, stream, _ = _state(seed, begins, dims, size, whole, 3, *(micro or ((),)))
    out = torch.empty(size, dtype=torch.bool)
    with NarrowIntegers():
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
        for made, expected in ((x + y, a + b), (x.times(b), a * b), (x.shifted(bits), a >> bits)):
            assert (int(made.upper) & 0xFFFFFFFF) << 32 | int(made.lower) & 0xFFFFFFFF == expected & (1 << 64) - 1


def test_the_question_for_words() -> None:
    counter_rng._has_words.cache_clear()
    try:
        assert counter_rng._has_words("cpu")
        counter_rng._has_words.cache_clear()
        with NarrowIntegers():
            assert not counter_rng._has_words("cpu")
    finally:
        counter_rng._has_words.cache_clear()
