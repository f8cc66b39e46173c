"""Sums of gradients over ranks, in buckets: from the leaves that a program computes on to the parameters' gradients.

1. Buckets (`GradientSums`). A program computes on plain leaves that share the storage of the DTensor parameters.
   Gradients that are summed over the same ranks are concatenated into a bucket. The sum of a bucket starts when its
   last gradient has come, and the backward goes on while the sum travels. Buckets start in one order on all ranks.
   On Gloo each start gives the buckets before it their next turn, and a short one may wait to travel with a
   redistribution; a library's sum has one turn, which nothing waits for before the end. At the end of the backward all
   sums are finished. A bucket that some gradients have not reached, since the loss does not depend on every parameter,
   is then summed without these, which are the same ones on all ranks. The gradients handed over are views of the
   bucket. Example: gradients [8, 16] and [8] are a bucket of 136 elements, summed once, and then two views of it.

2. Sums in turns (`SumInTurns`): sums that travel while the backward goes on.

    turns = sums(x)      a collective is under way
    next(turns)          None: the collective has ended, and another one is under way; else the sum

3. Unsummed gradients of parameters that are stored in parts (`Scatter`), left by a backward under `no_sync`.

    term      a rank's own gradient of the weight that it computes with: whole, although it is stored as a part
    scatter   the redistribution from terms to parts: most often a reduce-scatter

Outside of `no_sync` a term is scattered as it comes, together with the terms kept before. (From optimizer level 2 on
no term is kept: all are scattered.)

`gradient_tensors` has the gradient tensors themselves; `cost.communication_schedule` has the settings of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...capture.annotations import CUT
from ...cost.communication_schedule import CommunicationSchedule
from ...layout import Digit, Digits, group_of
from ...redistribution import Redistribution, digits_value, redistribution
from ...redistribution.redistribution_search import refine
from ...torch_private import at_backward_end, backward_number, local_tensor, spec_of
from ..optimizer_guard import Accumulation
from ..profile_ranges import ISSUE, UNSUMMED, WAIT, bucket_text, range_of
from ..second_derivatives import refuse_graph
from . import collectives as transport
from .collectives import Bound, arrangements, begin_scatter, bind_all, reduce_in_place, reduced, rings
from .dtensors import as_dtensor, beginning, leaf_of
from .gradient_tensors import Unsummed, hand_over, keep_unsummed, take_unsummed, unsummed_over
from .process_groups import Group, ProcessGroups, Rider
from .rank_positions import WaitPoint, waiting
from .requested_gradients import note_leaf

__all__ = ["GradientSums", "Scatter", "SumInTurns"]

#: Takes a complete gradient of a parameter.
Hand = Callable[[nn.Parameter, Tensor], None]


class Scatter:
    """The reduction of one parameter's gradient on this rank: a term in, the part out.

    Args:
        name: of the parameter.
        scatter: the redistribution.
        shape: of a term.
        groups: this rank's process groups.
        parameter_dtype: the dtype of the parameter, in which terms are kept.
        sums: the dtype in which terms are summed.
        keeps: True where terms stay unsummed under `no_sync`; False where each is scattered at once.
        message: number of the message of the schedule with which it travels while the backward goes on; None: it is
            waited for at once.

    Attributes:
        overlap: the parts of a reduce-scatter that travels with a message; None without one.
    """

    def __init__(
        self,
        name: str,
        scatter: Redistribution,
        shape: tuple[int, ...],
        groups: ProcessGroups,
        parameter_dtype: torch.dtype,
        sums: torch.dtype,
        keeps: bool = True,
        message: int | None = None,
    ) -> None:
        self.message = message
        self.name, self.scatter, self._rank, self._keeps = name, scatter, groups.rank, keeps
        self._parameter_dtype, self._sums_in = parameter_dtype, sums
        whole, part = scatter.source.without_partial(), scatter.target
        self._steps = bind_all(scatter, shape, groups.rank, groups)
        self._place = bind_all(redistribution(whole, part), shape, groups.rank, groups)
        self._replica_digits = common(scatter.source.partial, part.replicas)
        self._parameter: nn.Parameter | None = None
        self._sums: GradientSums | None = None
        self.overlap = None if message is None else _Overlap.of(scatter, shape, groups)

    @staticmethod
    def fits(scatter: Redistribution) -> bool:
        """True where a part has a place in terms; False where digits of mixed radices overlap, as 2@3 and
        2@1·3@2 do."""
        return refine(scatter.source, scatter.target) is not None

    def attach(self, parameter: nn.Parameter, sums: GradientSums) -> None:
        """Set the parameter, and the sums of the program's gradients."""
        self._parameter, self._sums = parameter, sums

    def __call__(self, term: Tensor) -> Tensor | None:
        """The part; None where the term is kept."""
        parameter, sums = self._parameter, self._sums
        assert parameter is not None and sums is not None
        sums.note_backward()
        if self._keeps and sums.accumulates:
            self._keep(term.to(self._parameter_dtype))
            return None
        if unsummed_over(parameter) == self:
            term = take_unsummed(parameter) + term
        if self.overlap is not None:
            sums.scatter(self, term.to(self._sums_in))
            return sums.nothing(parameter)
        return self.part(term)

    def take(self, part: Tensor, hand: Hand) -> None:
        """Hand over the part that the overlapped scatter has received."""
        assert self._parameter is not None and self.overlap is not None
        hand(self._parameter, self.overlap.arranged(part).to(self._parameter_dtype))

    def part(self, term: Tensor) -> Tensor:
        """The rank's part of the sum of all terms."""
        term = term.to(self._sums_in)
        for step in self._steps:
            term = step(term)
        return term.to(self._parameter_dtype)

    def include(self, term: Tensor, part: Tensor) -> None:
        """Add a part that was summed already to its place in a term; where several ranks have the part, only the first
        adds it."""
        if not digits_value(self._replica_digits, self._rank):
            for step in self._place:
                term = step(term)
            term.add_(part)

    def _keep(self, term: Tensor) -> None:
        parameter, sums = self._parameter, self._sums
        assert parameter is not None and sums is not None
        if unsummed_over(parameter) == self:
            local_tensor(parameter.grad).add_(term)
            return
        sums.sum_unsummed(parameter)  # a term of another program, over other ranks
        term = term.clone(memory_format=torch.contiguous_format)
        if parameter.grad is not None:
            self.include(term, local_tensor(parameter.grad))
        unsummed = Unsummed(term, spec_of(parameter), requires_grad=False)
        unsummed.digits = self
        parameter.grad = unsummed
        sums.keep(parameter)

    def finish(self) -> None:
        """Wait for the message that it travels with, if the message is under way."""
        if self._sums is not None and self.message is not None:
            self._sums.finish(self.message)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scatter) and (self.name, self.scatter) == (other.name, other.scatter)

    def __hash__(self) -> int:
        return hash((self.name, self.scatter))


