"""``torch.testing.assert_close(p, plain)`` of parameters in several processes.

A parameter of which a rank has a slice is a DTensor, and torch refuses to compare a DTensor with a plain tensor before
it calls any function on it. Two DTensors it compares slice by slice: ranks with equal slices would go on, those with
other ones would not. Both are compared as whole tensors instead, which all ranks gather together, so that all ranks
have the same answer.

While a process has parallel models and a process group, torch's function that takes both apart is replaced by
`_taken`, which passes all other tensors on. The last of the models puts torch's own back. Versions of torch without
that function call isclose on the parameters, which gathers them too.

Example: a weight [32, 16] in slices [8, 16] on 4 ranks. ``torch.testing.assert_close(net.weight, plain.weight)``
compares [32, 16] with [32, 16] on each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from ..torch_private import take_comparisons

__all__ = ["compared"]

_users = 0
_put_back: Callable[[], None] | None = None


def compared(model: object) -> None:
    """Compare parameters as whole tensors as long as a parallel model lives; without a process group nothing is
    done."""
    global _users, _put_back
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _users += 1
        if _put_back is None:
            _put_back = take_comparisons(_taken)
        weakref.finalize(model, _released).atexit = False


def _released() -> None:
    global _users, _put_back
    _users -= 1
    if not _users and _put_back is not None:
        _put_back()
        _put_back = None


def _taken(actual: object, expected: object) -> tuple[object, object]:
    """Two things that are compared, with whole tensors in the place of parameters."""
    from .distributed.sliced_tensors import SlicedTensor, whole_value  # noqa: PLC0415  imports DTensor, a second

    one, other = (whole_value(x, "assert_close") if isinstance(x, SlicedTensor) else x for x in (actual, expected))
    return one, other
