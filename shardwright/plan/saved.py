"""What the backward of each instruction needs of what the forward had: asked of autograd itself.

Every instruction is called once on tensors without values, of local shapes, and what autograd packs is told apart by
memory: an input, an output, or something of the operator's own. No operator is described here. Where there is something
of its own, the tensors then stand for those of a CPU: on the meta device attention works out all its scores, as no
device does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..torch_private import FakeTensorMode, pytree, storage_id
from .instructions import Compute, Extreme, Instance, Ref, Routed, made_by, read_by

__all__ = ["Saved", "saved_by"]


@dataclass(frozen=True)
class Saved:
    """What autograd saves of one instruction.

    Attributes:
        values: the names of what it reads or makes that are saved.
        own: whether it saves something else, which only calling it again brings back.
        views: (a result, the input in whose memory it lies).
        own_bytes: of what else it saves.
    """

    values: frozenset[str] = frozenset()
    own: bool = False
    views: tuple[tuple[str, str], ...] = ()
    own_bytes: int = 0


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
    reads = set(read_by(instruction))
    outputs = made_by(instruction)
    try:
        found, results = _called(instruction, {n: env[n] for n in reads})
        if found.own:
            with FakeTensorMode():
                like = {n: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)
                        for n in reads for x in (env[n],)}
                found, results = _called(instruction, like)
    except Exception:  # it runs on tensors with values only: whatever it may save counts
        env.update((o.name, _blank(o)) for o in outputs)
        return Saved(frozenset(reads) | {o.name for o in outputs}, True) \
            if any(env[n].requires_grad for n in reads) else Saved()
    env.update((o.name, _blank(o, x)) for o, x in zip(outputs, results))
    return found


def _called(instruction: Compute, read: dict[str, Tensor]) -> tuple[Saved, list[Tensor]]:
    """What one call saves, and what it gives."""
    outputs = [o for o in instruction.outputs if o is not None]
    packed: list[Tensor] = []

    def pack(x: Tensor) -> None:
        # Held, for memory is known by its address; without its graph, which would hold an output for ever.
        packed.append(x.detach())

    args, kwargs = pytree.tree_map(lambda a: read[a.name] if isinstance(a, Ref) else a,
                                   (instruction.args, instruction.kwargs))
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        made = instruction.target(*args, **kwargs)
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
    tensors = dict(zip((o.name for o in outputs), results, strict=True))
    if any(tuple(tensors[o.name].shape) != o.local_shape for o in outputs):
        raise RuntimeError("other shapes than planned")
    given = {_memory(x): n for n, x in read.items()}
    memory = given | {_memory(x): n for n, x in reversed(tensors.items()) if _memory(x) not in given}
    views = tuple((n, given[_memory(x)]) for n, x in tensors.items() if _memory(x) in given)
    own = {place: x.untyped_storage().nbytes() for x in packed if (place := _memory(x)) not in memory}
    return Saved(frozenset(memory[p] for p in map(_memory, packed) if p in memory), bool(own), views,
                 sum(own.values())), results


def _memory(x: Tensor) -> int:
    return storage_id(x.untyped_storage())
