"""Questions about a lowered program: what follows the sum of a gradient in a backward."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.layout import Digits
from shardwright.redistribution import CollectiveKind
from shardwright.runtime.lowering import Lowered, followed_by_gathers, lower, move, operand, sum_of_gradient

#: A cut of a layer's input and weight, and of its result where this is redistributed.
CUTS: Sequence[tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...] | None]] = [
    (((4, 1), (1, 1)), None),
    (((1, 1), (4, 1)), None),
    (((2, 1), (2, 1)), ((4, 1),)),
    (((2, 2), (1, 2)), None),
    (((2, 2), (1, 2)), ((4, 1),)),
    (((2, 2), (1, 2)), ((2, 2),)),
]


class Layers(nn.Module):
    """Layers with a given cut each."""

    def __init__(self, cuts: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in cuts)
        for layer, cut in zip(self.layers, cuts):
            sw.shard(layer, *CUTS[cut])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def first_step(lowered: Lowered, use: int) -> tuple[CollectiveKind, Digits] | None:
    """The first collective of a backward after that of node `use`, besides sums of parameters' gradients: by a walk."""
    for node in reversed(lowered.nodes[:use]):
        backward = node.meta["instruction"].backward if node.target is move else None
        if backward is not None and backward.collectives and sum_of_gradient(operand(node)) is not node:
            return backward.steps[0].kind, backward.steps[0].digits
    return None


@pytest.mark.parametrize("seed", range(6))
def test_what_follows_a_sum_is_found_as_by_a_walk(seed: int) -> None:
    cuts = random.Random(seed).choices(range(len(CUTS)), k=5)
    plan = sw.plan(Layers(cuts), (torch.zeros(8, 16),), devices=4, parallel_mode="semi_auto")
    lowered = lower(plan)
    steps = [first_step(lowered, use) for use in range(len(lowered.nodes) + 1)]
    every_digits = {step[1] for step in steps if step is not None}
    asked = {f"{use} {digits}": (use, digits) for use in range(len(steps)) for digits in every_digits}
    expected = [name for name, (use, digits) in asked.items() if steps[use] == (CollectiveKind.ALL_GATHER, digits)]
    assert len(set(steps)) > 2
    assert followed_by_gathers(lowered, asked) == expected


def test_a_gather_follows() -> None:
    """The gradient of a row-parallel layer whose result is scattered: gathered in the backward."""
    plan = sw.plan(Layers([2, 4]), (torch.zeros(8, 16),), devices=4, parallel_mode="semi_auto")
    lowered = lower(plan)
    gathers = {step[1] for use in range(len(lowered.nodes)) if (step := first_step(lowered, use)) is not None}
    found = [followed_by_gathers(lowered, {"end": (len(lowered.nodes), digits)}) for digits in gathers]
    assert ["end"] in found