class _Overlap(NamedTuple):
    """The parts of a scatter that is one reduce-scatter, possibly with a sum over further replicas after it.

    Attributes:
        group: the ranks.
        pieces: term -> what is sent to the ranks, one after the other.
        arranged: what is received -> part.
        further: the ranks over which the part is then summed; None: none.
    """

    group: Group
    pieces: Bound
    arranged: Bound
    further: Group | None

    @classmethod
    def of(cls, scatter: Redistribution, shape: tuple[int, ...], groups: ProcessGroups) -> _Overlap:
        """The parts of a scatter, alone or with a sum over further replicas."""
        first, *more = scatter.steps
        further = groups.seen(more[0].digits) if more else None
        return cls(groups.seen(first.digits), *arrangements(first.geometry(tuple(shape))), further)


class _ScatterBucket:
    """The scatters of one message.

    Attributes:
        number: of the message.
        scatters: the scatters.
        terms: one entry a scatter, None until it comes.
        started: True once the terms are under way in this backward.
    """

    def __init__(self, number: int, scatters: list[Scatter], place: WaitPoint, text: str) -> None:
        self.number, self.scatters, self.place, self.text = number, scatters, place, text
        self.clear()

    def clear(self) -> None:
        """Begin a backward."""
        self.terms: list[Tensor | None] = [None] * len(self.scatters)
        self.started = False

    def begin(self) -> _ScatterSum | None:
        """The sum of the terms that have come, under way; None: none has."""
        came = [(s, t) for s, t in zip(self.scatters, self.terms) if t is not None]
        self.terms, self.started = [None] * len(self.scatters), True
        return _ScatterSum(self.number, came, self.place, self.text) if came else None


