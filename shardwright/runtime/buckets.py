"""From the leaves that a program computes on to the gradients of the parameters: sums over ranks, in buckets.

A program computes on plain leaves that share the storage of the DTensor parameters. Gradients that are to be summed
over the same ranks are laid one after the other into a bucket; when its last one has come the sum is started, and the
backward goes on while it travels. Buckets start in one order on all ranks, and whenever one does those before it take
their next turn (`SumInTurns`); a short one may wait to travel with a conversion. At the end of the backward all are
finished; those that not all gradients have reached, since the loss does not depend on every parameter, are then summed
as they are, which is alike on all ranks as their program is. The gradients handed over are views of the bucket: no copy
is made after the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..layout import Digits, digits_size, group_of
from ..torch_private import at_backward_end, backward_number, local_tensor
from .fusion import Accumulation, Due, Fusion
from .gradients import hand_over, keep_unsummed, take_unsummed, unsummed_over
from .padded import beginning, leaf_of
from .position import Place, waiting
from .process_groups import ProcessGroups
from .scattered import Scatter
from .sums import SumInTurns

__all__ = ["GradientSums"]


class _Bucket:
    """Gradients of one type that are summed over the same ranks.

    Attributes:
        gradients: one entry a parameter, None until it comes.
        missing: how many have not come.
        place: its sum.
        rides: whether a conversion follows with which it may travel.
        dtype: the type of the sum.
    """

    def __init__(self, parameters: list[nn.Parameter], digits: Digits, groups: ProcessGroups, place: Place, rides: bool,
                 dtype: torch.dtype) -> None:
        self.parameters, self.digits, self.place, self.rides, self.dtype = parameters, digits, place, rides, dtype
        self.shapes = [local_tensor(p).shape for p in parameters]
        self.sums = SumInTurns(digits, groups)
        self.clear()

    def clear(self) -> None:
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.missing = len(self.parameters)


class _Sum:
    """The sum of some gradients, under way.

    Args:
        parameters: whose, and their gradients on this rank.
        place: where a rank is in it.
        dtype: the type of the sum.
        rides: as `SumInTurns` has it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], sums: SumInTurns, place: Place,
                 dtype: torch.dtype, rides: bool = False) -> None:
        self.parameters, self.place, self.held = parameters, place, gradients[0].dtype
        gradients = [g.to(dtype) for g in gradients]
        self.shapes = [g.shape for g in gradients]
        self.complex = gradients[0].is_complex()
        flat = [(torch.view_as_real(g) if self.complex else g).reshape(-1) for g in gradients]
        self.sizes = [f.numel() for f in flat]
        self.turns = sums(flat[0] if len(flat) == 1 else torch.cat(flat), rides)
        self.result: Tensor | None = None
        self.turn()

    def turn(self) -> None:
        """One turn further, if it is not at the end."""
        if self.result is None:
            with waiting(self.place):
                self.result = next(self.turns)

    def finish(self, rank: int) -> None:
        """To the end, and the gradients to their parameters."""
        while self.result is None:
            self.turn()
        total = self.result.to(self.held.to_real() if self.complex else self.held)
        parts = total.split(self.sizes) if len(self.sizes) > 1 else (total,)
        for parameter, shape, flat in zip(self.parameters, self.shapes, parts):
            gradient = torch.view_as_complex(flat.view(*shape, 2)) if self.complex else flat.view(shape)
            hand_over(parameter, gradient, rank)


