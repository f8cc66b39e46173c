"""The autograd function of redistributions: a gradient, and no gradient of a gradient."""

from __future__ import annotations

import pytest
import torch

from shardwright.runtime.redistribution_functions import RedistributionFunction


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """The transposed steps are no operators that autograd knows: it would take their result for a constant."""
    x = torch.ones(3, requires_grad=True)
    y = RedistributionFunction.apply(x, (lambda t: t * 2,), (lambda t: t * 3,))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(first, torch.full((3,), 12.0))  # 2 * 2 * 3
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    (plain,) = torch.autograd.grad(RedistributionFunction.apply(x, (), (lambda t: t * 3,)).sum(), x)
    assert torch.equal(plain, torch.full((3,), 3.0)) and not plain.requires_grad
