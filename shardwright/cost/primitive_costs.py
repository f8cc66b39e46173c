"""Primitive costs: seconds of one collective, and flops and bytes of one operator.

1. Collectives (`collective_lines`): the time is that of the quickest of ring, tree and hierarchical algorithms, by
   latency and bandwidth of the levels. Let n ranks take part, each with m bytes of its own; g_1 · g_2 ⋯ = n of them
   in the levels crossed, from the inside out; α_l the latency of level l and β_l its seconds per byte, both of one
   device. On one level, with L = ⌈log2 g⌉:

                     ring, or pairs                  tree
    reduce_scatter   (g-1) α + (g-1)/g m β           L α + (g-1)/g m β        halving
    all_gather       (g-1) α + (g-1) m β             L α + (g-1) m β          doubling
    all_reduce       both of them: 2 (g-1) α + …     L α + L m β              doubling of the whole
    all_to_all       (g-1) α + (g-1)/g m β           L α + L/2 m β            Bruck
    permute          pieces α + m β                  -
    halo_exchange    pieces α + h β                  -                        h: the elements sent, to `pieces` ranks

A flat ring over several levels runs at the pace of its slowest link: α = max α_l, β = max β_l. A hierarchical
reduce_scatter goes from the inside out, and m shrinks to m / g_l on the way; an all_gather goes back in; an
all_reduce is both around an all_reduce of the outer levels, or one all_reduce of all m on each level. The costs of the
levels add up.

An all_to_all brings all of m to its place in stages. A stage is of one level or of several neighbouring ones, and the
cheapest division into stages is taken. The ranks of a stage exchange in pairs: Σ_l (g_l - 1) g_1 ⋯ g_(l-1) (α_l + m/n
β_l), with n and the product over the levels of the stage. A stage of one level may use Bruck's algorithm instead.

On a level of bandwidth B that D devices share, all groups communicate at once: β = D / B. Only one link in p = g_1 ⋯
g_(l-1) of a flat ring is of level l: β = max(D / p, 1) / B. There a ring may be the quickest: its links of all levels
are in use at once, those of a hierarchical collective in turn.

Example: an all_reduce of m bytes on one level of g = 4: ring 6 α + 1.5 m β, tree 2 α + 2 m β, halving and doubling 4
α + 1.5 m β. The ring is never the quickest here, and the tree is the quickest for m < 4 α / β.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J.
of High Performance Computing Applications 19(1), 2005: ring, recursive doubling and halving, pairwise exchange,
Bruck's algorithm. For numbers of ranks that are no powers of two, in L rounds too: A. Bar-Noy, S. Kipnis, B.
Schieber, "An Optimal Algorithm for Computing Census Functions in Message-Passing Systems", Parallel Processing
Letters 3(1), 1993 (all_reduce); J. L. Träff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms",
arXiv:2410.14234, 2024.

For each algorithm the time is a straight line a + b m; the least line is the price. Additions of received terms, and
copies that join pieces, are not counted.

2. Operators (`work_of`): torch is asked, by one call on tensors without values and of whole shapes.

    flops(local)    = flops(whole) · Π over factors of (local size / whole size)
    bytes forward   = inputs + outputs
    bytes backward  = gradients of outputs + saved inputs and outputs + gradients of inputs

Flops are those of torch's own registry (torch.utils.flop_counter), for every operator that is dispatched, forward and
backward. The flops of a product are linear in each of its factors, so the flops of a slice follow from the rule's
notation. An operator that launches nothing, such as a view, costs nothing. No operator is described here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from ..cluster import Cluster
from ..errors import RuleError
from ..graph import Op, Value, key_of, map_values
from ..layout import Digits
from ..redistribution import CollectiveKind
from ..rules import bound_rule, find_rule
from ..rules.matmul import FLOPS
from ..torch_private import TorchDispatchMode, pytree, schema_of, storage_id

__all__ = ["LevelLink", "Line", "OperatorWork", "collective_lines", "links_of", "signature", "work_of"]

#: (seconds, seconds a byte of a rank's own input).
Line = tuple[float, float]


@dataclass(frozen=True)
class LevelLink:
    """A level that a group crosses, as seen by one of its devices while all groups communicate.

    Attributes:
        size: the number of units of the level below.
        latency: seconds.
        each: seconds per byte where every device sends over it.
        alone: seconds per byte where one device sends over it.
    """

    size: int
    latency: float
    each: float
    alone: float


def links_of(cluster: Cluster, devices: int, digits: Digits) -> tuple[LevelLink, ...]:
    """The levels that a group of ranks which differ in `digits` crosses, from the inside out.

    Args:
        devices: the number of the cluster's devices in use.
    """
    out = []
    for i, (level, units) in enumerate(zip(cluster.levels, cluster.units(digits))):
        if units > 1:
            users = min(cluster.below(i), devices) if level.shared else 1
            out.append(LevelLink(units, level.latency, users / level.bandwidth, 1 / level.bandwidth))
    return tuple(out)


def _rounds(size: int) -> int:
    """⌈log2 size⌉."""
    return (size - 1).bit_length()


def _to_neighbours(links: Sequence[LevelLink]) -> list[Line]:
    """Each rank sends m to the next one, all at once."""
    n, slowest = 1, 0.0
    for link in links:
        slowest = max(slowest, link.alone, link.each / n)  # one in n devices sends to another unit
        n *= link.size
    return [(max(k.latency for k in links), slowest)]


def _ring(links: Sequence[LevelLink]) -> Line:
    """A flat ring: each rank sends 1/n of m, n-1 times."""
    n, (latency, slowest) = _size(links), _to_neighbours(links)[0]
    return (n - 1) * latency, (n - 1) / n * slowest


def _size(links: Sequence[LevelLink]) -> int:
    out = 1
    for link in links:
        out *= link.size
    return out


def _reduce_scatter(links: Sequence[LevelLink]) -> list[Line]:
    if not links:
        return [(0.0, 0.0)]
    link, outer = links[0], _reduce_scatter(links[1:])
    inside = (_rounds(link.size) * link.latency, (link.size - 1) / link.size * link.each)
    return _least([_ring(links), *((inside[0] + a, inside[1] + b / link.size) for a, b in outer)])


def _all_gather(links: Sequence[LevelLink]) -> list[Line]:
    n = _size(links)
    return [(a, b * n) for a, b in _reduce_scatter(links)]  # a reduce_scatter in reverse, of m · n bytes


def _all_reduce(links: Sequence[LevelLink]) -> list[Line]:
    if not links:
        return [(0.0, 0.0)]
    link, outer = links[0], _all_reduce(links[1:])
    ring, rounds = _ring(links), _rounds(link.size)
    whole = (rounds * link.latency, rounds * link.each)
    halves = (2 * rounds * link.latency, 2 * (link.size - 1) / link.size * link.each)
    return _least(
        [
            (2 * ring[0], 2 * ring[1]),
            *((whole[0] + a, whole[1] + b) for a, b in outer),
            *((halves[0] + a, halves[1] + b / link.size) for a, b in outer),
        ]
    )


def _all_to_all(links: Sequence[LevelLink]) -> list[Line]:
    """The levels fall into stages, each of neighbouring levels; the times of the stages add up."""
    best: list[list[Line]] = [[(0.0, 0.0)]]  # of the first levels: none, one, two, ...
    for end in range(1, len(links) + 1):
        best.append(
            _least(
                [
                    (a + c, b + d)
                    for begin in range(end)
                    for a, b in best[begin]
                    for c, d in _exchanges(links[begin:end])
                ]
            )
        )
    return best[-1]


def _exchanges(links: Sequence[LevelLink]) -> list[Line]:
    """An all_to_all in one stage: in pairs, or by Bruck's algorithm where it is one level."""
    n, inside, latency, seconds = _size(links), 1, 0.0, 0.0
    for link in links:
        partners = (link.size - 1) * inside
        latency, seconds = latency + partners * link.latency, seconds + partners / n * link.each
        inside *= link.size
    if len(links) > 1:
        return [(latency, seconds)]
    rounds = _rounds(links[0].size)
    return [(latency, seconds), (rounds * links[0].latency, rounds / 2 * links[0].each)]


