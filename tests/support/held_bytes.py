"""Bytes that a rank holds under optimizer parallel: measured, and by arithmetic.

A step is two micro-batches, the first under ``no_sync``, and AdamW, in data_parallel on Gloo processes. With P bytes of
parameters in L layers of W = P / L, all of them cut over n ranks, a process holds

    level    parameters    state    gradients, accumulated    at a step    weights from forward to backward
    none         P          2P               P                    P                     0
    level1      P/n       2P/n               P                   P/n                  P - W
    level2      P/n       2P/n              P/n                  P/n                  P - W
    level3      P/n       2P/n              P/n                  P/n                    0

and at the most all of it at the beginning of the second backward, where the first gradient and the terms received for
its sum have taken the place of the last layer's weight: W more. With no weights kept it is in the midst of it, and 2 W
more, what a collective sends and receives, up to twice that, for Gloo's worker may let those of the one before go when
the next comes: reckoned as 3 W.
(The first layer's weight is not kept: no gradient goes to the batch.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw

BATCH = 16
LEVELS = ("none", "level1", "level2", "level3")


class Alive(TorchDispatchMode):
    """The memory of the tensors that operators have made and that are still alive; not that through which ranks send,
    which is the transport's, and mapped.

    Attributes:
        peak: the largest sum after an operator, since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what is done on their local tensors comes here again
        result = function(*args, **(kwargs or {}))
        for x in pytree.tree_leaves((args, result)):
            if isinstance(x, Tensor) and not isinstance(x, DTensor):
                storage = x.untyped_storage()
                fake, mapped = storage.device.type == "meta", not storage.resizable()  # fake ones of a capture
                if not fake and not mapped and storage._cdata not in self._memory:
                    self._memory[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Bytes, now."""
        self._memory = {k: (ref, size) for k, (ref, size) in self._memory.items() if not ref.expired()}
        return sum(size for _, size in self._memory.values())


@dataclass(frozen=True)
class Held:
    """Bytes on a process.

    Attributes:
        accumulated, gradients: of gradients, after the backward under `no_sync` and before the step.
        kept: what a forward leaves for its backward.
        peak: at the most in a step.
    """

    parameters: int
    state: int
    accumulated: int
    gradients: int
    kept: int
    peak: int


def storages(tensors: Any) -> int:
    """The memory in which tensors lie."""
    held = {}
    for x in pytree.tree_leaves(tensors):
        if isinstance(x, Tensor) and x.dim():
            storage = (x.to_local() if isinstance(x, DTensor) else x).untyped_storage()
            held[storage._cdata] = storage.nbytes()
    return sum(held.values())


def measure(rank: int, world: int, level: str, layers: int, width: int) -> Held:
    with Alive() as alive:
        torch.manual_seed(0)
        with sw.no_init_parameters():
            net = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.Tanh())))
        sw.init()
        model = sw.AutoParallel(net, nn.MSELoss(), "data_parallel").comm_fusion(openstate=False)
        if level != "none":
            model.hsdp(threshold=0, optimizer_level=level)
        x, y = torch.randn(BATCH // world, width), torch.randn(BATCH // world, width)
        model(x, y)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for _step in range(2):
            model(x, y)  # let go at once: what the transport still holds of its last messages is now that of a forward
            alive.peak = before = alive.now()
            with model.no_sync():
                loss = model(x, y)
                kept = alive.now() - before
                loss.backward()
                del loss
            with torch.no_grad():
                accumulated = storages([p.grad for p in net.parameters()])
            model(x, y).backward()
            with torch.no_grad():
                gradients = storages([p.grad for p in net.parameters()])
            optimizer.step()
            peak = alive.peak
            optimizer.zero_grad()
        with torch.no_grad():
            return Held(
                storages(list(net.parameters())),
                storages(list(optimizer.state.values())),
                accumulated,
                gradients,
                kept,
                peak,
            )


def arithmetic(level: str, world: int, layers: int, width: int) -> Held:
    """The table above."""
    layer = width * width * 4
    whole = layers * layer
    part = whole if level == "none" else whole // world
    activations = layers * (BATCH // world) * width * 4
    accumulated = whole if level in ("none", "level1") else part
    kept = whole - layer if level in ("level1", "level2") else 0  # the first layer's backward wants no weight
    peak = 3 * part + activations + accumulated + kept + (1 if kept else 3) * layer
    return Held(part, 2 * part, accumulated, part, kept + activations, peak)
