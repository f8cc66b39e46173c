"""Collectives of a library in two parts, issued and waited for where the schedule of communication says
(`cost.communication_schedule`), and those of a compiled program, whose compiler puts them in order.

1. Weights of one message (`BlockGather`): the parts of several weights are gathered as one. In the forward the nodes
   `IssuedGather` and `WaitedGather` stand in the program, and each weight takes its share of what was received:

    issue_0 = issue(w1, w2)   …   parts = wait(issue_0)   …   w1 gathered = convert(w1, parts)

2. The same in the backward (`GatherAgain`). A backward asks for weights one by one, in an order that is known: the
   schedule says at which weight each message is issued.
   In a pipeline, weights that micro-batches share are gathered once a step (`GatherOnce`), in front of the first
   forward, which waits for them.
3. Other redistributions (`SplitRedistribute`). Each half is an autograd function. Autograd calls them in the opposite
   order, so the second half issues the transpose and the first half waits for it:

    forward     issue: start          wait: receive
    backward    wait:  start back     issue: receive back

   A backward that is differentiated again (create_graph=True) sends its gradient in one piece, at the second half.

4. A compiled program has parts of its own.

   Regathers (`regathered_in_backward`): the gather of a weight that is not saved for the backward. It is a
   checkpointed region whose results must be recomputed: the compiler's partitioner then puts the gather into the
   backward, too.

   Sums of gradients inside the graph (`BoundSum`, `SumsEnd`). The backward of a `BoundSum` starts the sum of one
   parameter's gradient and does not wait; the backward of the `SumsEnd`, through which all these parameters pass
   first, comes last, and waits for all of them:

    forward     parameters -> SumsEnd -> BoundSum of each -> operators
    backward    operators -> each sum starts as its gradient comes -> all are waited for

   Nothing may read a sum before: autograd would, to cast a sum in another dtype than the parameter's. A gradient that
   is scattered to the ranks that store the parameter in parts (`late_scatter`) goes the same way. Each gradient travels
   by itself: the compiler's own passes may put several into one message.

   Gathers ahead (`gathers_ahead`). The compiler puts a gather that runs again in front of its first use, and waits at
   once. A pass over each graph, forward and backward, issues it one block ahead:

    before      gather B, wait B, compute B, gather A, wait A, compute A
    after       gather B, gather A, wait B, compute B, wait A, compute A
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...redistribution import CollectiveKind, Geometry, Redistribution, RedistributionStep
from ...torch_private import (
    CHECKPOINT_LOGGER,
    OpOverload,
    at_backward_end,
    functional_all_gather,
    functional_all_reduce,
    functional_reduce_scatter,
    functional_wait,
)
from ..profile_ranges import BACKWARD, ISSUE, WAIT, named_when_profiled
from ..redistribution_functions import RedistributionFunction
from ..second_derivatives import refuse_graph
from .collectives import (
    Bound,
    arrangements,
    begin_exchange,
    begin_gather,
    begin_reduce,
    begin_scatter,
    bind,
    permuted_sizes,
)
from .process_groups import Group, ProcessGroups
from .rank_positions import WaitPoint, noted

__all__ = [
    "BlockGather",
    "BoundSum",
    "GatherAgain",
    "GatherOnce",
    "IssuedGather",
    "IssuedHalf",
    "SplitRedistribute",
    "SplitSteps",
    "StepOfGather",
    "SumsEnd",
    "WaitedGather",
    "WaitedHalf",
    "WeightOfBlock",
    "gathers_ahead",
    "late_scatter",
    "options_ahead",
    "regathered_in_backward",
    "taken",
]

# -- issued and waited for


def at(place: WaitPoint | None, run: Callable[[Any], object], text: str) -> Callable[[Any], Any]:
    """A function that is at a wait point while it runs, and has a name in a profile; None: at none, and without one."""
    return run if place is None else noted((named_when_profiled(run, text),), place)[0]


# -- weights


class WeightOfBlock(NamedTuple):
    """A weight of a `BlockGather`.

    Attributes:
        dtype: in which it is gathered.
        pieces: part -> what is sent to all ranks.
        arranged: what is received -> the weight.
        alone: part -> the weight, by a gather of its own.
        numel: elements of a part.
        name: of the parameter.
    """

    dtype: torch.dtype
    pieces: Bound
    arranged: Bound
    alone: Bound
    numel: int
    name: str

    def of(self, part: Tensor) -> Tensor:
        """The weight, from its share of what a `BlockGather` has received."""
        return self.arranged(part.reshape(-1).view(self.dtype))


#: The tensor that a gather under way receives, and its work; None in a program that torch.compile traces.
Begun = tuple[Tensor, Any]


class BlockGather:
    """The all-gathers of several weights as one.

    Args:
        group: the ranks.
        members: the weights, in the order of the message.
        place: the wait point; None in a program that torch.compile traces.
        text: its name in a profile.
    """

    def __init__(self, group: Group, members: Sequence[WeightOfBlock], place: WaitPoint | None, text: str) -> None:
        self.members, self.place, self.text, self._group = tuple(members), place, text, group
        # Autocast casts some weights of a block: then all travel as bytes.
        self._as_bytes = len({m.dtype for m in members}) > 1
        self._sizes = [m.numel * (m.dtype.itemsize if self._as_bytes else 1) for m in members]

    def begin(self, stored: Sequence[Tensor]) -> Begun:
        """Issue the gather of the weights' parts on this rank."""
        with torch.no_grad():
            pieces = [m.pieces(x.detach().to(m.dtype)) for m, x in zip(self.members, stored)]
            if self._as_bytes:
                pieces = [p.view(torch.uint8) for p in pieces]
            sent = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            if torch.compiler.is_compiling():
                return functional_all_gather(sent, self._group.size, self._group.name), None
            return begin_gather(self._group, sent)

    def parts(self, begun: Begun) -> tuple[Tensor, ...]:
        """Wait for the gather. The share of each weight."""
        received, work = begun
        if work is None:
            received = functional_wait(received)
        else:
            work.wait()
        return received.view(self._group.size, -1).split(self._sizes, 1)


