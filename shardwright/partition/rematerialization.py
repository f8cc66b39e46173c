"""Values that the backward needs: saved by autograd, recomputed, or gathered again; and live ranges.

1. Saved tensors (`saved_by`): autograd itself is asked which forward tensors the backward of an instruction needs.
   Each operator is called on tensors without values, of local shapes; each tensor that autograd packs is identified
   by its memory: an input, an output, or a tensor internal to the operator. No operator is described here. An
   operator with internal tensors is called again with fake CPU tensors: on the meta device, attention computes all
   its scores, unlike on any real device. Calls of one operator with equal arguments on equal tensors are answered
   once (`AutogradCall`).

2. Gathered weights (`regathered_weights`): a gathered weight that is not saved is gathered again for its first consumer
   in the backward: the last operator, in program order, that saves the weight or a view of it.

3. Live ranges (`LiveRanges`, `waiting`):

    a tensor      from its producer to its last consumer. A view lies in the memory of the tensor it views, and so
                  does the target of a redistribution without steps: they share one *root*
    a gradient    from the backward of the tensor's last consumer (for an output: from the start) to that of its
                  producer; each further term exists while it is added

4. Recomputed regions (`regions_of`):

    a region      the instructions of one recomputed call, including the redistributions of its operators
    dropped       tensors that some backward needs and an instruction of the region produces
    recompute set the instructions of the region that recompute the dropped tensors
    inputs        tensors that these consume and do not produce: they are saved

An instruction of a region runs again only where some backward needs it, so a collective whose result nobody saves is
not sent again. A region recomputes when a backward first needs one of its dropped tensors.

5. Recomputation by a search (`segments_of`, `with_recompute`): operators by name; neighbours within one segment of
   the program form one region.

Example: y = relu(h), h = x @ w, with an input x [32, 16] and w [16, 8]. The product saves x, and relu saves y. Nothing
saves h, which lives from the product to relu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..graph import Graph, Recompute
from ..identity_tables import IdentitySet
from ..rules.result_shapes import contiguous_strides
from ..torch_private import FakeTensorMode, pytree, schema_of, storage_id
from .local_program import (
    GlobalExtreme,
    Instruction,
    LocalOp,
    LocalProgram,
    PlacedValue,
    Redistribute,
    Ref,
    made_by,
    read_by,
    reads,
)

__all__ = [
    "BackwardStep",
    "LiveRanges",
    "RecomputedInstruction",
    "Regather",
    "Region",
    "RegionStarts",
    "SavedTensors",
    "hands_on",
    "regathered_weights",
    "regions_of",
    "saved_by",
    "segments_of",
    "waiting",
    "with_recompute",
]


# -- saved tensors


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that autograd saves for the backward of one instruction.

    Attributes:
        values: names of the saved inputs and outputs.
        internal: True where it also saves an internal tensor, which only recomputing the instruction restores.
        views: (an output, the input in whose memory it lies).
        own_bytes: bytes of the internal tensors.
    """

    values: frozenset[str] = frozenset()
    internal: bool = False
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
            self.requires_grad
        )


class AutogradCall(NamedTuple):
    """A local call with everything that decides its saved tensors; tensors are numbered.

    Attributes:
        target: the function called.
        tree: the nesting of the arguments.
        leaves: per argument its type and value (True and 1 are equal); for a tensor, `Ref` and its number.
        reads: the tensors.
        outputs: the local shapes that it must return.
    """

    target: Callable[..., object]
    tree: pytree.TreeSpec
    leaves: tuple[tuple[type, Any], ...]  # any argument of an operator
    reads: tuple[Blank, ...]
    outputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, instruction: LocalOp, names: tuple[str, ...], env: dict[str, Blank]) -> AutogradCall:
        leaves, tree = pytree.tree_flatten((instruction.args, instruction.kwargs))
        number = {name: n for n, name in enumerate(names)}
        return cls(
            instruction.target,
            tree,
            tuple((Ref, number[leaf.name]) if isinstance(leaf, Ref) else (type(leaf), leaf) for leaf in leaves),
            tuple(env[n] for n in names),
            tuple(o.local_shape for o in made_by(instruction)),
        )


class Answer(NamedTuple):
    """The saved tensors and the results of one call.

    Attributes:
        reads, outputs: the numbers of the saved inputs and outputs.
        views: (number of a result, number of the input in whose memory it lies).
        internal: bytes of saved internal tensors; None: there are none.
        strides: strides of the results.
    """

    reads: tuple[int, ...]
    outputs: tuple[int, ...]
    views: tuple[tuple[int, int], ...]
    internal: int | None
    strides: tuple[tuple[int, ...], ...]


