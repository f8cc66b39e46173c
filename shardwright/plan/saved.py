"""What the backward of each instruction needs of what the forward had: asked of autograd itself.

Every instruction is called on tensors without values, of local shapes, and what autograd packs is told apart by
memory: an input, an output, or something of the operator's own. No operator is described here. Where there is something
of its own, the tensors then stand for those of a CPU: on the meta device attention works out all its scores, as no
device does. Calls of the same operator with equal arguments on equal tensors are made once (`Call`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

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


class Blank(NamedTuple):
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self, device: str) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).requires_grad_(
            self.requires_grad)


class Call(NamedTuple):
    """A local call with all that decides what it saves, its tensors numbered.

    Attributes:
        target: what is called.
        tree: how the arguments are nested.
        leaves: each plain argument with its type (True and 1 are equal), of a tensor `Ref` and its number.
        reads: the tensors.
        outputs: the local shapes that it has to give.
    """

    target: Any
    tree: Any
    leaves: tuple[tuple[type, Any], ...]
    reads: tuple[Blank, ...]
    outputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, instruction: Compute, names: tuple[str, ...], env: dict[str, Blank]) -> Call:
        leaves, tree = pytree.tree_flatten((instruction.args, instruction.kwargs))
        number = {name: n for n, name in enumerate(names)}
        return cls(instruction.target, tree,
                   tuple((Ref, number[leaf.name]) if isinstance(leaf, Ref) else (type(leaf), leaf) for leaf in leaves),
                   tuple(env[n] for n in names), tuple(o.local_shape for o in made_by(instruction)))


class Answer(NamedTuple):
    """The saved tensors and the results of one call.

    Attributes:
        reads, outputs: the numbers of those that are saved.
        views: (number of a result, that of the input in whose memory it lies).
        own: bytes of what else is saved; None: nothing is.
        strides: of the results.
    """

    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    views: tuple[tuple[int, int], ...]
    own: int | None
    strides: tuple[tuple[int, ...], ...]


def saved_by(routed: Routed) -> list[Saved]:
    """What each instruction of a program saves, in their order."""
    env: dict[str, Blank] = {}
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


def _blank(instance: Instance, stride: tuple[int, ...] | None = None) -> Blank:
    """A tensor that stands for an instance."""
    shape = instance.local_shape
    return Blank(shape, _contiguous(shape) if stride is None else stride, instance.value.dtype,
                 instance.value.requires_grad)


@lru_cache(maxsize=1 << 14)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _of_operator(instruction: Compute, env: dict[str, Blank]) -> Saved:
    names, outputs = read_by(instruction), made_by(instruction)
    call = Call.of(instruction, names, env)
    try:
        hash(call)
    except TypeError:  # an argument that equal ones are not known by
        answer = _answer.__wrapped__(call)
    else:
        answer = _answer(call)
    if answer is None:
        env.update((o.name, _blank(o)) for o in outputs)
        return Saved(frozenset(names), True) if any(env[n].requires_grad for n in names) else Saved()
    env.update((o.name, _blank(o, stride)) for o, stride in zip(outputs, answer.strides))
    values = frozenset((*(names[n] for n in answer.reads), *(outputs[k].name for k in answer.outputs)))
    return Saved(values, answer.own is not None, tuple((outputs[k].name, names[n]) for k, n in answer.views),
                 answer.own or 0)


@lru_cache(maxsize=1 << 14)
def _answer(call: Call) -> Answer | None:
    """Autograd's answer on a call; None: the call runs on tensors with values only, and whatever it may save counts."""
    try:
        found = _called(call, "meta")
        if found.own is not None:
            with FakeTensorMode():
                found = _called(call, "cpu")
    except Exception:  # of any kind, by an operator that needs values: all that it may save counts then
        return None
    return found


def _called(call: Call, device: str) -> Answer:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> None:
        # Held, for memory is known by its address; without its graph, which would hold an output for ever.
        packed.append(x.detach())

    read = [blank.made(device) for blank in call.reads]
    args, kwargs = pytree.tree_unflatten([read[leaf] if kind is Ref else leaf for kind, leaf in call.leaves], call.tree)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        made = call.target(*args, **kwargs)
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
    if [tuple(x.shape) for x in results] != list(call.outputs):
        raise RuntimeError("other shapes than planned")
    given = {_memory(x): n for n, x in enumerate(read)}
    new = {_memory(x): k for k, x in reversed(list(enumerate(results))) if _memory(x) not in given}
    saved = [_memory(x) for x in packed]
    own = {place: x.untyped_storage().nbytes() for x, place in zip(packed, saved) if place not in given and place not in new}
    return Answer(tuple({given[p]: None for p in saved if p in given}), tuple({new[p]: None for p in saved if p in new}),
                  tuple((k, given[_memory(x)]) for k, x in enumerate(results) if _memory(x) in given),
                  sum(own.values()) if own else None, tuple(x.stride() for x in results))


def _memory(x: Tensor) -> int:
    return storage_id(x.untyped_storage())
