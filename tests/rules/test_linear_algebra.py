"""Matrices in models: inverses, decompositions and orthogonal weights, cut along batch dims beside one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_device import assert_as_one_device, parallel
from small_networks import D, draw
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import shardwright as sw

FREE = sw.Cluster.of("h100x8", 4).with_free_links()
X = draw(8, 8)
IDENTITY = torch.eye(2, dtype=D)


class Apply(nn.Module):
    def __init__(self, f: Callable[[nn.Module, Tensor], Tensor], mapping: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.f = nn.Linear(8, 8, dtype=D), f
        self.map = (
            nn.Linear(8, 8, dtype=D) if mapping is None else orthogonal(nn.Linear(8, 8, dtype=D), "weight", mapping)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.layer(x))


def products(h: Tensor) -> Tensor:
    """A positive definite matrix of each row."""
    rows = h.view(-1, 2, 4)
    return rows @ rows.mT + IDENTITY


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "inverse": lambda m, h: torch.linalg.inv(products(h)),
    "solution": lambda m, h: torch.linalg.solve(products(h), h.view(-1, 2, 4)),
    "cholesky": lambda m, h: torch.linalg.cholesky(products(h)),
    "determinant": lambda m, h: torch.logdet(products(h)),
    "eigenvalues": lambda m, h: torch.linalg.eigvalsh(products(h) + torch.diag(torch.arange(2, dtype=D))),
    "exponential of a weight": lambda m, h: h @ torch.matrix_exp(m.map.weight / 4),
    "svdvals of a weight": lambda m, h: h * torch.linalg.svdvals(m.map.weight),
}


@pytest.mark.parametrize("mode", ["semi_auto", "dynamic_programming"])
@pytest.mark.parametrize("name", [*FUNCTIONS, "matrix_exp", "cayley", "householder"])
def test_as_one_device(name: str, mode: str) -> None:
    net = Apply(FUNCTIONS[name]) if name in FUNCTIONS else Apply(lambda m, h: m.map(h), name)
    options = {"cluster": FREE} if mode == "dynamic_programming" else {}
    model = assert_as_one_device(net, (X,), (X + 1,), devices=4, mode=mode, **options)
    cut = {"inverse": "linalg_inv", "solution": "linalg_solve", "cholesky": "linalg_cholesky"}
    if name in cut:
        assert model.plan.operator(cut[name]).in_strategy[0] == (4, 1, 1)


def test_a_batch_that_the_cut_does_not_divide() -> None:
    """A padding holds no invertible matrix: the cut is an error with a legal one, also with uneven=True."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=D)
            self.inverse = sw.shard(torch.linalg.inv, ((4, 1, 1),))

        def forward(self, x: Tensor) -> Tensor:
            return self.inverse(products(self.layer(x)))

    assert_as_one_device(Marked(), (X,), devices=4)
    with pytest.raises(sw.StrategyError, match="inv"):
        parallel(Marked(), devices=4, uneven=True)(X[:6])
    assert_as_one_device(Apply(FUNCTIONS["inverse"]), (X[:6],), devices=4, uneven=True)