def saved_by(local_program: LocalProgram) -> list[SavedTensors]:
    """The saved tensors of each instruction of a program, in program order."""
    env: dict[str, Blank] = {}
    sources: list[Iterable[PlacedValue]] = [
        local_program.inputs,
        local_program.parameters.values(),
        local_program.buffers.values(),
        local_program.constants.values(),
    ]
    for placed in (i for table in sources for i in table):
        env[placed.name] = _blank(placed)
    if local_program.seed is not None:
        env[local_program.seed.name] = _blank(local_program.seed)
    out = []
    for instruction in local_program.instructions:
        if isinstance(instruction, LocalOp):
            out.append(_of_operator(instruction, env))
            continue
        env[instruction.target.name] = _blank(instruction.target)
        names = (
            (instruction.source.name, instruction.operand.name, instruction.target.name)
            if isinstance(instruction, GlobalExtreme) and instruction.backward is not None
            else ()
        )
        out.append(SavedTensors(frozenset(names)))
    return out


def _blank(placed: PlacedValue, stride: tuple[int, ...] | None = None) -> Blank:
    """A tensor without values in the place of a placed value."""
    shape = placed.local_shape
    return Blank(
        shape, contiguous_strides(shape) if stride is None else stride, placed.value.dtype, placed.value.requires_grad
    )


def _of_operator(instruction: LocalOp, env: dict[str, Blank]) -> SavedTensors:
    names, outputs = read_by(instruction), made_by(instruction)
    call = AutogradCall.of(instruction, names, env)
    try:
        hash(call)
    except TypeError:  # an argument that cannot be hashed
        answer = _answer.__wrapped__(call)
    else:
        answer = _answer(call)
    if answer is None:
        env.update((o.name, _blank(o)) for o in outputs)
        return SavedTensors(frozenset(names), True) if any(env[n].requires_grad for n in names) else SavedTensors()
    env.update((o.name, _blank(o, stride)) for o, stride in zip(outputs, answer.strides))
    values = frozenset((*(names[n] for n in answer.reads), *(outputs[k].name for k in answer.outputs)))
    return SavedTensors(
        values,
        answer.internal is not None,
        tuple((outputs[k].name, names[n]) for k, n in answer.views),
        answer.internal or 0,
    )


@lru_cache(maxsize=1 << 14)
def _answer(call: AutogradCall) -> Answer | None:
    """Autograd's answer on a call; None where the call needs values: every tensor it may save then counts."""
    try:
        found = _called(call, "meta")
        if found.internal is not None:
            with FakeTensorMode():
                found = _called(call, "cpu")
    except Exception:  # an operator that needs values may raise anything; every tensor it may save then counts
        return None
    return found


def _called(call: AutogradCall, device: str) -> Answer:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> None:
        # Kept alive, since memory is identified by its address; detached, since its graph would keep an output alive.
        packed.append(x.detach())

    read = [blank.made(device) for blank in call.reads]
    args, kwargs = pytree.tree_unflatten([read[leaf] if kind is Ref else leaf for kind, leaf in call.leaves], call.tree)
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
        made = call.target(*args, **kwargs)
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
    if [tuple(x.shape) for x in results] != list(call.outputs):
        raise RuntimeError("other shapes than planned")
    inputs = {_memory(x): n for n, x in enumerate(read)}
    new = {_memory(x): k for k, x in reversed(list(enumerate(results))) if _memory(x) not in inputs}
    saved = [_memory(x) for x in packed]
    internal = {
        place: x.untyped_storage().nbytes()
        for x, place in zip(packed, saved)
        if place not in inputs and place not in new
    }
    return Answer(
        tuple({inputs[p]: None for p in saved if p in inputs}),
        tuple({new[p]: None for p in saved if p in new}),
        tuple((k, inputs[_memory(x)]) for k, x in enumerate(results) if _memory(x) in inputs),
        sum(internal.values()) if internal else None,
        tuple(x.stride() for x in results),
    )


def _memory(x: Tensor) -> int:
    return storage_id(x.untyped_storage())


@dataclass(frozen=True)
class Regather:
    """A step of the backward: the redistribution of a stored weight, a second time.

    Args:
        operator: the operator whose backward needs the weight first.
    """

    move: Redistribute
    operator: str


