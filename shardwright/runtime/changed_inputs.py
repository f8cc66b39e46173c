"""Inputs that the model changes in place: the caller's tensors are changed as on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["kept_apart", "put_back"]


def kept_apart(tensors: list[Tensor], changed: Sequence[int]) -> list[Tensor]:
    """A call's inputs, copies of those that it changes: what a backward needs of them stays as it was."""
    return [x.clone() if i in changed else x for i, x in enumerate(tensors)]


def put_back(tensors: list[Tensor], outputs: list[Any], changed: Sequence[int]) -> None:
    """The caller's tensors that the model changed in place get their new elements, which are the last outputs."""
    for i, value in zip(changed, outputs[len(outputs) - len(changed):]):
        tensors[i].copy_(value)
