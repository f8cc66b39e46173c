"""Masks as a compiler traces them: bit for bit those of the operator."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.rules.random_numbers.counter_rng import key
from shardwright.rules.random_numbers.traced_dropout import _key, traced_mask

mask = torch.ops.shardwright.mask.default


def seed_of(seed: int, call: int, micro: int = 0) -> torch.Tensor:
    return torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64), call, 1, micro])


def test_keys() -> None:
    draws = random.Random(0)
    for _ in range(300):
        seed, call, number = draws.getrandbits(64), draws.randrange(1 << 20), draws.randrange(1 << 10)
        made = [int(x) & ((1 << 64) - 1) for x in _key(seed_of(seed, call), number)]
        assert tuple(made) == key(seed, call, number)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "whole, size, starts, micro",
    [
        ((64,), (64,), {}, ()),
        ((7, 5), (7, 5), {}, ()),
        ((8, 6, 10), (4, 6, 5), {0: 4, 2: 5}, ()),
        ((3, 9), (3, 3), {1: 6}, ()),
        ((4, 3, 5), (2, 3, 5), {0: 2}, (0, 4, 1)),
        ((8, 7), (4, 7), {0: 2}, (0, 2, 4)),
        ((), (), {}, ()),
        ((0, 4), (0, 4), {}, ()),
    ],
)
def test_the_same_bits(whole: tuple, size: tuple, starts: dict[int, int], micro: tuple, p: float) -> None:
    for k in range(micro[1] if micro else 1):
        for dtype in (torch.bool, torch.float32, torch.bfloat16):
            args = (
                seed_of(2**63 + 12345, 7, k),
                [torch.tensor([start]) for start in starts.values()],
                None,
                list(starts),
                list(size),
                list(whole),
                3,
                p,
                dtype,
                torch.device("cpu"),
                list(micro),
            )
            expected, got = mask(*args), traced_mask(*args)
            assert got.dtype == expected.dtype and got.shape == expected.shape
            assert torch.equal(got, expected)
            assert p in (0.0, 1.0) or expected.numel() < 20 or 0 < expected.float().mean() < 1
