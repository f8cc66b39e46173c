"""The collectives of a plan, one record each, from the instructions of its program.

    instruction -> `forward_collectives`, `backward_collectives` -> (Collective, the digits of its group)

Example: the backward of a gather of a weight that is stored in 4 parts is a reduce-scatter of phase "gradient".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..graph import Value
from ..layout import Digits
from ..redistribution import CollectiveKind, Redistribution
from .local_program import GlobalExtreme, Instruction, LocalOp, Redistribute
from .rematerialization import BackwardStep, RecomputedInstruction, Regather

__all__ = ["Collective", "backward_collectives", "forward_collectives", "redistribution_collectives"]


@dataclass(frozen=True)
class Collective:
    """One collective in which a rank takes part.

    Attributes:
        op: the kind; its word is "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo_exchange" or
            "halo_reduce", or "send" or "recv" in a pipeline.
        ranks: its group, ascending.
        shape: of the rank's own input to it.
        bytes: of that input; of an exchange of halos, those of its elements that the rank sends.
        sent: bytes that the rank must send, `CollectiveKind.sent`: 2(n−1)/n of the input for an all-reduce, (n−1)/n
            for a reduce-scatter and an all-to-all, n−1 times the input for an all-gather. The most over ranks.
        phase: "forward", "backward", "gradient" (a parameter's), or "storage" (from a parameter's storage to its use).
        cause: "operator", "conversion" or "parameter".
        operator: the operator that causes it.
        again: True in the backward, for a tensor not saved from the forward: a weight gathered again, or a
            recomputation.
    """

    op: CollectiveKind
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int
    sent: int
    phase: str
    cause: str
    operator: str
    again: bool = False


def redistribution_collectives(
    steps: Redistribution,
    shape: tuple[int, ...],
    value: Value,
    phase: str,
    cause: str,
    operator: str,
    producer: str = "",
) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of one redistribution of a value whose local shape is `shape` at its start.

    A step that completes a partial sum is caused, in the forward, by the producer of the sum.
    """
    for step in steps.steps:
        if step.communicates:
            numel = 1
            for size in shape:
                numel *= size
            nbytes = numel * value.dtype.itemsize
            completes = step.reduces and cause != "parameter"
            yield (
                Collective(
                    step.kind,
                    (),
                    shape,
                    nbytes if step.halo is None else step.sent(nbytes),
                    step.sent(nbytes),
                    phase,
                    "operator" if completes else "redistribution" if cause == "operator" else cause,
                    producer if completes and producer else operator,
                ),
                step.digits,
            )
        shape = step.local_shape_after(shape)


def forward_collectives(instruction: Instruction) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of an instruction in the forward."""
    if not isinstance(instruction, LocalOp):
        source = instruction.source
        cause = "operator" if isinstance(instruction, GlobalExtreme) else instruction.cause
        phase = "storage" if cause == "parameter" else "forward"
        yield from redistribution_collectives(
            instruction.forward,
            source.local_shape,
            instruction.target.value,
            phase,
            cause,
            instruction.operator,
            getattr(instruction, "producer", ""),
        )


def backward_collectives(instruction: BackwardStep) -> Iterator[tuple[Collective, Digits]]:
    """Yield the collectives of an instruction in the backward."""
    if isinstance(instruction, RecomputedInstruction):
        for collective, digits in forward_collectives(instruction.instruction):
            phase = "backward" if collective.phase == "forward" else collective.phase
            yield replace(collective, phase=phase, again=True), digits
        return
    if isinstance(instruction, Regather):
        move = instruction.move
        for collective, digits in redistribution_collectives(
            move.forward, move.source.local_shape, move.target.value, "storage", "parameter", instruction.operator
        ):
            yield replace(collective, again=True), digits
    elif isinstance(instruction, Redistribute) and instruction.backward is not None:
        target = instruction.target
        phase = "gradient" if instruction.cause == "parameter" else "backward"
        yield from redistribution_collectives(
            instruction.backward, target.local_shape, instruction.back, phase, instruction.cause, instruction.operator
        )
    elif isinstance(instruction, GlobalExtreme) and instruction.backward is not None:
        yield from redistribution_collectives(
            instruction.forward,
            instruction.source.local_shape,
            instruction.source.value,
            "backward",
            "operator",
            instruction.operator,
        )