class IssuedGather(nn.Module):
    """The node that issues a gather."""

    def __init__(self, gather: BlockGather) -> None:
        super().__init__()
        self._begin = at(gather.place, gather.begin, gather.text + ISSUE)

    def forward(self, *stored: Tensor) -> Begun:
        return self._begin(stored)

    __call__ = forward  # skips `nn.Module.__call__`: there are no hooks


class WaitedGather(nn.Module):
    """The node that waits for a gather."""

    def __init__(self, gather: BlockGather) -> None:
        super().__init__()
        self._parts = at(gather.place, gather.parts, gather.text + WAIT)

    def forward(self, begun: Begun) -> tuple[Tensor, ...]:
        return self._parts(begun)

    __call__ = forward


class _Taken(torch.autograd.Function):
    """A weight from its share of what was received; its gradient goes to the stored part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor, weight: WeightOfBlock, backward: Sequence[Bound]) -> Tensor:
        ctx.steps, ctx.weight = backward, weight.name
        return weight.of(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_graph(ctx.weight)
        for step in ctx.steps:
            gradient = step(gradient)
        return gradient, None, None, None


def taken(x: Tensor, part: Tensor, weight: WeightOfBlock, backward: Sequence[Bound]) -> Tensor:
    """A weight from its share of what was received.

    Args:
        x: its part on this rank, which takes the gradient.
        part: the share.
        weight: the weight.
        backward: gradient of the weight -> gradient of `x`.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _Taken.apply(x, part, weight, backward)
    return weight.of(part)


class GatherAgain:
    """The gathers of several weights as one, in a backward.

    A weight that is not under way is gathered by itself: in a second backward of one graph, say.

    Args:
        gather: the weights.
        before: called before it is issued: waits for what the schedule says.
        ends: True where the end of a backward frees what it has not asked for; False: the caller does (`forget`).

    Attributes:
        stored: the weights' parts on this rank, as the latest forward was given them.
        begins: number of a weight -> the gathers to issue when the backward asks for it.
    """

    def __init__(self, gather: BlockGather, before: Callable[[], None], ends: bool = True) -> None:
        self._ends = ends
        self.stored: dict[int, Tensor] = {}
        self.begins: dict[int, list[GatherAgain]] = {}
        self._members, self._before = gather.members, before
        self._issue = at(gather.place, gather.begin, gather.text + ISSUE)
        self._receive = at(gather.place, gather.parts, gather.text + WAIT)
        self._begun: Begun | None = None
        self._parts: dict[int, Tensor] = {}

    def take(self, index: int, stored: Tensor) -> Tensor:
        """A weight that the backward asks for, from its part on this rank."""
        for other in self.begins.get(index, ()):
            other.begin()
        if self._begun is not None:
            self._parts, self._begun = dict(enumerate(self._receive(self._begun))), None
        part = self._parts.pop(index, None)
        weight = self._members[index]
        return weight.alone(stored) if part is None else weight.of(part)

    def begin(self) -> None:
        """Issue the gather."""
        if len(self.stored) < len(self._members):  # a forward without some of them
            return
        self._before()
        self._begun, self._parts = self._issue([self.stored[k] for k in range(len(self._members))]), {}
        if self._ends:
            at_backward_end(self.forget)

    def forget(self) -> None:
        """Wait for what the backward has not asked for, and free it."""
        if self._begun is not None:
            self._receive(self._begun)
        self._begun, self._parts = None, {}