def _permute(links: Sequence[LevelLink]) -> list[Line]:
    return [(max(k.latency for k in links), max(k.each for k in links))]


#: The lines of each kind. A send and a recv have each the time of the whole transfer.
LINES: dict[CollectiveKind, Callable[[Sequence[LevelLink]], list[Line]]] = {
    CollectiveKind.SLICE: lambda links: [(0.0, 0.0)],
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
    CollectiveKind.PERMUTE: _permute,
    CollectiveKind.HALO_EXCHANGE: _to_neighbours,
    CollectiveKind.HALO_REDUCE: _to_neighbours,
    CollectiveKind.SEND: _permute,
    CollectiveKind.RECV: _permute,
}


def collective_lines(kind: CollectiveKind, links: Sequence[LevelLink], pieces: int = 1) -> tuple[Line, ...]:
    """The times of a collective as lines over the bytes of a rank's own input; of an exchange of halos, over the bytes
    that it sends.

    One line for each algorithm that is the quickest for some size.

    Args:
        links: from `links_of`.
        pieces: the number of ranks to which a permute or an exchange of halos sends, one after the other.
    """
    return tuple((a * pieces, b) for a, b in LINES[kind](links)) if links else ((0.0, 0.0),)


def _least(lines: Sequence[Line]) -> list[Line]:
    """The lines that are below all others for some number of bytes >= 0; the line of the least latency first."""
    out: list[Line] = []
    for a, b in sorted(set(lines)):
        if out and b >= out[-1][1] * (1 - 1e-12):  # a difference by rounding does not count
            continue
        while len(out) > 1 and _meet(out[-2], (a, b)) <= _meet(out[-2], out[-1]):
            out.pop()  # where it becomes better than its predecessor, the new line is better still
        out.append((a, b))
    return out


