"""What the backward of each instruction needs of what the forward had: asked of autograd itself.

Every instruction is called once on tensors without values, of local shapes, and what autograd packs is told apart by
memory: an input, an output, or something of the operator's own. No operator is described here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from .route import Compute, Extreme, Instance, Ref, Routed

__all__ = ["Saved", "saved_by"]


@dataclass(frozen=True)
class Saved:
    """What autograd saves of one instruction.

    Attributes:
        values: the names of what it reads or makes that are saved.
        own: whether it saves something else, which only calling it again brings back.
        views: (a result, the input in whose memory it lies).
    """

    values: frozenset[str] = frozenset()
    own: bool = False
    views: tuple[tuple[str, str], ...] = ()


def saved_by(routed: Routed) -> list[Saved]:
    """What each instruction of a program saves, in their order."""
    env: dict[str, Tensor] = {}
    sources: list[Iterable[Instance]] = [routed.inputs, routed.parameters.values(), routed.buffers.values(),
                                         routed.constants.values()]
    for instance in (i for table in sources for i in table):
        env[instance.name] = _blank(instance)
    if routed.seed is not None:
        env[routed.seed.name] = _blank(routed.seed)
    out = []
    for instruction in routed.instructions:
        if isinstance(instruction, Compute):
            out.append(_of_operator(instruction, env))
            continue
        env[instruction.target.name] = _blank(instruction.target)
        names = (instruction.source.name, instruction.operand.name, instruction.target.name) \
            if isinstance(instruction, Extreme) and instruction.backward is not None else ()
        out.append(Saved(frozenset(names)))
    return out


def _blank(instance: Instance, like: Tensor | None = None) -> Tensor:
    """A tensor without values that stands for an instance, with the strides of another."""
    stride = like.stride() if like is not None else torch.empty(instance.local_shape, device="meta").stride()
    return torch.empty_strided(instance.local_shape, stride, dtype=instance.value.dtype,
                               device="meta").requires_grad_(instance.value.requires_grad)


def _of_operator(instruction: Compute, env: dict[str, Tensor]) -> Saved:
    reads = {leaf.name for leaf in pytree.tree_leaves((instruction.args, instruction.kwargs)) if isinstance(leaf, Ref)}
    outputs = [o for o in instruction.outputs if o is not None]
    packed: list[Tensor] = []

    def pack(x: Tensor) -> None:
        # Held, for memory is known by its address; without its graph, which would hold an output for ever.
        packed.append(x.detach())

    args, kwargs = pytree.tree_map(lambda a: env[a.name] if isinstance(a, Ref) else a,
                                   (instruction.args, instruction.kwargs))
    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
            made = instruction.target(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
        tensors = dict(zip((o.name for o in outputs), results, strict=True))
        if any(tuple(tensors[o.name].shape) != o.local_shape for o in outputs):
            raise RuntimeError("other shapes than planned")
    except Exception:  # it runs on tensors with values only: whatever it may save counts
        env.update((o.name, _blank(o)) for o in outputs)
        return Saved(frozenset(reads) | {o.name for o in outputs}, True) \
            if any(env[n].requires_grad for n in reads) else Saved()
    read = {_memory(env[n]): n for n in reads}
    memory = read | {_memory(x): n for n, x in reversed(tensors.items()) if _memory(x) not in read}
    views = tuple((n, read[_memory(x)]) for n, x in tensors.items() if _memory(x) in read)
    env.update((o.name, _blank(o, tensors[o.name])) for o in outputs)
    places = list(map(_memory, packed))
    return Saved(frozenset(memory[p] for p in places if p in memory), any(p not in memory for p in places), views)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