def regathered_weights(local_program: LocalProgram) -> dict[int, tuple[Redistribute, ...]]:
    """For each operator, by its index among the instructions, the weights that it saves and that are gathered
    again."""
    if not any(isinstance(i, Redistribute) and i.reshard_after_forward for i in local_program.instructions):
        return {}
    gathers: dict[str, Redistribute] = {}  # name of a gathered weight, or of a view of one -> its gather
    out: dict[int, tuple[Redistribute, ...]] = {}
    for place, (instruction, saved) in enumerate(zip(local_program.instructions, saved_by(local_program))):
        if isinstance(instruction, Redistribute):
            if instruction.reshard_after_forward:
                gathers[instruction.target.name] = instruction
            elif instruction.source.name in gathers and instruction.forward.is_identity:
                gathers[instruction.target.name] = gathers[instruction.source.name]
        elif isinstance(instruction, LocalOp):
            gathers.update((view, gathers[name]) for view, name in saved.views if name in gathers)
            moves = IdentitySet(gathers[name] for name in sorted(saved.values) if name in gathers)
            if moves:
                out[place] = tuple(moves)
    return out


# -- live ranges


class LiveRanges:
    """The live ranges of the tensors of a forward.

    Attributes:
        tensors: all tensors, by name.
        given: names of the tensors that no instruction produces.
        root: tensor -> the tensor in whose memory it lies.
        born: root -> the index of its producer, for each root that an instruction produces.
        read: root -> the last index at which it is produced or consumed; no entry for a given tensor without
            consumers.
    """

    def __init__(
        self, inputs: Iterable[PlacedValue], program: Sequence[Instruction], saved: Sequence[SavedTensors]
    ) -> None:
        self.tensors = {placed.name: placed for placed in inputs}
        self.inputs = frozenset(self.tensors)
        self.root = {name: name for name in self.tensors}
        self.born: dict[str, int] = {}
        self.read: dict[str, int] = {}
        for place, (instruction, found) in enumerate(zip(program, saved)):
            views = dict(found.views)
            if isinstance(instruction, Redistribute) and not instruction.copies:
                views[instruction.target.name] = instruction.source.name
            for name in reads(instruction):
                self.read[self.root.get(name, name)] = place
            for made in made_by(instruction):
                self.tensors[made.name] = made
                root = self.root[made.name] = self.root.get(views.get(made.name, ""), made.name)
                if root not in self.inputs:
                    self.born.setdefault(root, place)
                self.read[root] = place


def waiting(
    backward: Sequence[tuple[int, Instruction]],
    tensors: Mapping[str, PlacedValue],
    begin: Mapping[str, int],
    grows: Callable[[str], bool],
) -> Iterator[tuple[str, int, int]]:
    """Yield the live ranges of a backward's gradients: (tensor, first moment, end), the end not included.

    Args:
        backward: (moment, instruction) in the order in which the instructions' backwards run.
        tensors: by name.
        begin: the gradients that exist from the start -> the moment.
        grows: True for a tensor whose gradient counts.
    """
    waits = dict(begin)
    for at, instruction in backward:
        for made in made_by(instruction):
            if made.name in waits:
                yield made.name, waits.pop(made.name), at + 1
        passes = (
            isinstance(instruction, Redistribute)
            and not instruction.casts
            and not (instruction.backward is not None and instruction.backward.steps)
        )
        for name in reads(instruction):
            if name in tensors and grows(name):
                if not passes:
                    yield name, at, at + 1
                waits.setdefault(name, at + 1)


# -- recomputed regions


@dataclass(frozen=True)
class Region:
    """A part of a program that the backward recomputes. Numbers are indices of `LocalProgram.instructions`.

    Attributes:
        path: the module's path or the operator's name for which recomputation was requested.
        operators: the operators of the user's program in it.
        recompute_set: the instructions that the backward runs, in order.
        internal: those of `recompute_set` that save internal tensors, which are dropped too.
        inputs: names of the tensors that `recompute_set` consumes; another region may have to recompute some of them
            first.
        dropped: names of the tensors that are not saved from the forward for any backward.
        savers: the instructions that save any dropped tensor; the first of their backwards starts the region.
    """

    path: str
    operators: tuple[str, ...]
    recompute_set: tuple[int, ...]
    internal: frozenset[int]
    inputs: tuple[str, ...]
    dropped: frozenset[str]
    savers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: again {self.recompute_set}, internal {sorted(self.internal)}, drop {sorted(self.dropped)}"


@dataclass(frozen=True)
class RecomputedInstruction:
    """A step of the backward: an instruction of the forward, a second time.

    Args:
        operator: the operator whose backward needs it.
    """

    instruction: Instruction
    region: Region
    operator: str


