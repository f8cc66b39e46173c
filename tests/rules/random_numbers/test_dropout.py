"""A dropout in one operator: the bits of a mask and products, its gradients, and what it saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.rules.random_numbers import dropout
from shardwright.rules.random_numbers.dropout import drop, mask_of, scale_of

WHERE = [torch.tensor([4])], [0], [8, 6], [16, 6], 3, 0.3


def seed_of(exact: int = 1) -> Tensor:
    return torch.tensor([5, 1, exact, 0])


def dropped(x: Tensor, exact: int = 1) -> tuple[Tensor, Tensor]:
    starts, *rest = WHERE
    return drop(seed_of(exact), starts, x, *rest)


@pytest.mark.parametrize("exact", [1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_values_and_gradients_are_those_of_the_products(dtype: torch.dtype, exact: int) -> None:
    x = torch.randn(8, 6, dtype=dtype, requires_grad=True)
    starts, *rest = WHERE
    mask = mask_of(seed_of(exact), starts, x, *rest)
    y, got = dropped(x, exact)
    wanted = x * mask * scale_of(0.3)
    assert torch.equal(got, mask) and got.dtype == torch.bool and 0 < mask.sum() < 48
    assert torch.equal(y, wanted) and not got.requires_grad
    gradient = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(made, x, gradient)[0] for made in (y, wanted)))


def test_gradients_of_gradients() -> None:
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropped(x)[0], x)
    assert torch.autograd.gradgradcheck(lambda x: dropped(x)[0] ** 2, x)


def test_the_mask_alone_is_saved() -> None:
    saved: list[Tensor] = []
    x = torch.randn(8, 6, requires_grad=True)
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        dropped(x)
    assert [(each.dtype, each.numel()) for each in saved] == [(torch.bool, 48)]


@pytest.mark.parametrize("trained", [True, False])
def test_one_kernel_makes_both_where_there_is_one(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of a device, here by operators of the CPU: nothing else computes in the forward."""
    x = torch.randn(8, 6, requires_grad=trained)
    starts, *rest = WHERE
    mask, calls = mask_of(seed_of(), starts, x, *rest), []

    def one_kernel(*args: object) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return lambda x: calls.append(1) or (x * mask * scale_of(0.3), mask.clone())

    monkeypatch.setattr(dropout, "one_kernel", one_kernel)
    monkeypatch.setattr(dropout, "mask_of", None)
    y, got = dropped(x)
    assert calls == [1] and torch.equal(y, x * mask * scale_of(0.3)) and torch.equal(got, mask)
    if trained:
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, mask * scale_of(0.3))