class GatherOnce:
    """The gathers of several weights as one, for all micro-batches of a step.

    Args:
        gather: the weights.
        names: of their parameters.
        ahead: True where it is issued in front of the first forward.
    """

    def __init__(self, gather: BlockGather, names: Sequence[str], ahead: bool) -> None:
        self.names, self._members, self._ahead = tuple(names), gather.members, ahead
        self._issue = at(gather.place, gather.begin, gather.text + ISSUE)
        self._receive = at(gather.place, gather.parts, gather.text + WAIT)
        self._stored: Sequence[Tensor] = ()
        self._leaves: Sequence[Tensor] = ()
        self._begun: Begun | None = None

    def begin(self, stored: Sequence[Tensor]) -> Sequence[Tensor]:
        """Begin a step. Leaves of the weights are returned, which are empty until the gather has ended.

        Args:
            stored: the weights' parts on this rank.
        """
        self._stored, self._begun = stored, None
        self._leaves = [
            torch.empty(0, dtype=weight.dtype, device=part.device, requires_grad=part.requires_grad)
            for weight, part in zip(self._members, stored)
        ]
        if self._ahead:
            self.issue()
        return self._leaves

    def issue(self) -> None:
        """Issue the gather, once a step."""
        if self._begun is None and self._leaves:
            self._begun = self._issue(self._stored)

    def arrive(self) -> None:
        """Wait for the gather, once a step."""
        if not self._leaves:
            return
        self.issue()
        assert self._begun is not None
        with torch.no_grad():
            for leaf, weight, part in zip(self._leaves, self._members, self._receive(self._begun)):
                leaf.data = weight.of(part)
        self._stored, self._leaves, self._begun = (), (), None