#: A step of the backward: an instruction whose backward runs, or one whose forward runs again.
BackwardStep = Instruction | Regather | RecomputedInstruction


class RegionStarts:
    """The regions that the backward has not begun yet.

    Args:
        regions: all regions of the program.
        instructions: the program's.
    """

    def __init__(self, regions: tuple[Region, ...], instructions: tuple[Instruction, ...]) -> None:
        self.regions, self.instructions = regions, instructions
        self._done: set[int] = set()
        self._savers: dict[int, list[int]] = {}  # instruction -> the regions that its backward begins
        self._dropping: dict[str, list[int]] = {}  # tensor -> the regions that drop it
        for k, region in enumerate(regions):
            for place in region.savers:
                self._savers.setdefault(place, []).append(k)
            for name in region.dropped:
                self._dropping.setdefault(name, []).append(k)

    def before(self, place: int, operator: str) -> list[RecomputedInstruction]:
        """The instructions recomputed before the backward of the instruction at `place`; their regions are then
        begun."""
        out: list[RecomputedInstruction] = []
        for k in self._savers.get(place, ()):
            if k not in self._done:
                self._begin(k, operator, out)
        return out

    def _begin(self, k: int, operator: str, out: list[RecomputedInstruction]) -> None:
        self._done.add(k)
        region = self.regions[k]
        for other in sorted({n for name in region.inputs for n in self._dropping.get(name, ())}):
            if other not in self._done:
                self._begin(other, operator, out)
        out.extend(RecomputedInstruction(self.instructions[i], region, operator) for i in region.recompute_set)


def regions_of(graph: Graph, local_program: LocalProgram) -> tuple[Region, ...]:
    """The regions of a program in the order in which they begin; regions that would drop nothing are left out."""
    marked = {op.name: op.recompute for op in graph.ops if op.recompute is not None}
    return _Regions(marked, local_program).run() if marked else ()