class _ScatterSum:
    """Reduce-scatters of several gradients as one, under way.

    Args:
        number: of the message.
        came: the scatters and their terms.
        place: the wait point.
        text: its name in a profile.
    """

    def __init__(self, number: int, came: Sequence[tuple[Scatter, Tensor]], place: WaitPoint, text: str) -> None:
        self.number, self.text = number, text
        first = came[0][0].overlap
        assert first is not None
        n, self._scatters, self._place = first.group.size, [scatter for scatter, _ in came], place
        pieces = [s.overlap.pieces(t).view(n, -1) for s, t in came if s.overlap is not None]
        self._sizes = [p.shape[1] for p in pieces]
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        self._further = first.further
        with waiting(place), range_of(text + ISSUE):
            self._out, self._work = begin_scatter(first.group, flat.reshape(-1))

    @property
    def follows(self) -> bool:
        """True where the parts are still to be summed over further replicas."""
        return self._further is not None

    def turn(self) -> None:
        """Wait for the scatter, and issue the sum over further replicas, if one is to follow."""
        if self._further is not None:
            with waiting(self._place), range_of(self.text + WAIT):
                self._work.wait()
                self._work, self._further = reduce_in_place(self._further, self._out), None

    def finish(self, hand: Hand) -> None:
        """Wait for the sum, and hand the parts over."""
        self.turn()
        with waiting(self._place), range_of(self.text + WAIT):
            self._work.wait()
        for scatter, part in zip(self._scatters, self._out.split(self._sizes)):
            scatter.take(part, hand)