class StepOfGather(nn.Module):
    """The node that issues a `GatherOnce`, or waits for it."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()
        self._step = step

    def forward(self) -> None:
        self._step()

    __call__ = forward


# -- other redistributions


class SplitSteps:
    """The steps of a redistribution on one rank, on a library, in two parts: up to the first collective, which is
    issued, and from its end on.

    Args:
        steps, shape, groups: as `bind_all` takes them; None: no steps.
        place: the wait point; None: there is no collective.
        dies: True where the only step is an all-reduce, and nothing reads its input later.

    Attributes:
        sends: True where there is a collective.

    Raises:
        LayoutError: a dim that its cut does not divide.
    """

    def __init__(
        self,
        steps: Redistribution | None,
        shape: tuple[int, ...],
        groups: ProcessGroups,
        place: WaitPoint | None,
        dies: bool = False,
    ) -> None:
        rank, self.place = groups.rank, place
        each = () if steps is None or 0 in shape else steps.steps
        shapes = () if steps is None else steps.local_shapes(tuple(shape))
        first = next((k for k, step in enumerate(each) if step.communicates), len(each))
        bound = [bind(step, before, rank, groups) for step, before in zip(each, shapes)]
        self._before, self._after = bound[:first], bound[first + 1 :]
        self.sends = first < len(each)
        self._empty = tuple(shapes[-1]) if shapes and 0 in shape else None
        if self.sends:
            geometry = each[first].geometry(tuple(shapes[first]))
            self._pieces, self._arranged = arrangements(geometry)
            issue: Callable[..., tuple[Tensor, Any]] = BEGINNINGS[each[first].pattern](
                each[first], geometry, rank, groups
            )
            self._issue = partial(issue, dies=True) if dies else issue

    def begin(self, x: Tensor) -> tuple[Tensor, Any]:
        """Issue the first collective: what is received, and its work; without one, the result."""
        for step in self._before:
            x = step(x)
        return self._issue(self._pieces(x)) if self.sends else (x, None)

    def end(self, begun: tuple[Tensor, Any]) -> Tensor:
        """Wait for the first collective, and take the further steps."""
        x, work = begun
        if work is not None:
            work.wait()
            x = self._arranged(x)
        for step in self._after:
            x = step(x)
        return x if self._empty is None else x.new_empty(self._empty)


#: A collective of each kind on a library, under way: (step, its geometry, rank, process groups) -> a function from the
#: flat pieces to what is received, and the work.
BEGINNINGS: dict[
    CollectiveKind,
    Callable[[RedistributionStep, Geometry, int, ProcessGroups], Callable[[Tensor], tuple[Tensor, object]]],
] = {
    CollectiveKind.ALL_REDUCE: lambda step, geometry, rank, groups: partial(
        begin_reduce, groups.seen(step.digits), reduction=step.reduction
    ),
    CollectiveKind.ALL_GATHER: lambda step, geometry, rank, groups: partial(begin_gather, groups.seen(step.digits)),
    CollectiveKind.REDUCE_SCATTER: lambda step, geometry, rank, groups: partial(
        begin_scatter, groups.seen(step.digits), reduction=step.reduction
    ),
    CollectiveKind.ALL_TO_ALL: lambda step, geometry, rank, groups: partial(begin_exchange, groups.seen(step.digits)),
    CollectiveKind.PERMUTE: lambda step, geometry, rank, groups: _beginning_permute(
        groups.seen(step.digits), permuted_sizes(step, geometry, rank)
    ),
}


def _beginning_permute(
    group: Group, sizes: tuple[tuple[int, ...], tuple[int, ...]]
) -> Callable[[Tensor], tuple[Tensor, object]]:
    return lambda x: begin_exchange(group, x, *sizes)


class _Halves:
    """The two halves of one redistribution in one call: what is under way, in the forward and in the backward; and the
    gradient that a backward has sent in one piece, since it is differentiated again."""

    __slots__ = ("back", "again", "under_way")

    def __init__(self) -> None:
        self.under_way: Any = None
        self.back: Any = None
        self.again: Tensor | None = None


def _differentiated_again() -> bool:
    """True in a backward with create_graph=True."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: SplitRedistribute, halves: _Halves) -> Tensor:
        ctx.move, ctx.halves = move, halves
        halves.under_way = move.begin(x)
        return x.new_empty(0)  # carries autograd's edge to the other half

    @staticmethod
    def backward(ctx: Any, edge: Tensor) -> tuple[Tensor | None, ...]:
        if _differentiated_again():
            sent, ctx.halves.again = ctx.halves.again, None
            return sent, None, None
        under_way, ctx.halves.back = ctx.halves.back, None
        return ctx.move.end_back(under_way), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: Tensor, move: SplitRedistribute, halves: _Halves) -> Tensor:
        ctx.move, ctx.halves = move, halves
        under_way, halves.under_way = halves.under_way, None
        y = move.end(under_way)
        return y if move.sends else y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if _differentiated_again():
            move: SplitRedistribute = ctx.move
            steps = (torch.clone, move.send_back), (torch.clone, move.send)  # which may write to their input
            ctx.halves.again = RedistributionFunction.apply(gradient, *steps)
        else:
            ctx.halves.back = ctx.move.begin_back(gradient)
        return gradient.new_empty(0), None, None


class SplitRedistribute:
    """A redistribution in two parts.

    Args:
        forward: the steps of the forward.
        back: those of the backward.
        label: for the text of the program.
        text: its name in a profile.
    """

    def __init__(self, forward: SplitSteps, back: SplitSteps, label: str, text: str) -> None:
        self.sends, self.label = forward.sends, label
        self.begin = at(forward.place, forward.begin, text + ISSUE)
        self.end = at(forward.place, forward.end, text + WAIT)
        self.begin_back = at(back.place, back.begin, text + BACKWARD + ISSUE)
        self.end_back = at(back.place, back.end, text + BACKWARD + WAIT)
        #: Both directions in one piece.
        self.send: Bound = lambda x: self.end(self.begin(x))
        self.send_back: Bound = lambda gradient: self.end_back(self.begin_back(gradient))


class IssuedHalf(nn.Module):
    """The node that issues a redistribution. Its result goes to the node that waits."""

    def __init__(self, move: SplitRedistribute) -> None:
        super().__init__()
        self.move = move

    def forward(self, x: Tensor) -> tuple[Tensor | None, _Halves]:
        halves = _Halves()
        if x.requires_grad and torch.is_grad_enabled():
            return _Issue.apply(x, self.move, halves), halves
        halves.under_way = self.move.begin(x)
        return None, halves

    __call__ = forward

    def extra_repr(self) -> str:
        return self.move.label


class WaitedHalf(nn.Module):
    """The node that waits for a redistribution."""

    def __init__(self, move: SplitRedistribute) -> None:
        super().__init__()
        self.move = move

    def forward(self, issued: tuple[Tensor | None, _Halves]) -> Tensor:
        edge, halves = issued
        if edge is not None:
            return _Wait.apply(edge, self.move, halves)
        under_way, halves.under_way = halves.under_way, None
        return self.move.end(under_way)

    __call__ = forward

    def extra_repr(self) -> str:
        return self.move.label


