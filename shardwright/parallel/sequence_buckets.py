"""Sequences padded to one of a few lengths, so that a language model has a few programs instead of one for each length.

A call with sequences of L tokens runs at the smallest bucket b with b >= L:

    input_ids       [B, L] -> [B, b]    filled up with the pad token
    attention_mask  [B, L] -> [B, b]    filled up with 0; made where the model takes one and the call gives none
    labels, target  [B, L] -> [B, b]    filled up with the index that the loss ignores (-100)
    results         [B, b, …] -> [B, L, …]

Example: with the buckets 512, 1024 and 2048, sequences of 600 tokens run at 1024, with 424 positions of padding.

Padding is on the right. Losses and gradients equal those of the plain call where the model pays no attention to
masked positions and the loss ignores their labels, as with the models of Hugging Face transformers. Statistics over
all positions (batch norms, the balancing losses of some mixtures of experts) count the padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SettingError
from ..torch_private import pytree

__all__ = ["PaddedCall", "SequenceBuckets"]

#: Inputs of language models whose padding is known, by name. `input_ids` take the pad token of the model's
#: configuration.
FILLS: dict[str, int] = {
    "input_ids": 0,
    "decoder_input_ids": 0,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "labels": -100,
}
TOKENS = ("input_ids", "decoder_input_ids")


@dataclass(frozen=True)
class SequenceBuckets:
    """The setting `AutoParallel.buckets`.

    Args:
        seq: the lengths, ascending.
        dim: the sequence dim of the inputs.
        fill: name of an input -> the value that fills it up, in addition to `FILLS`; "target" is the target of the
            loss.
        mask: the input of the model that masks padding; None: the model needs no mask, because it is causal.

    Raises:
        SettingError: lengths that are not ascending whole numbers of at least 1, or a dim that is negative.
    """

    seq: tuple[int, ...]
    dim: int = 1
    fill: Mapping[str, float] = field(default_factory=dict)
    mask: str | None = "attention_mask"

    def __post_init__(self) -> None:
        if (
            not self.seq
            or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in self.seq)
            or list(self.seq) != sorted(set(self.seq))
        ):
            raise SettingError(f"buckets(seq={list(self.seq)!r})", legal="ascending lengths, such as [512, 1024, 2048]")
        if not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 0:
            raise SettingError(
                f"buckets(dim={self.dim!r})", legal="the dim of the inputs that is the sequence, such as 1"
            )

    def padded(
        self,
        net: nn.Module,
        loss_fn: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        agree: Callable[[int], int] = lambda index: index,
    ) -> PaddedCall:
        """A call with its sequences padded.

        Args:
            net, loss_fn: the model and its loss, which takes the last of `args`, or None.
            args, kwargs: the arguments of the call.
            agree: maps the index of the bucket that this process needs to the index that all processes take.

        Raises:
            SettingError: a sequence longer than the last bucket, an input whose padding is not known, a model that
                takes no mask.
        """
        parameters = inspect.signature(net.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        inputs = args if loss_fn is None else args[:-1]
        called = [names[i] if i < len(names) else f"args[{i}]" for i in range(len(inputs))]
        called += [] if loss_fn is None else ["target"]
        first = next((x for x in pytree.tree_leaves((inputs, kwargs)) if self._is_sequence(x)), None)
        if first is None:
            raise SettingError(
                f"buckets: no input has a dim {self.dim}", legal="buckets(dim=…): the inputs' dim of the sequence"
            )
        length = first.shape[self.dim]
        taken = agree(next((i for i, n in enumerate(self.seq) if n >= length), len(self.seq)))
        if taken == len(self.seq):
            raise SettingError(
                f"a sequence is longer than the longest bucket, {self.seq[-1]}",
                legal=f"sequences of at most {self.seq[-1]}, or a longer bucket",
            )
        call = PaddedCall(args, dict(kwargs), self.dim, length, self.seq[taken])
        if self.mask is not None and call.kwargs.get(self.mask) is None and self.mask not in called:
            if not any(p.name == self.mask for p in parameters):
                raise SettingError(
                    f"buckets: {type(net).__name__}.forward takes no {self.mask!r} to mask padding with",
                    legal="mask= the name of the model's mask, or mask=None for a causal model, whose earlier "
                    "positions do not depend on later ones",
                )
            call.kwargs[self.mask] = torch.ones(first.shape[: self.dim + 1], dtype=torch.int64, device=first.device)

        def fill(name: str, value: object) -> object:
            return pytree.tree_map(lambda x: self._filled(x, name, call, net, loss_fn), value)

        call.args = tuple(map(fill, called, args))
        call.kwargs = {name: fill(name, value) for name, value in call.kwargs.items()}
        return call

    def _is_sequence(self, x: object) -> TypeGuard[Tensor]:
        return isinstance(x, Tensor) and x.dim() > self.dim

    def _filled(self, x: object, name: str, call: PaddedCall, net: nn.Module, loss_fn: object) -> object:
        if not self._is_sequence(x) or x.shape[self.dim] != call.length:
            return x
        value = self._fill_of(name, net, loss_fn)
        if value is None:
            raise SettingError(
                f"buckets: how is the input {name!r} {list(x.shape)} filled up?",
                legal=f"buckets(seq=…, fill={{{name!r}: value}})",
            )
        return F.pad(x, (0, 0) * (x.dim() - 1 - self.dim) + (0, call.bucket - call.length), value=value)

    def _fill_of(self, name: str, net: nn.Module, loss_fn: object) -> float | None:
        if name in self.fill:
            return self.fill[name]
        if name in TOKENS:
            pad = getattr(getattr(net, "config", None), "pad_token_id", None)
            return FILLS[name] if pad is None else pad
        if name == "target":
            return getattr(loss_fn, "ignore_index", None)
        return 0 if name == self.mask else FILLS.get(name)


@dataclass
class PaddedCall:
    """A call whose sequences are padded from `length` to `bucket` along `dim`."""

    args: tuple[object, ...]
    kwargs: dict[str, object]
    dim: int
    length: int
    bucket: int

    def cropped(self, result: object) -> object:
        """A result of the call, without the positions of the padding. Tensors whose dim `dim` is not of the bucket's
        length stay as they are."""
        if self.bucket == self.length:
            return result

        def crop(x: object) -> object:
            if isinstance(x, Tensor) and x.dim() > self.dim and x.shape[self.dim] == self.bucket:
                return x.narrow(self.dim, 0, self.length)
            return x

        return pytree.tree_map(crop, result)
