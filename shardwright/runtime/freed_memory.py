"""Policy for host memory that a step has freed: keep it from step to step, and give all of it back now and then.

glibc has two thresholds. A freed block above the first is returned to the kernel at once; free memory at the top of
the heap above the second is returned too. glibc raises the first to the largest block that it has seen freed, at most
32 MiB, and the second to twice that. While the thresholds are lower than a step needs, it pays for its pages anew.

Memory that is always kept makes the heap grow: a tensor's block lies between small blocks that outlive it, and is not
found again for the next tensor of its size, which needs some bytes more until it is aligned. Hence both: freed memory
is kept from step to step, and all of it is given back at growing intervals. Thresholds that the user has set in the
environment are left alone.

With an accelerator nothing is set and nothing given back: tensors lie in its memory, whose allocator is torch's own.

Example: the tutorial network, eight devices in one process, has 730 page faults a step by default and 15 with freed
memory kept (measured: benchmarks/README.md).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch

from ..accelerator_api import is_accelerator

__all__ = ["freed"]

# `mallopt`'s numbers of the two thresholds: top of the heap, single block. BLOCK is the largest block that glibc can
# keep (DEFAULT_MMAP_THRESHOLD_MAX). TOP is more than a step frees at the top of the heap, and still bounds what an
# ended run leaves behind.
_TRIM, _MMAP = -1, -3
BLOCK, TOP = 32 << 20, 1 << 30

#: Seconds and steps between two times that memory is given back: FIRST after the first steps, which leave the most;
#: then doubled each time up to LAST, because pages that come anew take time.
FIRST, LAST = (0.5, 1), (16.0, 16)


class _Freed:
    """The C library's free memory in this process."""

    def __init__(self) -> None:
        self._give_back: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        self._set: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)
        self._due, self._left, self._pause, self._fresh = 0.0, 0, FIRST, True
        self._idle = False

    def planned(self, device: torch.device) -> None:
        """Note that a program has been planned, and is about to make its first step on `device`."""
        self._idle = is_accelerator(device)
        if self._idle:
            return
        if self._set is not None and self._give_back is not None and not _chosen():
            self._set(_MMAP, BLOCK)
            self._set(_TRIM, TOP)
        self._fresh = True

    def step(self) -> None:
        """Note the begin of a step, when the least memory is in use; give free memory back if the interval is over."""
        if self._idle:
            return
        if self._fresh:
            self._due, self._left, self._pause, self._fresh = 0.0, 0, FIRST, False
            return
        self._left -= 1
        if self._left <= 0 and (now := time.monotonic()) >= self._due:
            seconds, self._left = self._pause
            self._due, self._pause = now + seconds, (min(2 * seconds, LAST[0]), min(2 * self._left, LAST[1]))
            if self._give_back is not None:
                self._give_back(0)


def _chosen() -> bool:
    """True where the environment sets glibc's thresholds."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name}_THRESHOLD_" in os.environ or f"glibc.malloc.{name.lower()}_threshold" in tunables
        for name in ("TRIM", "MMAP")
    )


freed = _Freed()