# -- compiled programs


# The only operators of these regions are those of a gather: none is in place.
logging.getLogger(CHECKPOINT_LOGGER).addFilter(lambda record: "context_fn is passed" not in record.getMessage())


def _recompute_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _recompute_all)


def regathered_in_backward(gather: Callable[..., object], *stored: Tensor) -> Any:
    """The gathered weight, or the weights of a block, which a compiled backward gathers again.

    All of the gather is one region: what goes from a region to another is saved.
    """
    return checkpoint(gather, *stored, use_reentrant=False, context_fn=_contexts)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.dtype = name, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return functional_all_reduce(gradient.to(ctx.dtype).contiguous(), "sum", ctx.group), None, None


class BoundSum(nn.Module):
    """A parameter whose gradient is summed over a group; the sum is not waited for.

    Args:
        group: the ranks.
        dtype: of the sum.
    """

    def __init__(self, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.dtype = group.name, dtype

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(x, self.name, self.dtype)


def late_scatter(steps: Redistribution, shape: tuple[int, ...], groups: ProcessGroups) -> Bound | None:
    """A reduce-scatter of a gradient that is not waited for; None where the redistribution is another one, or its
    result has to be rearranged.

    Args:
        steps: from terms of the gradient to the slices in which the parameter is stored.
        shape: of a term.
        groups: this rank's process groups.
    """
    if [step.pattern for step in steps.steps] != [CollectiveKind.REDUCE_SCATTER]:
        return None
    step = steps.steps[0]
    geometry, group = step.geometry(tuple(shape)), groups.seen(step.digits)
    if geometry.post_perm is not None or 0 in shape:
        return None

    def scatter(x: Tensor) -> Tensor:
        if geometry.pre_view is not None and geometry.pre_perm is not None:
            x = x.reshape(geometry.pre_view).permute(geometry.pre_perm)
        return functional_reduce_scatter(x.reshape(-1), step.reduction, group.size, group.name).view(geometry.after)

    return scatter


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = tuple(x.dtype for x in parameters)
        return tuple(x.view_as(x) for x in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *sums: Tensor) -> tuple[Tensor, ...]:
        return tuple(functional_wait(x).to(dtype) for x, dtype in zip(sums, ctx.dtypes))


class SumsEnd(nn.Module):
    """The parameters of all `BoundSum` and `late_scatter`, whose sums are waited for once all of them have started."""

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return _End.apply(*parameters)


# -- gathers ahead

_MOVES = ("_to_copy", "_unsafe_view", "cat", "clone", "constant_pad_nd", "convert_element_type")


def gathers_ahead(graph: torch.fx.Graph) -> None:
    """Issue each gather of a graph's own inputs in front of the wait for the one before it.

    The inputs are the stored weights, and in a backward what the forward has saved.

    Args:
        graph: of a forward or a backward, without autograd. It is changed in place.
    """
    before: torch.fx.Node | None = None
    for wait in [n for n in graph.nodes if n.target is functional_wait.default]:
        gather = wait.all_input_nodes[0]
        chain = _chain(gather) if gather.target is functional_all_gather.default else None
        if chain is None:
            continue
        if before is not None:
            order = {node: place for place, node in enumerate(graph.nodes)}
            for node in sorted((n for n in chain if order[n] > order[before]), key=order.__getitem__):
                before.prepend(node)
        before = wait


def _chain(gather: torch.fx.Node) -> set[torch.fx.Node] | None:
    """A gather, and the nodes that make what it sends; None where these do more than move and cast inputs."""
    chain, due = set[torch.fx.Node](), [gather]
    while due:
        node = due.pop()
        if node.op == "placeholder" or node in chain:
            continue
        if node is not gather and not _moves(node.target):
            return None
        chain.add(node)
        due += node.all_input_nodes
    return chain


def _moves(target: object) -> bool:
    """True for an operator that moves or casts elements: a view, a copy, a concatenation."""
    return isinstance(target, OpOverload) and (target.is_view or target.overloadpacket.__name__ in _MOVES)


@cache
def options_ahead() -> dict[str, object]:
    """The options of inductor with which gathers travel ahead. Its own search for less memory would bring them back."""
    from ...torch_private import CustomGraphPass  # noqa: PLC0415  loads the compiler

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            gathers_ahead(graph)

        def uuid(self) -> str:  # inductor keeps what it has compiled, until this file changes
            return Path(__file__).read_text()

    return {"post_grad_custom_post_pass": Pass(), "reorder_for_peak_memory": False}
