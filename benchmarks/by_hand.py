"""The two networks with their collectives written by hand: what a patient user of torch.distributed would write.

The collectives of our conversions in their order, forward and backward, for these two networks and eight ranks alone
(of
which our runtime joins some on their way: see `joined` and `SumInTurns`). They come in two forms, and the faster one
    counts:

    Natural     the collective of that name
    Exchanges   small messages through all-to-alls, which Gloo has faster than its other collectives
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from networks import DEVICES, MLP, TUTORIAL, Network
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["BY_HAND", "Exchanges", "Natural"]

Group = dist.ProcessGroup

# torch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Natural:
    """c10d's own collectives. A tensor of pieces has one more dim in front, the rank's position in the group."""

    def all_to_all(self, pieces: Tensor, group: Group) -> Tensor:
        pieces = pieces.contiguous()
        received = torch.empty_like(pieces)
        dist.all_to_all_single(received, pieces, group=group)
        return received

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Everybody's `x`, as pieces."""
        x = x.contiguous()
        pieces = x.new_empty(group.size(), *x.shape)
        all_gather(pieces.view(-1), x.view(-1), group=group)
        return pieces

    def reduce_scatter(self, pieces: Tensor, group: Group) -> Tensor:
        """The sum of everybody's piece for this rank."""
        total = torch.empty_like(pieces[0])
        reduce_scatter(total.view(-1), pieces.view(-1), group=group)
        return total

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """The sum of everybody's `x`, which may be overwritten."""
        dist.all_reduce(x, group=group)
        return x


class Exchanges(Natural):
    """Everything but a large all-reduce as all-to-all; of two ranks' large ones Gloo's own is as fast."""

    SMALL = 1 << 19  # received bytes; between 128 KiB and 392 KiB a rank two ranks do better with an all-reduce

    def all_to_all(self, pieces: Tensor, group: Group) -> Tensor:
        pieces = pieces.contiguous()
        received = torch.empty_like(pieces)
        group.alltoall_base(received, pieces, [], []).wait()  # what dist.all_to_all_single calls in the end
        return received

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        return self.all_to_all(x.expand(group.size(), *x.shape), group)

    def reduce_scatter(self, pieces: Tensor, group: Group) -> Tensor:
        return self.all_to_all(pieces, group).sum(0)

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        if group.size() * x.numel() * x.element_size() > self.SMALL:
            return super().all_reduce(x, group)
        return self.all_gather(x, group).sum(0)


class Convert(torch.autograd.Function):
    """One function forward, another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class ByHand(nn.Module):
    """The common part of both: a rank's slices of the parameters, and the loss as a sum over all ranks.

    Ranks that differ in digit (size, stride) make a group: `neighbours` (4, 1), `halves` (2, 4) and so on.
    """

    def __init__(self, network: Network, collectives: Natural) -> None:
        super().__init__()
        self.rank, self.do = dist.get_rank(), collectives
        named = list(network.make().named_parameters())
        for (name, _), local in zip(named, network.slices([w.detach() for _, w in named], self.rank)):
            self.register_parameter(name, nn.Parameter(local.clone(memory_format=torch.contiguous_format)))
        self.neighbours, self.halves, self.everyone = self.group(4, 1), self.group(2, 4), dist.group.WORLD

    def group(self, size: int, stride: int) -> Group:
        first = self.rank - self.rank // stride % size * stride
        return dist.new_group([first + i * stride for i in range(size)], use_local_synchronization=True)

    def sum_gradient(self, parameter: nn.Parameter, group: Group) -> None:
        """Its gradient is summed over `group` as soon as the backward has it."""

        def add(filled: Tensor) -> None:
            filled.grad = self.do.all_reduce(filled.grad, group)

        parameter.register_post_accumulate_grad_hook(add)

    def rows(self, x: Tensor, parts: int, index: int) -> Tensor:
        length = x.shape[0] // parts
        return x.narrow(0, index * length, length)

    def total(self, loss: Tensor) -> Tensor:
        """The sum of the ranks' shares of the loss, which is everybody's loss: the gradient stays as it is."""
        return Convert.apply(loss, lambda x: self.do.all_reduce(x.clone(), self.everyone), lambda gradient: gradient)


class TutorialByHand(ByHand):
    def __init__(self, network: Network, collectives: Natural) -> None:
        super().__init__(network, collectives)
        self.odds, self.pair, self.second = self.group(4, 2), self.group(2, 1), self.group(2, 2)
        self.sum_gradient(self.w1, self.halves)
        self.sum_gradient(self.w3, self.everyone)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.rows(x.flatten(1), 2, self.rank // 4).narrow(1, self.rank % 4 * 196, 196)
        x = torch.relu(Convert.apply(x @ self.w1, self.sum_to_rows, self.gather_rows))
        x = Convert.apply(x, self.rows_to_columns, self.columns_to_rows)
        x = torch.relu(Convert.apply(x @ self.w2, self.scatter_rows, self.gather_all_rows))
        share = F.cross_entropy(x @ self.w3, self.rows(y, DEVICES, self.rank), reduction="sum") / len(y)
        return self.total(share)

    def sum_to_rows(self, x: Tensor) -> Tensor:
        """Terms of 16 rows on four neighbours -> 8 rows of the sum, on two."""
        return self.rows(self.do.all_reduce(x.detach(), self.neighbours), 2, self.rank // 2 % 2)

    def gather_rows(self, gradient: Tensor) -> Tensor:
        return self.do.all_gather(gradient, self.second).view(16, 512)

    def rows_to_columns(self, x: Tensor) -> Tensor:
        """8 rows, held twice -> 64 columns of all 32 rows."""
        mine = x.view(8, 4, 2, 64).select(2, self.rank % 2)
        return self.do.all_to_all(mine.transpose(0, 1), self.odds).view(32, 64)

    def columns_to_rows(self, gradient: Tensor) -> Tensor:
        mine = self.do.all_to_all(gradient.view(4, 8, 64), self.odds)
        return self.do.all_gather(mine, self.pair).permute(2, 1, 0, 3).reshape(8, 512)

    def scatter_rows(self, x: Tensor) -> Tensor:
        """Terms of 32 rows on all ranks -> 4 rows of the sum."""
        return self.do.reduce_scatter(x.view(DEVICES, 4, 512), self.everyone)

    def gather_all_rows(self, gradient: Tensor) -> Tensor:
        return self.do.all_gather(gradient, self.everyone).view(32, 512)


class MlpByHand(ByHand):
    def __init__(self, network: Network, collectives: Natural) -> None:
        super().__init__(network, collectives)
        self.sum_gradient(self.w1, self.halves)
        self.sum_gradient(self.w2, self.halves)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.rows(x, 2, self.rank // 4) @ self.w1)
        x = Convert.apply(x @ self.w2, self.scatter_rows, self.gather_rows)
        share = F.mse_loss(x, self.rows(y, DEVICES, self.rank), reduction="sum") / y.numel()
        return self.total(share)

    def scatter_rows(self, x: Tensor) -> Tensor:
        """Terms of 128 rows on four neighbours -> 32 rows of the sum."""
        return self.do.reduce_scatter(x.view(4, 32, 1024), self.neighbours)

    def gather_rows(self, gradient: Tensor) -> Tensor:
        return self.do.all_gather(gradient, self.neighbours).view(128, 1024)


#: Network -> (network, collectives) -> module; called with the batch, it gives the loss.
BY_HAND = {TUTORIAL.name: TutorialByHand, MLP.name: MlpByHand}
