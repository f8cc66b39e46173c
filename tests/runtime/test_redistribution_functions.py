"""The autograd function of redistributions: a gradient, and a gradient of a gradient."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.runtime.redistribution_functions import RedistributionFunction


def test_a_gradient_of_a_gradient_runs_the_forward_again() -> None:
    """The steps' factors tell which steps have run: 2 the forward, 3 its transpose."""
    x = torch.ones(3, requires_grad=True)
    y = RedistributionFunction.apply(x, (lambda t: t * 2,), (lambda t: t * 3,))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(first, torch.full((3,), 12.0))  # 2 * 2 * 3
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full((3,), 12.0))  # 2 the forward again, 2 of the square, 3 the transpose
    with pytest.raises(sw.SettingError, match="gradient of the parameter 'weight' is a sum over ranks"):
        torch.autograd.grad(RedistributionFunction.apply(x, (), (), "weight").sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(RedistributionFunction.apply(x, (), (lambda t: t * 3,)).sum(), x)
    assert torch.equal(plain, torch.full((3,), 3.0)) and not plain.requires_grad
