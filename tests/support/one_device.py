"""The law above all: a parallel run against the same on one device, in float64, in the local runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw

#: Reorderings of float64 sums, no more.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def close(ours: Any, theirs: Any, what: str = "") -> None:
    """Equal trees of tensors, but for the order of sums."""
    mine, my_spec = pytree.tree_flatten(ours)
    yours, your_spec = pytree.tree_flatten_with_path(theirs)
    assert my_spec == your_spec, what
    for a, (path, b) in zip(mine, yours):
        if isinstance(b, Tensor):
            where = f"{what}{pytree.keystr(path)}"
            torch.testing.assert_close(a, b, **CLOSE, equal_nan=True, msg=lambda text: f"{where}: {text}")
        else:
            assert a == b, what


def parallel(
    net: nn.Module,
    loss_fn: Any = None,
    *,
    devices: int = 8,
    mode: str = "semi_auto",
    dataset: Any = "full_batch",
    **options: Any,
) -> sw.AutoParallel:
    """A wrapped model on so many devices in this process."""
    sw.init(devices=devices)
    model = sw.AutoParallel(net, loss_fn, parallel_mode=mode, **options)
    return model.dataset_strategy(dataset) if dataset is not None else model


def squares(outputs: Any) -> Tensor:
    """A loss of any outputs, different for each element."""
    floating = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum(
        (((x + 0.1) ** 2).mean() * (i + 1) for i, x in enumerate(floating)), torch.zeros((), dtype=torch.float64)
    )


def assert_as_one_device(
    net: nn.Module,
    *batches: tuple,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> sw.AutoParallel:
    """Train copies of a model on each batch (a tuple of arguments), here and on one device: outputs, gradients,
    parameters and buffers agree.

    Args:
        loss_fn: called inside of the wrapper, with the last argument as the target; None: outside, `squares`.
        optimizer: parameters -> optimizer; None: SGD.
        options: as `parallel`.

    Returns:
        The wrapped model.
    """
    one = copy.deepcopy(net)
    model = parallel(net, loss_fn, **options)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    ours, theirs = (make(n.parameters()) if any(p.requires_grad for p in n.parameters()) else None for n in (net, one))
    for batch in batches:
        mine, yours = ([x.clone() if isinstance(x, Tensor) else x for x in batch] for _ in range(2))
        got = model(*mine, **(kwargs or {}))
        if loss_fn is None:
            expected = one(*yours, **(kwargs or {}))
            close(got, expected, "outputs")
            got, expected = squares(got), squares(expected)
        else:
            expected = loss_fn(one(*yours[:-1], **(kwargs or {})), yours[-1])
        close(got, expected, "loss")
        if not expected.requires_grad:
            assert not got.requires_grad
            continue
        expected.backward()
        got.backward()
        close(
            {n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()}, "gradients"
        )
        if theirs is not None:
            ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    close(dict(net.state_dict()), dict(one.state_dict()), "state after the last step")
    return model
