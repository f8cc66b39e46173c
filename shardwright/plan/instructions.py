"""The local program of a plan: its instructions, the same for all ranks, and the tensors that they read and make."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..conversion import Conversion
from ..graph import Op, Value, leaves
from ..layout import Digits, Layout
from .storage import Stored

__all__ = ["Compute", "Extreme", "Instance", "Instruction", "Move", "Ref", "Routed", "made_by", "read_by", "reads"]


@dataclass(frozen=True)
class Ref:
    """An argument of a local call: the tensor of that name."""

    name: str


@dataclass(frozen=True)
class Instance:
    """A value in one layout, under a name of its own in the local program."""

    name: str
    value: Value
    layout: Layout

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.value.shape)

    @property
    def local_bytes(self) -> int:
        """Bytes that a rank's slice takes."""
        return math.prod(self.local_shape) * self.value.dtype.itemsize


@dataclass(frozen=True)
class Compute:
    """A local operator: ``outputs = target(*args, **kwargs)`` with `Ref`s for tensors."""

    op: Op
    target: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: tuple[Instance | None, ...]
    operator: str          # the operator of the user's program that it works for


@dataclass(frozen=True)
class Move:
    """A conversion of one value; `backward` is None where no gradient flows.

    Args:
        cause: "operator" (it completes an operator's partial sum), "conversion", or "parameter".
        operator: the operator that asks for it.
        producer: the operator that made the value, and left its sum open if it is; "" for what is fed or stored.
        again: it is a stored weight's, and the result is not kept for the backward but made again there.
    """

    source: Instance
    target: Instance
    forward: Conversion
    backward: Conversion | None
    cause: str
    operator: str
    producer: str = ""
    again: bool = False

    @property
    def casts(self) -> bool:
        """Whether it goes from the type of the source to that of the target, before it moves anything; its backward moves the
        gradient in the type `sums` and then brings it to the source's."""
        return self.source.value.dtype != self.target.value.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The type in which its forward moves the value."""
        return self.target.value.dtype

    @property
    def sums(self) -> torch.dtype:
        """The type in which its backward moves the gradient."""
        return self.target.value.sums

    @property
    def back(self) -> Value:
        """The target as its gradient travels."""
        value = self.target.value
        return value if self.sums == value.dtype else replace(value, dtype=self.sums)

    @property
    def copies(self) -> bool:
        """Whether its target lies in memory of its own."""
        return self.casts or bool(self.forward.steps)


@dataclass(frozen=True)
class Extreme:
    """A maximum or minimum over ranks. Its gradient goes to the ranks that hold it, shared among ties as on one device.

    Args:
        operand: what the operator reduced, and which of its local dims.
    """

    source: Instance
    target: Instance
    forward: Conversion
    operand: Instance
    dims: tuple[int, ...]
    backward: Digits | None
    operator: str


Instruction = Compute | Move | Extreme


@dataclass(frozen=True)
class Routed:
    """A program for all ranks alike: instructions in order, and where its values come from and go to.

    Attributes:
        stored: how each parameter is stored.
        used: in which layout the operators ask for each parameter.
    """

    devices: int
    inputs: tuple[Instance, ...]
    parameters: dict[str, Instance]
    buffers: dict[str, Instance]
    constants: dict[str, Instance]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Any, ...]                 # an Instance, or a plain constant
    updates: dict[str, Instance]
    notes: tuple[str, ...]
    stored: dict[str, Stored]
    used: dict[str, Layout]
    seed: Instance | None = None             # of the random numbers, if any are drawn


def made_by(instruction: Any) -> tuple[Instance, ...]:
    """What an instruction makes."""
    return tuple(o for o in instruction.outputs if o is not None) if isinstance(instruction, Compute) \
        else (instruction.target,)


def read_by(instruction: Any) -> tuple[str, ...]:
    """The names of the tensors that an instruction's gradient goes to, in the order of the call, each once."""
    if not isinstance(instruction, Compute):
        return (instruction.source.name,)
    given = leaves((instruction.args, instruction.kwargs))
    return tuple(dict.fromkeys(leaf.name for leaf in given if isinstance(leaf, Ref)))


def reads(instruction: Any) -> tuple[str, ...]:
    """The names of all tensors that an instruction reads, each once."""
    operand = (instruction.operand.name,) if isinstance(instruction, Extreme) else ()
    return (*read_by(instruction), *operand)
