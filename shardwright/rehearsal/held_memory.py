"""The most bytes that a device holds at any moment of a step.

accelerator    the allocator's own count
CPU            the memory of all tensors that are alive, counted after each operator; what an operator holds only
               while it runs is not seen
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..solver.search_memory import free_memory
from ..torch_private import TorchDispatchMode, local_tensor, pytree, storage_id

__all__ = ["memory_of", "most_held"]


class _Alive(TorchDispatchMode):
    """The memory of the tensors that operators have seen or made, and that are still alive."""

    def __init__(self, standing: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}
        for x in standing:
            self._note(x)
        self.peak = self._now()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # a DTensor: the operators on its slice come here again
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x)
        self.peak = max(self.peak, self._now())
        return result

    def _note(self, x: Tensor) -> None:
        if x.is_meta or isinstance(x, DTensor):
            return
        storage = x.untyped_storage()
        self._memory.setdefault(storage_id(storage), (StorageWeakRef(storage), storage.nbytes()))

    def _now(self) -> int:
        self._memory = {key: (ref, size) for key, (ref, size) in self._memory.items() if not ref.expired()}
        return sum(size for _, size in self._memory.values())


def most_held(play: Callable[[], None], standing: Iterable[Tensor], device: torch.device) -> int:
    """The most bytes held while `play` runs.

    Args:
        play: runs once.
        standing: the tensors that are there before. Other tensors from before are counted on an accelerator alone.
        device: on which they are.
    """
    if device.type == "cpu":
        with _Alive(local_tensor(x) if isinstance(x, DTensor) else x for x in standing) as alive:
            play()
        return alive.peak
    module = torch.get_device_module(device)
    module.synchronize()
    module.reset_peak_memory_stats(device)
    play()
    module.synchronize()
    return module.max_memory_allocated(device)


def memory_of(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cpu":
        return free_memory()
    return float(torch.get_device_module(device).mem_get_info(device)[0])
