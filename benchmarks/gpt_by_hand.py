"""The GPT of `examples/gpt.py` with its collectives written by hand, as a patient user of torch.distributed would.

The batch in two, products in four: first ones by columns, second ones by rows, attention by heads, the embedding and
the head, which are one weight, by the vocabulary. Between the products every rank has an eighth of the batch: sums are
reduce-scattered and rows all-gathered among the four. The same collectives as ours, for eight ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import Convert, Natural
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["GptByHand"]

PARTS = 4


class ClassSum(torch.autograd.Function):
    """The summed cross entropy of rows whose classes lie on four ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup, do: Natural) -> Tensor:
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        raised = (logits - top[:, None]).exp_()
        mine = target - first
        held = (mine >= 0) & (mine < logits.shape[1])
        mine = mine.clamp(0, logits.shape[1] - 1)[:, None]
        picked = torch.where(held, logits.gather(1, mine)[:, 0] - top, 0)
        total, picked = do.all_reduce(torch.stack((raised.sum(1), picked)), group)
        ctx.save_for_backward(raised.div_(total[:, None]), mine, held)
        return (total.log() - picked).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share, mine, held = ctx.saved_tensors
        share = share.scatter_add(1, mine, -held.to(share.dtype)[:, None])
        return share * gradient, None, None, None, None


class GptByHand(nn.Module):
    """A rank's slices of a GPT's parameters.

    Args:
        net: the whole model.
        collectives: the form in which they are made.
    """

    def __init__(self, net: nn.Module, collectives: Natural) -> None:
        super().__init__()
        self.do, self.rank = collectives, dist.get_rank()
        self.part, self.half = self.rank % PARTS, self.rank // PARTS
        first = self.rank - self.part
        self.four = dist.new_group([first + i for i in range(PARTS)], use_local_synchronization=True)
        self.pair = dist.new_group([self.part, self.part + PARTS], use_local_synchronization=True)
        self.heads = net.blocks[0].attention.heads // PARTS
        self.tokens = self.held(net.tokens.weight, 0)
        self.positions, self.norm = self.held(net.positions.weight), self.held_norm(net.norm)
        self.blocks = nn.ModuleList()
        for block in net.blocks:
            kept = nn.Module()
            kept.norm1, kept.norm2 = self.held_norm(block.norm1), self.held_norm(block.norm2)
            attention = block.attention
            for name, layer, dim in (
                ("query", attention.query, 0),
                ("key", attention.key, 0),
                ("value", attention.value, 0),
                ("out", attention.out, 1),
                ("up", block.up, 0),
                ("down", block.down, 1),
            ):
                setattr(kept, name, self.held(layer.weight, dim))
                setattr(kept, name + "_bias", self.held(layer.bias, dim if dim == 0 else None))
            self.blocks.append(kept)

    def held(self, whole: Tensor, dim: int | None = None) -> nn.Parameter:
        """This rank's slice; its gradient is summed over the ranks that have other rows of the batch."""
        local = whole.detach() if dim is None else whole.detach().chunk(PARTS, dim)[self.part]
        parameter = nn.Parameter(local.clone(memory_format=torch.contiguous_format))
        parameter.register_post_accumulate_grad_hook(
            lambda p: setattr(p, "grad", self.do.all_reduce(p.grad, self.pair))
        )
        return parameter

    def held_norm(self, norm: nn.LayerNorm) -> nn.ParameterList:
        """Weight and bias work on an eighth of the rows: their gradients are summed over all ranks."""
        kept = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in (norm.weight, norm.bias))
        for parameter in kept:
            parameter.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", self.do.all_reduce(p.grad, dist.group.WORLD))
            )
        return kept

    # -- conversions: (forward, backward) --

    def gather(self, x: Tensor) -> Tensor:
        return self.do.all_gather(x.detach(), self.four).flatten(0, 1)

    def scatter(self, x: Tensor) -> Tensor:
        return self.do.reduce_scatter(x.detach().unflatten(0, (PARTS, -1)), self.four)

    def spread(self, x: Tensor) -> Tensor:
        """An eighth of the rows -> the half."""
        return Convert.apply(x, self.gather, self.scatter)

    def finish(self, x: Tensor) -> Tensor:
        """Terms of the half's rows -> an eighth of them, summed."""
        return Convert.apply(x, self.scatter, self.gather)

    def whole_sum(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return Convert.apply(x, lambda t: self.do.all_reduce(t.clone(), group), lambda gradient: gradient)

    # -- the model --

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        rows = len(tokens) // 2
        tokens = tokens.narrow(0, self.half * rows, rows)
        x = self.finish(self.embed(tokens))
        # Every rank uses all positions for its own rows: the gradient is summed over all of them.
        x = x + Convert.apply(self.positions, lambda t: t.view_as(t), lambda g: self.do.all_reduce(g, self.four))
        for block in self.blocks:
            x = x + self.attend(block, x)
            y = self.spread(F.layer_norm(x, x.shape[-1:], *block.norm2))
            y = F.gelu(F.linear(y, block.up, block.up_bias))
            x = x + self.finish(F.linear(y, block.down)) + self.bias(block.down_bias)
        x = self.spread(F.layer_norm(x, x.shape[-1:], *self.norm))
        logits = F.linear(x, self.tokens).flatten(0, 1)
        target = following.narrow(0, self.half * rows, rows).flatten()
        share = ClassSum.apply(logits, target, self.part * len(self.tokens), self.four, self.do) / following.numel()
        return self.whole_sum(share, self.pair)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings of the tokens in this rank's part of the vocabulary; zeros elsewhere."""
        mine = tokens - self.part * len(self.tokens)
        held = (mine >= 0) & (mine < len(self.tokens))
        return F.embedding(torch.where(held, mine, 0), self.tokens) * held[..., None]

    def bias(self, bias: Tensor) -> Tensor:
        """A bias added to an eighth of the rows: the pair's sum is not all of its gradient."""
        return Convert.apply(bias, lambda t: t.view_as(t), lambda g: self.do.all_reduce(g, self.four))

    def attend(self, block: nn.Module, x: Tensor) -> Tensor:
        y = self.spread(F.layer_norm(x, x.shape[-1:], *block.norm1))
        split: Callable[[Tensor], Tensor] = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = (
            split(F.linear(y, getattr(block, n), getattr(block, n + "_bias"))) for n in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.finish(F.linear(mixed, block.out)) + self.bias(block.out_bias)
