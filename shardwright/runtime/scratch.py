"""Memory that several sums use one after the other."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """Memory into which ranks receive. What is freed and allocated anew in each step costs its pages, and sums that come one
    after the other can share it: it is kept, the largest that was asked for, for whoever asks next."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Uninitialised, flat, of at least `numel` elements of the type of `like`."""
        for k, held in enumerate(self._free):
            if held.dtype == like.dtype and held.device == like.device:
                del self._free[k]
                if held.numel() >= numel:
                    return held
                del held  # before there is a larger one
                break
        return like.new_empty(numel)

    def give(self, x: Tensor) -> None:
        """Back, what was taken. What an error has left under way is never given back."""
        self._free.append(x)
