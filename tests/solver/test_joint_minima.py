"""Least entries of joints that are not made at once, beside the joint itself: equal to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.solver import joint_minima
from shardwright.solver.joint_minima import by_group


@pytest.mark.parametrize("fewest", [1, 16, 10**9], ids=["together", "as measured", "state by state"])
@pytest.mark.parametrize("seed", range(40))
def test_a_dim_that_allows_few_states(monkeypatch: pytest.MonkeyPatch, seed: int, fewest: int) -> None:
    monkeypatch.setattr(joint_minima, "TOGETHER", fewest)
    monkeypatch.setattr(joint_minima, "BLOCK", 256)
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(2, 4))
    dim = int(rng.integers(dims))
    sizes = [int(n) for n in rng.integers(2, 30, dims + 1)]
    which = rng.random([n if d in (0, dim + 1) else 1 for d, n in enumerate(sizes)])
    which[rng.random(which.shape) > rng.choice([0.02, 0.1, 0.25])] = np.inf
    tables = [which]
    for _ in range(3):
        kept = rng.random(dims + 1) < 0.6
        tables.append(rng.random([n if keep else 1 for n, keep in zip(sizes, kept)]))
    tables.sort(key=lambda table: table.size)
    joint = tables[0]
    for table in tables[1:]:
        joint = joint + table
    assert np.array_equal(by_group(tables, dims, dim, which), joint.min(axis=0))
