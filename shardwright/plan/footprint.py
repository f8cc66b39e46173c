"""What one operator under one strategy costs by itself, what it asks of its inputs, and what it leaves.

It is routed alone, by the router that makes the program that runs: fed as it asks, its outputs read by nobody. What
brings inputs there is the business of the values, see `delivery`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from ..graph import SEED, Graph, Op, map_values
from ..layout import Layout
from .decision import Decision, Feeding
from .instructions import Compute, Extreme, Instance, Instruction
from .route import Router, Use

__all__ = ["Footprint", "footprint", "kind_of_call"]


@dataclass(frozen=True)
class Footprint:
    """An operator's part of a program.

    Attributes:
        asks: by tensor input, the uses that are made of it; an input that stands twice has its uses once, the first
            time, nothing afterwards.
        leaves: by tensor output, the layout in which it is left, open sums included.
        forward, backward: seconds, of the operator and of what is sent inside of it.
        made: bytes that a rank makes in the forward.
        program: the instructions, alone.
        fed: by tensor input, the instance that they are given.
        left: by tensor output, the instance that they leave.
    """

    asks: tuple[frozenset[Use], ...]
    leaves: tuple[Layout, ...]
    forward: float
    backward: float
    made: int
    program: tuple[Any, ...] = ()
    fed: tuple[Instance, ...] = ()
    left: tuple[Instance, ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def kind_of_call(op: Op) -> Hashable:
    """What two calls have in common that cost alike: the operator, its plain arguments, its shapes and dtypes."""
    position = {v.name: i for i, v in reversed(list(enumerate(op.inputs)))}
    args = map_values((op.args, sorted(op.kwargs.items())), lambda v: f"#{position[v.name]}")
    return (op.target, repr(args), tuple((v.shape, v.dtype, v.requires_grad) for v in op.inputs),
            tuple(v and (v.shape, v.dtype, v.requires_grad) for v in op.outputs))


def footprint(decision: Decision, costs: Any) -> Footprint:
    """The footprint of a decision that says what it lets through, priced by a `Costs`.

    Raises:
        ShardwrightError: it cannot be worked out under this assignment.
    """
    op, devices = decision.op, decision.assignment.devices
    inputs = {v.name: v for v in op.inputs}
    graph = Graph(tuple(inputs.values()), {}, {}, {}, (op,), ())
    router = Router(graph, {op.name: decision}, Feeding((), False), devices, {}, {}, None)
    work = [(decision, *piece) for piece in router.pieces(decision)]
    router.collect(work, [])
    asks = {name: frozenset(Use(u.want.with_partial(decision.open) if decision.open else u.want, u.partial, "")
                            for u in router.uses.get(name, ())) for name in inputs}
    if SEED.name in router.uses:
        router.make(SEED, Layout.replicated(devices, 1))
    for name, value in inputs.items():
        wants = sorted((u.want for u in asks[name]), key=str)
        router.make(value, wants[0] if wants else Layout.replicated(devices, len(value.shape)))
    given = {name: _padded(instance) for name, instance in router.made.items()}
    fed = {instance.name for instance in given.values()}
    known: dict[str, Instance] = {i.name: i for i in given.values()}
    for piece in work:
        router.compute(*piece)
    forward = backward = 0.0
    made = 0
    instructions = tuple(map(_on_padded, router.out) if decision.bound.uneven else router.out)
    for i in instructions:
        own = isinstance(i, Compute)
        results = [o for o in i.outputs if o is not None] if own else [i.target]
        known.update((o.name, o) for o in results)
        if own or i.source.name not in fed:
            forward += costs.forward(i, known)
            if any(o.value.requires_grad for o in results):
                backward += costs.backward(i, known)
            made += sum(o.local_bytes for o in results)
    left = tuple(_padded(router.made[router.now(v).name]) for v in op.outputs if v is not None)
    once: dict[str, frozenset[Use]] = dict(asks)
    return Footprint(tuple(once.pop(v.name, frozenset()) for v in op.inputs), tuple(i.layout for i in left), forward,
                     backward, made, instructions, tuple(given[v.name] for v in op.inputs), left)


def _padded(instance: Instance) -> Instance:
    """An instance as large as its cuts make it."""
    shape = instance.layout.padded(instance.value.shape)
    return instance if shape == instance.value.shape else replace(instance, value=replace(instance.value, shape=shape))


def _on_padded(instruction: Instruction) -> Instruction:
    """An instruction on values as large as their cuts make them."""
    if isinstance(instruction, Compute):
        return replace(instruction, outputs=tuple(o and _padded(o) for o in instruction.outputs))
    operand = {"operand": _padded(instruction.operand)} if isinstance(instruction, Extreme) else {}
    return replace(instruction, source=_padded(instruction.source), target=_padded(instruction.target), **operand)
