"""Random numbers as a compiler traces them: those of the operators, with integers of 64 bits and without."""

from __future__ import annotations

import random

import pytest
import torch

from shardwright.rules.random_numbers import traced_numbers
from shardwright.rules.random_numbers.counter_rng import KINDS, key
from shardwright.rules.random_numbers.traced_numbers import Ability, key_of, traced

operators = torch.ops.shardwright
ABILITIES = [Ability(), Ability(words=False, doubles=False), Ability(doubles=False)]


def in_traced(target: object, ability: Ability, *args: object) -> torch.Tensor:
    """A traced operator on a device of an ability."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ability, "of", classmethod(lambda cls, device: ability))
        return traced(target, torch.device("cpu"))(*args)


def seed_of(seed: int, call: int, micro: int = 0) -> torch.Tensor:
    return torch.tensor([seed if seed < 1 << 63 else seed - (1 << 64), call, 1, micro])


def test_keys() -> None:
    draws = random.Random(0)
    for _ in range(100):
        seed, call, number = draws.getrandbits(64), draws.randrange(1 << 20), draws.randrange(1 << 10)
        whole = [int(word.x) & ((1 << 64) - 1) for word in key_of(seed_of(seed, call), number, ABILITIES[0])]
        halves = [int(word.words()) & ((1 << 64) - 1) for word in key_of(seed_of(seed, call), number, ABILITIES[1])]
        assert tuple(whole) == tuple(halves) == key(seed, call, number)


SLICES = pytest.mark.parametrize(
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


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@SLICES
def test_masks_have_the_same_bits(whole: tuple, size: tuple, starts: dict[int, int], micro: tuple, p: float) -> None:
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
            expected = operators.mask.default(*args)
            for ability in ABILITIES[:2]:
                got = in_traced(operators.mask.default, ability, *args)
                assert got.dtype == expected.dtype and got.shape == expected.shape
                assert torch.equal(got, expected)
            assert p in (0.0, 1.0) or expected.numel() < 20 or 0 < expected.float().mean() < 1


@pytest.mark.parametrize("ability", ABILITIES)
@SLICES
def test_numbers_are_the_same(
    whole: tuple, size: tuple, starts: dict[int, int], micro: tuple, ability: Ability
) -> None:
    for kind in KINDS:
        args = (
            seed_of(2**62 + 12345, 7, micro[1] - 1 if micro else 0),
            [torch.tensor([start]) for start in starts.values()],
            None,
            list(starts),
            list(size),
            list(whole),
            3,
            kind,
            torch.int64 if kind == "integer" else torch.float32,
            torch.device("cpu"),
            list(micro),
        )
        expected, got = operators.draw.default(*args), in_traced(operators.draw.default, ability, *args)
        assert got.shape == expected.shape and got.dtype == expected.dtype
        if ability.doubles or kind in ("uniform", "integer"):
            assert torch.equal(got, expected), kind
        else:
            torch.testing.assert_close(got, expected, rtol=5e-7, atol=0)


@pytest.mark.parametrize("ability", ABILITIES)
def test_permutations_and_choices_are_the_same(ability: Ability) -> None:
    seed, weights = seed_of(5, 1), torch.rand(6, 40) * (torch.rand(6, 40) < 0.7)
    for replacement in (True, False):
        args = (seed, [], weights, [], [6], 3, 12, replacement)
        assert torch.equal(in_traced(operators.choose.default, ability, *args), operators.choose.default(*args)), (
            replacement
        )
    args = seed, 4, 1000, torch.int64, torch.device("cpu")
    assert torch.equal(in_traced(operators.permutation.default, ability, *args), operators.permutation.default(*args))


@pytest.mark.parametrize("ability", ABILITIES[:2])
def test_a_compiler_sees_one_program_for_all_seeds(ability: Ability) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def run(seed: torch.Tensor) -> list[torch.Tensor]:
        where = [torch.tensor([2]).to(seed.device)], None, [0], [4, 6], [8, 6], 3
        made = [bound[operators.mask.default](seed, *where, 0.5, torch.bool, None)]
        made += [bound[operators.draw.default](seed, *where, kind, torch.float32, None) for kind in KINDS[:3]]
        return [*made, bound[operators.permutation.default](seed, 4, 9, torch.int64, None)]

    bound = {target: traced_numbers._bound(target, ability) for target in traced_numbers._TRACED}
    compiled = torch.compile(run, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, fullgraph=True)
    for call in range(3):
        for got, expected in zip(compiled(seed_of(3, call)), run(seed_of(3, call)), strict=True):
            assert torch.equal(got, expected)
    (graph,) = graphs
    assert not any("shardwright" in str(node.target) for node in graph.graph.nodes)