class GradientSums:
    """The leaves of one program, and what becomes of their gradients.

    Args:
        digits: parameter -> over which its gradient is summed once it is complete, in the order in which gradients come;
            those that are not named need no sum.
        groups: the process groups. All ranks must make the sums of a program at the same place.
        types: parameter -> the type of its sum, where that is not its own.
        fusion: which gradients travel together.
        accumulation: whether they are summed in this backward, shared by all programs of a model.
        scattered: of parameters that are stored in parts, what the program itself does with a gradient.
        followed: parameters after whose gradient the backward's next conversion gathers over the ranks of its sum.
    """

    def __init__(self, digits: dict[str, Digits], types: Mapping[str, torch.dtype], groups: ProcessGroups, fusion: Fusion,
                 accumulation: Accumulation, scattered: Sequence[Scatter] = (), followed: Collection[str] = ()) -> None:
        self._digits, self._groups, self._fusion, self._accumulation = digits, groups, fusion, accumulation
        self._types, self._type_of = types, dict[int, torch.dtype]()    # by name; by the parameter's id
        self._scattered, self._followed = scattered, followed
        self._buckets: list[_Bucket] = []
        self._next = 0                    # the bucket that is to start next
        self._backward = -1
        self._travelling: list[_Sum] = []
        for over in dict.fromkeys(digits.values()):
            groups.of(over)

    def leaves(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """A plain leaf on the storage of each DTensor parameter, whose gradients come to the parameter."""
        trained = {name: i for i, name in enumerate(n for n, p in parameters.items() if p.requires_grad)}
        out, due = {}, []
        for name, parameter in parameters.items():
            with torch.no_grad():
                out[name] = leaf_of(parameter)
            out[name].requires_grad_(parameter.requires_grad)
        for name, digits in self._digits.items():
            if name in trained:
                held = out[name].dtype
                dtype = self._type_of[id(parameters[name])] = self._types.get(name, held)
                nbytes = out[name].numel() * dtype.itemsize
                due.append(Due(name, nbytes, (digits, held, dtype), trained[name], digits_size(digits)))
        for names in self._fusion.buckets(due):
            digits = self._digits[names[0]]
            bucket = _Bucket([parameters[n] for n in names], digits, self._groups, self._place(names, digits),
                             names[-1] in self._followed, self._type_of[id(parameters[names[0]])])
            self._buckets.append(bucket)
            for place, name in enumerate(names):
                out[name].register_post_accumulate_grad_hook(partial(self._came, bucket, place))
        for name in trained:
            if name not in self._digits:
                out[name].register_post_accumulate_grad_hook(partial(self._complete, parameters[name]))
        for scatter in self._scattered:
            scatter.attach(parameters[scatter.name], self)
        return out

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay as each rank has them, now."""
        return self._accumulation.open

    def keep(self, parameter: nn.Parameter) -> None:
        """A parameter has a gradient that is still to be summed."""
        self._accumulation.kept[id(parameter)] = parameter

    def note_backward(self) -> None:
        """A gradient has come."""
        if backward_number() != self._backward:
            self._begin()

    def _complete(self, parameter: nn.Parameter, leaf: Tensor) -> None:
        """The hook of a leaf whose gradient needs no sum, or has been kept whole."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            hand_over(parameter, beginning(gradient, local_tensor(parameter).shape), self._groups.rank)

    def _came(self, bucket: _Bucket, place: int, leaf: Tensor) -> None:
        """The hook of a leaf whose gradient is to be summed."""
        gradient, leaf.grad = leaf.grad, None
        self.note_backward()
        bucket.gradients[place] = beginning(gradient, bucket.shapes[place])
        bucket.missing -= 1
        if not bucket.missing and not self._accumulation.open:
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._start(self._buckets[self._next])
                self._next += 1

    def _begin(self) -> None:
        self._backward, self._next = backward_number(), 0
        for bucket in self._buckets:
            bucket.clear()
            if self._travelling:  # since a backward that ended in an error: what is under way still has its memory
                bucket.sums.forget()
        self._travelling.clear()
        at_backward_end(self._finish)

    def _finish(self) -> None:
        """At the end of the backward."""
        self._backward = -1
        if self._accumulation.open:
            for bucket in self._buckets:
                self._keep(bucket)
            return
        for bucket in self._buckets[self._next:]:
            if bucket.missing < len(bucket.parameters):
                self._start(bucket)
        for started in self._travelling:
            started.finish(self._groups.rank)
        self._travelling.clear()
        for parameter in self._accumulation.kept.values():  # another program's, or without a gradient in this backward
            self.sum_kept(parameter)
        self._accumulation.kept.clear()

    def _start(self, bucket: _Bucket) -> None:
        for started in self._travelling:
            started.turn()
        parameters, gradients = bucket.parameters, bucket.gradients
        if bucket.missing:
            parameters = [p for p, g in zip(parameters, gradients) if g is not None]
            gradients = [g for g in gradients if g is not None]
        if self._accumulation.kept:
            gradients = [g + take_unsummed(p) if unsummed_over(p) == bucket.digits else g
                         for p, g in zip(parameters, gradients)]
        self._travelling.append(_Sum(parameters, gradients, bucket.sums, bucket.place, bucket.dtype, bucket.rides))
        bucket.clear()
        bucket.missing = 0

    def _keep(self, bucket: _Bucket) -> None:
        """Each rank's own gradients onto the parameters."""
        for parameter, gradient in zip(bucket.parameters, bucket.gradients):
            if gradient is not None:
                if unsummed_over(parameter) not in (None, bucket.digits):
                    self.sum_kept(parameter)
                keep_unsummed(parameter, gradient, bucket.digits, self._groups.rank)
                self.keep(parameter)
        bucket.clear()

    def sum_kept(self, parameter: nn.Parameter) -> None:
        """Sum a rank's own term by itself, if the parameter still has one."""
        digits = unsummed_over(parameter)
        if isinstance(digits, Scatter):
            hand_over(parameter, digits.part(take_unsummed(parameter)), self._groups.rank)
        elif digits is not None:
            place = self._place(["of a backward under no_sync"], digits)
            dtype = self._type_of.get(id(parameter), parameter.dtype)
            _Sum([parameter], [take_unsummed(parameter)], SumInTurns(digits, self._groups), place, dtype).finish(
                self._groups.rank)

    def _place(self, names: Sequence[str], digits: Digits) -> Place:
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return Place(f"the sum of gradients, {', '.join(names[:2])}{more}",
                     tuple(self._groups.base + r for r in group_of(self._groups.rank, digits)), True)
