"""Sums over ranks in the memory of their terms: the redistributions whose input nothing reads after them.

A library's all-reduce writes where it reads. A copy in front of it is needed only where the tensor is read later. The
program is static, so it says where it is not:

    forward     the value is made by an operator of `FRESH`, no instruction reads it or a view of it later, no operator
                saves it for its backward, and it is no result
    backward    the gradient comes from operators of `PRODUCTS` alone, which make a new tensor for it. Autograd hands
                the gradient of an addition to both of its terms, so that another operator's gradient is copied

Example: y = relu(x @ w) with x [32, 16] and w [16, 8], whose contracted dim of 16 is cut 4 ways. The terms of x @ w,
[32, 8] on each rank, are read by the sum alone, and the sum is theirs. In y = relu(h) + h.sigmoid_() with h = x @ w, h
would be copied.

What the backward runs again, and a backward that is differentiated again, copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .local_program import LocalOp, LocalProgram, PlacedValue, Redistribute, reads
from .rematerialization import LiveRanges, Region, saved_by

__all__ = ["sums_in_place"]

_aten, _library = torch.ops.aten, torch.ops.shardwright

#: Operator -> the places of its operands to whose gradients the backward gives memory of their own.
PRODUCTS = {
    _aten.linear.default: (0, 1),
    _library.linear_part.default: (0, 1),
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.matmul.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten.convolution.default: (0, 1),
}
#: Operators whose result has memory of its own.
FRESH = {*PRODUCTS, _aten.embedding.default, _library.embedding_part.default, _aten.sum.default, _aten.sum.dim_IntList}


def sums_in_place(program: LocalProgram, regions: Sequence[Region]) -> tuple[frozenset[int], frozenset[int]]:
    """The places of the redistributions whose input may be written to: in the forward, and in the backward.

    Args:
        program: the program of a rank.
        regions: those of it that the backward recomputes.
    """
    instructions = program.instructions
    saved = saved_by(program)
    seed = () if program.seed is None else (program.seed,)
    tables = (program.parameters, program.buffers, program.constants)
    ranges = LiveRanges((*program.inputs, *seed, *(i for t in tables for i in t.values())), instructions, saved)
    results = [*(o for o in program.outputs if isinstance(o, PlacedValue)), *program.updates.values()]
    recomputed = {place for region in regions for place in region.recompute_set}
    needed_later = {ranges.root[o.name] for o in results}
    for found in saved:
        needed_later.update(ranges.root[name] for name in found.values)
    for region in regions:
        needed_later.update(ranges.root[name] for name in (*region.inputs, *region.dropped))
    consumers: dict[str, list[int]] = {}
    for place, instruction in enumerate(instructions):
        for name in reads(instruction):
            consumers.setdefault(name, []).append(place)
    forward, backward = set(), set()
    for place, instruction in enumerate(instructions):
        if not isinstance(instruction, Redistribute) or instruction.casts or place in recomputed:
            continue
        root = ranges.root[instruction.source.name]
        producer = instructions[ranges.born[root]] if root in ranges.born else None
        made_fresh = isinstance(producer, LocalOp) and producer.target in FRESH
        if instruction.forward.is_all_reduce and made_fresh and ranges.read[root] == place and root not in needed_later:
            forward.add(place)
        target = instruction.target.name
        if (
            instruction.backward is not None
            and instruction.backward.is_all_reduce
            and instruction.cause != "parameter"
            and target in consumers
            and instruction.sums == instruction.target.value.dtype
            and ranges.root[target] not in {ranges.root[o.name] for o in results}
            and all(_makes_gradient(instructions[k], target) and k not in recomputed for k in consumers[target])
        ):
            backward.add(place)
    return frozenset(forward), frozenset(backward)


def _makes_gradient(instruction: object, name: str) -> bool:
    """True where the backward of an instruction gives memory of its own to the gradient of a value."""
    if not isinstance(instruction, LocalOp) or instruction.target not in PRODUCTS:
        return False
    places = [k for k, value in enumerate(instruction.args) if getattr(value, "name", None) == name]
    by_keyword = [v for v in instruction.kwargs.values() if getattr(v, "name", None) == name]
    return bool(places) and not by_keyword and set(places) <= set(PRODUCTS[instruction.target])