class _Regions:
    def __init__(self, marked: dict[str, Recompute], local_program: LocalProgram) -> None:
        self.marked, self.program, self.instructions = marked, local_program, local_program.instructions
        self.names = [(reads(i), tuple(o.name for o in made_by(i))) for i in self.instructions]
        self.calls: dict[int, list[str]] = {}  # call -> its operators
        for name, recompute in marked.items():
            self.calls.setdefault(recompute.call, []).append(name)
        self.settings = {call: marked[operators[0]] for call, operators in self.calls.items()}
        self.everywhere = {call for call in self.calls if self.settings[call].everywhere or self.single(call)}
        self.inside: list[int | None] = []  # per instruction: the call whose operator it belongs to
        self.member: list[int | None] = []  # per instruction: the call with which it is recomputed
        self.producer: dict[str, int] = {}  # name -> number of its producer
        for i in range(len(self.instructions)):
            self.place(i)
        self.droppable = self.find_droppable()

    def single(self, call: int) -> bool:
        """True where a region is one operator, apart from views."""
        computes = {
            i.operator
            for i in self.instructions
            if isinstance(i, LocalOp)
            and not hands_on(i.target)
            and i.operator in self.marked
            and self.marked[i.operator].call == call
        }
        return len(computes) == 1

    def place(self, i: int) -> None:
        instruction, (read, makes) = self.instructions[i], self.names[i]
        mark = self.marked.get(instruction.operator)
        call = mark.call if mark is not None else None
        member = call
        if isinstance(instruction, LocalOp):
            if mark is not None and mark.keep:
                member = None
        elif mark is not None:
            sends = bool(instruction.forward.collectives)
            if isinstance(instruction, Redistribute) and instruction.cause == "parameter":
                member = call if sends and (mark.parallel_optimizer_comm or instruction.reshard_after_forward) else None
            elif (sends and not mark.mp_comm) or (
                mark.keep and getattr(instruction, "cause", "operator") == "operator"
            ):
                member = None
        if call is None:
            member = self.follows(instruction, read)
        self.inside.append(call if call is not None else member)
        self.member.append(member)
        self.producer.update((name, i) for name in makes)

    def follows(self, instruction: Instruction, read: tuple[str, ...]) -> int | None:
        """The region whose results a redistribution or a view hands on.

        These are dropped with the region's own results where the region drops its results everywhere.
        """
        if (isinstance(instruction, LocalOp) and not hands_on(instruction.target)) or not read:
            return None
        calls = {self.member[self.producer[n]] if n in self.producer else None for n in read}
        call = calls.pop()
        if calls or call is None or call not in self.everywhere:
            return None
        sends = isinstance(instruction, Redistribute) and bool(instruction.forward.collectives)
        return None if sends and not self.settings[call].mp_comm else call

    def find_droppable(self) -> set[str]:
        """Names of the tensors that may be dropped: produced by a member, and consumed only inside the region.

        Consumers outside the region do not matter where the call drops its results everywhere.
        """
        out = {name for i, (_, makes) in enumerate(self.names) if self.member[i] is not None for name in makes}
        out -= {o.name for o in self.program.outputs if isinstance(o, PlacedValue)}
        out -= {i.name for i in self.program.updates.values()}
        for i, (read, _) in enumerate(self.names):
            for name in out.intersection(read):
                call = self.member[self.producer[name]]
                if call not in self.everywhere and self.inside[i] != call:
                    out.discard(name)
        return out

    def run(self) -> tuple[Region, ...]:
        saved = saved_by(self.program)
        needed: dict[int, set[str]] = {call: set() for call in self.calls}
        internal_of: dict[int, set[int]] = {call: set() for call in self.calls}
        saved_at: dict[str, list[int]] = {}  # droppable name -> the instructions that save it
        for i, s in enumerate(saved):
            for name in s.values & self.droppable:
                needed[self.call_of(name)].add(name)
                saved_at.setdefault(name, []).append(i)
            call = self.member[i]
            if s.internal and call is not None and isinstance(self.instructions[i], LocalOp):
                internal_of[call].add(i)
        first: dict[int, int] = {}
        for i, inside in enumerate(self.inside):
            if inside is not None:
                first.setdefault(inside, i)
        out = []
        for call in sorted(first, key=first.__getitem__, reverse=True):
            internal = internal_of[call]
            recompute_set, inputs, waiting = set(internal), set(), list(needed[call])
            waiting += [n for i in internal for n in self.names[i][0]]
            while waiting:
                name = waiting.pop()
                if name in self.droppable and self.call_of(name) == call:
                    if self.producer[name] not in recompute_set or self.producer[name] in internal:
                        more = self.names[self.producer[name]][0] if self.producer[name] not in recompute_set else ()
                        recompute_set.add(self.producer[name])
                        waiting += more
                elif name not in inputs:
                    inputs.add(name)
                    if name in self.droppable:  # produced by another region, which begins earlier
                        needed[self.call_of(name)].add(name)
            if not recompute_set:
                continue
            savers = tuple(sorted(internal.union(*(saved_at.get(name, ()) for name in needed[call]))))
            out.append(
                Region(
                    self.settings[call].path or self.calls[call][0],
                    tuple(self.calls[call]),
                    tuple(sorted(recompute_set)),
                    frozenset(internal),
                    tuple(sorted(inputs)),
                    frozenset(needed[call]),
                    savers,
                )
            )
        return tuple(reversed(out))

    def call_of(self, name: str) -> int:
        call = self.member[self.producer[name]]
        assert call is not None
        return call


def hands_on(target: Callable[..., object]) -> bool:
    """True where an operator's output may lie in the memory of its one input, by its schema."""
    schema = schema_of(target)
    return schema is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


# -- recomputation by a search


def segments_of(graph: Graph) -> dict[str, int]:
    """Operator -> the number of its segment of the program.

    A segment is an outermost numbered module (such as "layers.3"), or the operators between two of them. Consecutive
    segments are joined until each has about √n of the n operators.
    """
    least, number, size, before = math.isqrt(len(graph.ops)), 0, 0, None
    out = {}
    for op in graph.ops:
        parts = op.module.split(".")
        first = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        block = ".".join(parts[: first + 1]) if first is not None else ""
        if block != before and size >= least:
            number, size = number + 1, 0
        before, size = block, size + 1
        out[op.name] = number
    return out


def with_recompute(graph: Graph, names: frozenset[str], segments: Mapping[str, int]) -> Graph:
    """The graph with these operators recomputed in the backward; neighbours within one segment form one region.

    Args:
        names: the operators to recompute.
        segments: operator -> its segment, from `segments_of`.
    """
    calls = 1 + max((op.recompute.call for op in graph.ops if op.recompute is not None), default=-1)
    ops, last = [], None
    for op in graph.ops:
        if op.name not in names:
            last = None
        elif op.recompute is None:
            calls += segments[op.name] != last
            last = segments[op.name]
            op = replace(op, recompute=Recompute(calls - 1, op.name, everywhere=True, mp_comm=False))
        ops.append(op)
    return graph.with_ops(tuple(ops))
