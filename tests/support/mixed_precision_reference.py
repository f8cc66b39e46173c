"""Parts that the tests of mixed precision share: the reference in plain PyTorch, and a network whose operators can all
be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from small_networks import labels
from torch import Tensor, nn

import shardwright as sw

#: By how much results may differ, relative to the largest value: what the type of the computation rounds, a few times.
APART = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 2e-6, torch.float64: 1e-12}


class Net(nn.Module):
    """A block of a language model: looks at the type of a weight, has a buffer of its own type, ties its ends.

    Args:
        marks: of how many devices the marks on its layers are; 0: none.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, marks: int = 0, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.table, self.norm = nn.Embedding(16, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.to(dtype)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16, dtype=dtype))
        if marks:
            sw.shard(self.up, ((2, 1, 1), (marks // 2, 1)))
            sw.shard(self.down, ((2, 1, marks // 2), (1, marks // 2)))

    def forward(self, x: Tensor, offset: Tensor) -> Tensor:
        h = self.table(x) + offset[:, None]
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head((h * self.scale).to(self.head.weight.dtype))


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def batches(dtype: torch.dtype, count: int = 3, rows: int = 8) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, a floating input, and the targets."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            labels(rows * 4, 16, seed=i).view(rows, 4),
            torch.randn(rows, 16, dtype=dtype, generator=generator),
            labels(rows * 4, 16, seed=50 + i).view(rows, 4),
        )
        for i in range(count)
    ]


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    return torch.utils._pytree.tree_map(
        lambda x: x.to(dtype) if dtype is not None and isinstance(x, Tensor) and x.is_floating_point() else x, tree
    )


def reference(net: nn.Module, policy: sw.MixedPrecision, *inputs: Any) -> Any:
    """The result of FSDP2's policy on one device: autograd sees the casts of parameters, inputs and outputs."""
    ours: dict[int, Tensor] = {}
    state = {
        name: ours.setdefault(id(p), cast(p, policy.param_dtype))
        for name, p in net.named_parameters(remove_duplicate=False)
    }
    inputs = cast(inputs, policy.param_dtype) if policy.cast_forward_inputs else inputs
    return cast(torch.func.functional_call(net, state, inputs, tie_weights=False), policy.output_dtype)


def apart(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).double().item()


def assert_trains_alike(
    model: sw.AutoParallel,
    net: nn.Module,
    one: nn.Module,
    policy: sw.MixedPrecision,
    given: list[tuple],
    within: float,
    loss_fn: Callable = loss_of,
    make: Callable | None = None,
    part: Callable[[Tensor], Tensor] = lambda x: x,
    whole: Callable[[str, Tensor], Tensor] = lambda name, x: x,
) -> list[float]:
    """Train a wrapped model beside `one` under the same policy: losses, gradients and the stored parameters agree, and
    are of the types that they should have.

    Args:
        part: of an input, what is fed here.
        whole: by a parameter's name, it or its gradient put together.

    Returns:
        The losses.
    """
    make = make or (lambda parameters: torch.optim.SGD(parameters, 0.2, momentum=0.9))
    ours, theirs = make(net.parameters()), make(one.parameters())
    types, losses = [p.dtype for p in one.parameters()], []
    for batch in given:
        loss = model(*map(part, batch))
        expected = loss_fn(reference(one, policy, *batch[:-1]), batch[-1])
        assert loss.dtype == expected.dtype
        assert apart(loss, expected) <= within, (loss, expected)
        loss.backward(), expected.backward()
        assert [p.grad.dtype for p in net.parameters()] == types
        # What is nothing but rounding, as the gradient of a bias that a normalisation takes away, is as large as the
        # others'.
        size = max(q.grad.abs().max().item() for q in one.parameters())
        for (name, p), q in zip(net.named_parameters(), one.parameters()):
            worst = (whole(name, p.grad) - q.grad).abs().max().item()
            assert worst <= within * size, (name, worst / size)
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
        losses.append(loss.item())
    assert [p.dtype for p in net.parameters()] == types
    for (name, p), q in zip(net.named_parameters(), one.parameters()):
        assert apart(whole(name, p.detach()), q.detach()) <= within, name
    return losses