def _meet(first: Line, second: Line) -> float:
    """The bytes from which on the second line, the flatter one, is below the first."""
    return (second[0] - first[0]) / (first[1] - second[1])


# -- operators


@dataclass(frozen=True)
class OperatorWork:
    """The flops and bytes of an operator, for any shapes of its slices.

    Attributes:
        dtype: the dtype it computes in: that of its first floating input, or output.
        launched: True where the forward launches anything; the same for the backward.
        flops: multiplications and additions of the whole operator, forward and backward.
        dims: (index of an input, or -1 - index of an output; dim; whole size): each factor of the operator once.
        in_bytes, out_bytes: bytes per element, by input and output.
        saved_inputs, saved_outputs: indices of those that the backward reads.
        gradients: indices of the inputs that get a gradient; none where no gradient flows.
        gradient_outputs: indices of the outputs from which a gradient comes.
    """

    dtype: str
    launched: tuple[bool, bool]
    flops: tuple[float, float]
    dims: tuple[tuple[int, int, int], ...]
    in_bytes: tuple[int, ...]
    out_bytes: tuple[int, ...]
    saved_inputs: tuple[int, ...]
    saved_outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    gradient_outputs: tuple[int, ...]

    def local(
        self, in_shapes: Sequence[tuple[int, ...]], out_shapes: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """((flops, bytes) forward, (flops, bytes) backward) on slices of these shapes.

        Args:
            in_shapes, out_shapes: one a tensor; trailing inputs that are not read may be missing.
        """
        part = 1.0
        if any(self.flops):
            for index, dim, whole in self.dims:
                shapes = out_shapes if index < 0 else in_shapes
                index = -1 - index if index < 0 else index
                if index < len(shapes):
                    part *= shapes[index][dim] / whole
        ins = [math.prod(shape) * size for shape, size in zip(in_shapes, self.in_bytes)]
        outs = [math.prod(shape) * size for shape, size in zip(out_shapes, self.out_bytes)]
        forward = sum(ins) + sum(outs) if self.launched[0] else 0
        backward = 0
        if self.launched[1]:
            backward = sum(ins[i] for i in (*self.saved_inputs, *self.gradients) if i < len(ins)) + sum(
                outs[i] for i in (*self.saved_outputs, *self.gradient_outputs)
            )
        return (self.flops[0] * part, forward), (self.flops[1] * part, backward)


def signature(op: Op) -> tuple[Hashable, ...]:
    """A key that is equal for two operators with the same work."""
    called: Hashable = key_of((op.args, op.kwargs), lambda x: _described(x) if type(x) is Value else x)
    try:
        hash(called)
    except TypeError:  # an argument that cannot be looked up, such as a slice
        called = str(map_values((op.args, op.kwargs), _described))
    return (
        op.target,
        called,
        tuple([_described(v) for v in op.inputs]),
        tuple([v and _described(v) for v in op.outputs]),
    )


def _described(value: Value) -> tuple[object, ...]:
    return value.shape, value.dtype, value.requires_grad


class _Watch(TorchDispatchMode):
    """Counts the flops of all dispatched operators, and records whether anything is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.launched = 0.0, False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.launched |= not getattr(func, "is_view", False) and func is not torch.ops.aten.detach.default
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        elif func.name() in FLOPS:
            self.flops += FLOPS[func.name()](*args, **kwargs)
        return out


def work_of(op: Op) -> OperatorWork:
    """The flops and bytes of an operator."""
    outputs = [v for v in op.outputs if v is not None]
    dtypes = [v.dtype for v in (*op.inputs, *outputs)]
    dtype = next((d for d in dtypes if d.is_floating_point or d.is_complex), torch.float32)
    sizes = tuple(v.dtype.itemsize for v in op.inputs), tuple(v.dtype.itemsize for v in outputs)
    gradients = tuple(i for i, v in enumerate(op.inputs) if v.requires_grad)
    from_outputs = tuple(i for i, v in enumerate(outputs) if v.requires_grad) if gradients else ()
    gradients = gradients if from_outputs else ()
    name = str(dtype).removeprefix("torch.")
    tried = _tried(op, outputs, gradients, from_outputs)
    if tried is None:  # it runs on tensors with values only; the bytes of its inputs and outputs are still known
        described, every = find_rule(op), tuple(range(len(op.inputs)))
        moves = bool(outputs) and not (described is not None and described.view)
        return OperatorWork(
            name, (moves, moves and bool(gradients)), (0.0, 0.0), (), *sizes, every, (), gradients, from_outputs
        )
    launched, flops, saved = tried
    return OperatorWork(name, launched, flops, _dims(op) if any(flops) else (), *sizes, *saved, gradients, from_outputs)


#: One operator's dispatch: (launched, flops, indices of saved inputs and outputs); the first two forward and backward.
_Dispatched = tuple[tuple[bool, bool], tuple[float, float], tuple[tuple[int, ...], tuple[int, ...]]]

#: Recent dispatches by signature, because other plans have most of the same operators; None: the call failed.
_LATELY: OrderedDict[tuple[Hashable, ...], _Dispatched | None] = OrderedDict()
_MOST = 4096


def _tried(
    op: Op, outputs: list[Value], gradients: tuple[int, ...], from_outputs: tuple[int, ...]
) -> _Dispatched | None:
    """The dispatch of an operator; None where it does not run without values."""
    key = signature(op) if schema_of(op.target) is not None else None  # a target outside torch may keep a model alive
    if key is not None and key in _LATELY:
        _LATELY.move_to_end(key)
        return _LATELY[key]
    try:
        found = _dispatched(op, outputs, gradients, from_outputs)
    except (
        Exception
    ):  # an operator that needs values may raise anything; `work_of` then counts the bytes of inputs and outputs
        found = None
    if key is not None:
        _LATELY[key] = found
        if len(_LATELY) > _MOST:
            _LATELY.popitem(last=False)
    return found


def _dispatched(op: Op, outputs: list[Value], gradients: tuple[int, ...], from_outputs: tuple[int, ...]) -> _Dispatched:
    """The dispatch of an operator on tensors without values."""
    inputs = [
        torch.empty(v.shape, dtype=v.dtype, device="meta").requires_grad_(i in gradients)
        for i, v in enumerate(op.inputs)
    ]
    feed = iter(inputs)  # `inputs` are the values among the arguments, in call order
    args, kwargs = map_values((op.args, op.kwargs), lambda _: next(feed))
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.detach())  # kept alive, because memory is identified by its address
        return x

    forward, backward = _Watch(), _Watch()
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x), forward:
        made = op.target(*args, **kwargs)
    results = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)][: len(outputs)]
    if gradients:
        ends = [results[i] for i in from_outputs if results[i].requires_grad]
        grads = [torch.empty_like(x) for x in ends]
        if ends:
            with backward:
                torch.autograd.grad(ends, [inputs[i] for i in gradients], grads, allow_unused=True)
    places = set(map(_memory, packed))
    saved_inputs = tuple(i for i, x in enumerate(inputs) if _memory(x) in places)
    read = set(map(_memory, inputs))
    saved_outputs = tuple(i for i, x in enumerate(results) if _memory(x) in places - read)
    return (forward.launched, backward.launched), (forward.flops, backward.flops), (saved_inputs, saved_outputs)


def _memory(x: Tensor) -> int:
    return storage_id(x.untyped_storage())


def _dims(op: Op) -> tuple[tuple[int, int, int], ...]:
    """For each factor of the operator that may be cut, one dim of an input or output that carries it, by the rule."""
    described = find_rule(op)
    if described is None:
        return ()
    try:
        bound = bound_rule(op, described)
    except RuleError:
        return ()
    sides = [(-1 - i, dims, shape) for i, (dims, shape) in enumerate(zip(bound.outputs, bound.out_shapes))]
    sides += [(i, dims, shape) for i, (dims, shape) in enumerate(zip(bound.inputs, bound.in_shapes))]
    found = [(index, d, shape[d], factors) for index, dims, shape in sides for d, factors in enumerate(dims)]
    out = []
    covered: set[int] = set()
    for index, d, size, factors in sorted(found, key=lambda f: len(f[3])):
        if size > 1 and any(bound.factors[f].splittable for f in factors) and not covered.intersection(factors):
            covered.update(factors)
            out.append((index, d, size))
    return tuple(out)
