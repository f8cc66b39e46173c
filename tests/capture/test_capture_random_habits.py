"""Programs of random habits, in parallel beside plain PyTorch: see `random_habits`."""

from __future__ import annotations

import pytest
from random_habits import EFFECTS, PLACES, USES, WAYS, random_habit, trained

pytestmark = pytest.mark.filterwarnings("ignore::shardwright.RecaptureWarning")


@pytest.mark.parametrize("seed", range(24))
def test_equal_or_refused_with_the_line(seed: int) -> None:
    trained(random_habit(seed), devices=4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1030))
def test_further_ones(seed: int) -> None:
    trained(random_habit(seed), 1 if seed % 4 == 0 else 4, "dynamic_programming" if seed % 3 == 0 else "semi_auto")


def test_the_habits_differ() -> None:
    """Sixty seeds have most places, ways, uses and effects; few of them are refused."""
    named = [random_habit(seed).name for seed in range(1000, 1060)]
    for pool in (PLACES, WAYS, USES, EFFECTS):
        assert sum(any(name in text for text in named) for name in pool) > len(pool) / 2