def common(first: Digits, second: Digits) -> Digits:
    """The digits that two sets of digits share."""
    out = []
    for a in first:
        for b in second:
            low, high = max(a.stride, b.stride), min(a.span, b.span)
            if low < high:
                assert high % low == 0, (first, second)
                out.append(Digit(high // low, low))
    return tuple(out)


# -- sums in turns


class SumInTurns:
    """Sums over the ranks that differ in `digits`, one after the other, each in turns; between two turns a
    collective is under way. Ranks that share groups take the turns of all their sums in one order."""

    def __init__(self, digits: Digits, groups: ProcessGroups) -> None:
        self._group, self._scratch = groups.seen(digits), groups.scratch

    def __call__(self, x: Tensor, rides: bool = False) -> Iterator[Tensor | None]:
        """The sum of all ranks' `x`: None for each turn, and the sum at the end. `x` is written to, and may become the
        sum.

        Args:
            x: this rank's term, flat and not complex.
            rides: True where an all-gather over the same ranks is likely to come before the next turn: a short sum
                travels with it.
        """
        group, n, numel = self._group, self._group.size, len(x)
        host = group.through_memory(x)
        if host is not None:
            yield None  # other ranks may not have come here yet
            yield host.all_reduce(x, "sum", x)
        elif not group.exchanges or rings(n, x):
            work = dist.all_reduce(x, group=group.group, async_op=True)
            yield None
            work.wait()
            yield x
        elif n == 2:
            memory, counts = self._scratch.take(numel, x), [0, 0]
            received, counts[1 - group.position] = memory[:numel], numel
            work = group.group.alltoall_base(received, x, counts, counts)
            yield None
            work.wait()
            x.add_(received)
            self._scratch.give(memory)
            yield x
        elif n * x.nbytes <= transport.GATHERED_TERMS:
            yield from self._gathered(x, rides)
        else:
            yield from self._scattered(x)

    def _gathered(self, x: Tensor, rides: bool) -> Iterator[Tensor | None]:
        """The sum in one exchange: the terms of all ranks, summed here."""
        group, n = self._group, self._group.size
        if rides and not group.riders:
            rider = Rider(x)
            group.riders.append(rider)
            yield None
            if rider.terms is not None:
                yield reduced(rider.terms, "sum")
                return
            group.riders.remove(rider)
        copies = torch.cat((x,) * n)
        memory = self._scratch.take(len(copies), x)
        terms = memory[: len(copies)]
        work = group.group.alltoall_base(terms, copies, [], [])
        yield None
        work.wait()
        total = reduced(terms.view(n, -1), "sum")
        self._scratch.give(memory)
        yield total

    def _scattered(self, x: Tensor) -> Iterator[Tensor | None]:
        """The sum in two exchanges: a piece of the sum here, then the pieces of all ranks."""
        group, n, numel = self._group, self._group.size, len(x)
        whole = torch.cat((x, x.new_zeros(-numel % n))) if numel % n else x
        memory = self._scratch.take(len(whole), x)
        terms = memory[: len(whole)]
        work = group.group.alltoall_base(terms, whole, [], [])
        yield None
        work.wait()
        piece, received = reduced(terms.view(n, -1), "sum"), whole  # `whole` has been sent: its memory is free
        if received.nbytes <= transport.GATHERED_COPIES:
            copies = torch.cat((piece,) * n, out=terms)
            work = group.group.alltoall_base(received, copies, [], [])
        else:
            work = transport.all_gather_single(received, piece.contiguous(), group=group.group, async_op=True)
        yield None
        work.wait()
        self._scratch.give(memory)
        yield received[:numel]

    def forget(self) -> None:
        """Discard, after an error, the sums that wait to travel with others."""
        self._group.riders.clear()


class _Bucket:
    """Gradients of one dtype that are summed over the same ranks.

    Attributes:
        gradients: one entry a parameter, None until it comes.
        missing: the number of gradients that have not come.
        place: the wait point of its sum.
        text: its name in a profile.
        rides: True where a redistribution follows that the sum may travel with.
        dtype: of the sum.
        waits: True where its sum is waited for at once.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        digits: Digits,
        groups: ProcessGroups,
        place: WaitPoint,
        rides: bool,
        dtype: torch.dtype,
        text: str,
        waits: bool,
    ) -> None:
        self.parameters, self.digits, self.place, self.rides, self.dtype = parameters, digits, place, rides, dtype
        self.text, self.waits = text, waits
        self.shapes = [local_tensor(p).shape for p in parameters]
        self.sums = SumInTurns(digits, groups)
        self.clear()

    def clear(self) -> None:
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.missing = len(self.parameters)


class _Sum:
    """The sum of some gradients, under way.

    Args:
        parameters: the parameters.
        gradients: their gradients on this rank.
        sums: makes the sum.
        place: the wait point of the sum.
        dtype: of the sum.
        text: its name in a profile.
        rides: as in `SumInTurns`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        sums: SumInTurns,
        place: WaitPoint,
        dtype: torch.dtype,
        text: str,
        rides: bool = False,
    ) -> None:
        self.parameters, self.place, self.text, self.dtype = parameters, place, text, gradients[0].dtype
        gradients = [g.to(dtype) for g in gradients]
        self.shapes = [g.shape for g in gradients]
        self.complex = gradients[0].is_complex()
        flat = [(torch.view_as_real(g) if self.complex else g).reshape(-1) for g in gradients]
        self.sizes = [f.numel() for f in flat]
        self.turns = sums(flat[0] if len(flat) == 1 else torch.cat(flat), rides)
        self.result: Tensor | None = None
        self.turn(ISSUE)

    def turn(self, part: str = WAIT) -> None:
        """Take one turn, unless the sum is finished."""
        if self.result is None:
            with waiting(self.place), range_of(self.text + part):
                self.result = next(self.turns)

    def finish(self, hand: Hand) -> None:
        """Take all remaining turns, and hand the gradients over to their parameters."""
        while self.result is None:
            self.turn()
        total = self.result.to(self.dtype.to_real() if self.complex else self.dtype)
        parts = total.split(self.sizes) if len(self.sizes) > 1 else (total,)
        for parameter, shape, flat in zip(self.parameters, self.shapes, parts):
            gradient = torch.view_as_complex(flat.view(*shape, 2)) if self.complex else flat.view(shape)
            hand(parameter, gradient)


class GradientSums:
    """The leaves of one program, and the sums of their gradients.

    Args:
        digits: parameter -> the digits over which its gradient is summed once it is complete, in the order in which
            gradients come; parameters that are not named need no sum.
        types: parameter -> the dtype of its sum, where that is not its own.
        groups: the process groups. All ranks must construct the sums of a program at the same point.
        schedule: the buckets of gradients, and where messages are waited for.
        accumulation: the state of `no_sync`, shared by all programs of a model.
        scattered: a `Scatter` for each parameter stored in parts whose gradient the program itself reduces.
        followed: parameters after whose gradient the backward's next redistribution gathers over the ranks of its
            sum.
    """

    def __init__(
        self,
        digits: dict[str, Digits],
        types: Mapping[str, torch.dtype],
        groups: ProcessGroups,
        schedule: CommunicationSchedule,
        accumulation: Accumulation,
        scattered: Sequence[Scatter] = (),
        followed: Collection[str] = (),
    ) -> None:
        self._digits, self._groups, self._schedule, self._accumulation = digits, groups, schedule, accumulation
        self._types, self._type_of = types, dict[nn.Parameter, torch.dtype]()  # by name; by parameter
        self._scattered, self._followed = scattered, followed
        self._buckets: list[_Bucket] = []
        self._next = 0  # the bucket that is to start next
        self._backward = -1
        self._travelling: list[_Sum | _ScatterSum] = []
        self._scatter_buckets: dict[int, _ScatterBucket] = {}
        for over in dict.fromkeys(digits.values()):
            groups.of(over)

    def leaves(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """A plain leaf on the storage of each DTensor parameter, by name. Gradients of the leaves are handed
        over to the parameters."""
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        out = {}
        for name, parameter in parameters.items():
            with torch.no_grad():
                out[name] = leaf_of(as_dtensor(parameter))
            note_leaf(out[name].requires_grad_(parameter.requires_grad), parameter, self)
        summed = {name for name in trained if name in self._digits}
        for name in summed:
            self._type_of[parameters[name]] = self._types.get(name, out[name].dtype)
        for number, message in self._schedule.of("sum"):
            names = [member.name for member in message.members if member.name in summed]
            if not names:
                continue
            bucket = _Bucket(
                [parameters[n] for n in names],
                message.digits,
                self._groups,
                self._place(names, message.digits),
                names[-1] in self._followed,
                self._type_of[parameters[names[0]]],
                bucket_text(number, message),
                message.wait < self._schedule.end,
            )
            self._buckets.append(bucket)
            for place, name in enumerate(names):
                out[name].register_post_accumulate_grad_hook(partial(self._came, bucket, place))
        for name in trained:
            if name not in self._digits:
                out[name].register_post_accumulate_grad_hook(partial(self._complete, parameters[name]))
        together: dict[int, list[Scatter]] = {}
        for scatter in self._scattered:
            scatter.attach(parameters[scatter.name], self)
            if scatter.message is not None:
                together.setdefault(scatter.message, []).append(scatter)
        for number, scatters in together.items():
            digits = self._schedule.messages[number].digits
            wait = self._place([s.name for s in scatters], digits)
            text = bucket_text(number, self._schedule.messages[number])
            self._scatter_buckets[number] = _ScatterBucket(number, scatters, wait, text)
        return out

    def scatter(self, scatter: Scatter, term: Tensor) -> None:
        """Note a term of a scatter that travels while the backward goes on; a block's terms travel together."""
        assert scatter.message is not None
        bucket = self._scatter_buckets[scatter.message]
        place = next(k for k, each in enumerate(bucket.scatters) if each is scatter)
        if bucket.started:  # a second gradient of one backward
            self._travelling.append(_ScatterSum(bucket.number, [(scatter, term)], bucket.place, bucket.text))
            return
        earlier = bucket.terms[place]
        bucket.terms[place] = term if earlier is None else earlier + term
        if all(t is not None for t in bucket.terms):
            self._begin_scatters(bucket)

    def _begin_scatters(self, bucket: _ScatterBucket) -> None:
        for other in self._schedule.early.get(bucket.number, ()):
            self.finish(other)
        begun = bucket.begin()
        if begun is not None:
            self._travelling.append(begun)
            if not self._schedule.messages[bucket.number].apart:
                self.finish(bucket.number)

    def finish(self, number: int) -> None:
        """Wait for a message of scatters, if it is under way. A sum that follows is issued."""
        for started in [s for s in self._travelling if isinstance(s, _ScatterSum) and s.number == number]:
            if started.follows:
                started.turn()
                continue
            self._travelling.remove(started)
            started.finish(self.hand)

    def hand(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Hand a complete gradient over to its parameter."""
        hand_over(parameter, beginning(gradient, local_tensor(parameter).shape), self._groups.rank)

    def nothing(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that autograd is given where the real one is under way."""
        return None

    @property
    def accumulates(self) -> bool:
        """True while gradients stay unsummed."""
        return self._accumulation.open

    @property
    def waits(self) -> bool:
        """True where gradients of an earlier backward are still to be summed."""
        return bool(self._accumulation.unsummed)

    def keep(self, parameter: nn.Parameter) -> None:
        """Note a parameter whose gradient is still to be summed."""
        self._accumulation.unsummed[parameter] = None

    def note_backward(self) -> None:
        """Note that a gradient has come, possibly the first of a backward."""
        if backward_number() != self._backward:
            self._begin()

    def _complete(self, parameter: nn.Parameter, leaf: Tensor) -> None:
        """Hand over the gradient of a leaf that needs no sum, or has been kept whole; a hook of the leaf."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            if gradient.requires_grad:
                refuse_graph(str(getattr(parameter, CUT, "")))
            self.hand(parameter, gradient)

    def _came(self, bucket: _Bucket, place: int, leaf: Tensor) -> None:
        """Put the gradient of a leaf into its bucket; a hook of the leaf."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:  # nothing of the loss comes here, as often in a second derivative
            return
        if gradient.requires_grad:
            refuse_graph(str(getattr(bucket.parameters[place], CUT, "")))
        self.note_backward()
        bucket.gradients[place] = beginning(gradient, bucket.shapes[place])
        bucket.missing -= 1
        if not bucket.missing and not self._accumulation.open:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start(self._buckets[self._next])
                self._next += 1

    def _clear(self) -> None:
        """Empty the buckets. Where an earlier backward ended in an error, sums under way keep their memory."""
        for bucket in self._buckets:
            bucket.clear()
            if self._travelling:
                bucket.sums.forget()
        self._travelling.clear()
        for scatters in self._scatter_buckets.values():
            scatters.clear()

    def _begin(self) -> None:
        self._backward, self._next = backward_number(), 0
        self._clear()
        at_backward_end(self._finish)

    def _finish(self) -> None:
        """Start and finish the remaining sums at the end of the backward."""
        self._backward = -1
        for scatters in self._scatter_buckets.values():
            if not scatters.started:
                self._begin_scatters(scatters)
        if self._accumulation.open:
            self._finish_travelling()
            for bucket in self._buckets:
                self._keep(bucket)
            return
        for bucket in self._buckets[self._next :]:
            if bucket.missing < len(bucket.parameters):
                self._start(bucket)
        self._finish_travelling()
        for parameter in self._accumulation.unsummed:  # of another program, or without a gradient in this backward
            self.sum_unsummed(parameter)
        self._accumulation.unsummed.clear()

    def _finish_travelling(self) -> None:
        for started in self._travelling:
            if isinstance(started, _ScatterSum):
                started.turn()
        for started in self._travelling:
            started.finish(self.hand)
        self._travelling.clear()

    def _start(self, bucket: _Bucket) -> None:
        if self._groups.exchanges:
            for started in self._travelling:
                started.turn()
        parameters = [p for p, g in zip(bucket.parameters, bucket.gradients) if g is not None]
        gradients = [g for g in bucket.gradients if g is not None]
        if self._accumulation.unsummed:
            gradients = [
                g + take_unsummed(p) if unsummed_over(p) == bucket.digits else g for p, g in zip(parameters, gradients)
            ]
        made = _Sum(parameters, gradients, bucket.sums, bucket.place, bucket.dtype, bucket.text, bucket.rides)
        bucket.clear()
        bucket.missing = 0
        if bucket.waits:
            made.finish(self.hand)
        else:
            self._travelling.append(made)

    def _keep(self, bucket: _Bucket) -> None:
        """Put each rank's own gradients onto the parameters, unsummed."""
        for parameter, gradient in zip(bucket.parameters, bucket.gradients):
            if gradient is not None:
                if unsummed_over(parameter) not in (None, bucket.digits):
                    self.sum_unsummed(parameter)
                keep_unsummed(parameter, gradient, bucket.digits, self._groups.rank)
                self.keep(parameter)
        bucket.clear()

    def sum_unsummed(self, parameter: nn.Parameter) -> None:
        """Sum a rank's own term by itself, where the parameter still has one."""
        digits = unsummed_over(parameter)
        if isinstance(digits, Scatter):
            self.hand(parameter, digits.part(take_unsummed(parameter)))
        elif digits is not None:
            place = self._place(["kept under no_sync"], digits)
            dtype = self._type_of.get(parameter, parameter.dtype)
            sums, term = SumInTurns(digits, self._groups), take_unsummed(parameter)
            _Sum([parameter], [term], sums, place, dtype, UNSUMMED).finish(self.hand)

    def _place(self, names: Sequence[str], digits: Digits) -> WaitPoint:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return WaitPoint(
            f"the sum of gradients, {', '.join(names[:2])}{more}, in the backward,",
            tuple(self._groups.base + r for r in group_of(self._groups.rank, digits)),
            True,
        )
