"""An operator run whole, and run slice by slice as its rule says: forward, and backward by the convention

    gradient layout of a value = its layout with partial → replicated
    gradient of input i        = partial over `bound.gradient_partial(i)`, to be summed over those digits
    completing a sum           : every rank of the group gets the sum; backward, each term gets the gradient unchanged
    completing a max or min    : the term that holds it gets the gradient (there are no ties here)

Plain arithmetic on lists of slices: nothing of the library's conversions or runtimes is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.graph import SEED, Op, Value, values_in
from shardwright.layout import Digit, Layout, groups
from shardwright.redistribution import Halo
from shardwright.rules import Assignment, Bound, Rule, bound_rule, expand, find_rule
from shardwright.rules.random_operators import run_on_one
from shardwright.rules.registry import local_call


@dataclass(frozen=True)
class Case:
    """One concrete call. `splittable` is how many factors of a size above 1 its rule lets be split."""

    splittable: int
    target: Any
    args: tuple
    kwargs: dict[str, Any]
    values_matter: bool = True

    @property
    def id(self) -> str:
        def message(leaf: Any) -> str:
            return "x".join(map(str, leaf.shape)) or "scalar" if isinstance(leaf, torch.Tensor) else str(leaf)

        reported = [message(leaf) for leaf in pytree.tree_leaves((self.args, self.kwargs))]
        return f"{self.target.__name__}-{'-'.join(reported)}".replace("torch.", "").replace(" ", "")


def collected() -> tuple[list[Case], Callable[..., None]]:
    """A list of cases, and the function that adds to it: ``case(splittable, target, *args, **kwargs)``."""
    cases: list[Case] = []

    def case(splittable: int, target: Any, *args: Any, values_matter: bool = True, **kwargs: Any) -> None:
        cases.append(Case(splittable, target, args, kwargs, values_matter))

    return cases, case


def runs(target: Any, *args: Any, backward: bool = False, **kwargs: Any) -> bool:
    """True where this version of torch takes a call, or has a derivative for it."""
    try:
        results = outputs_of(target(*args, **kwargs))
        if backward:
            torch.autograd.backward(results, [torch.ones_like(x) for x in results], inputs=[args[0]])
            args[0].grad = None
    except RuntimeError:
        return False
    return True


def outputs_of(result: Any) -> list[torch.Tensor]:
    """An operator's outputs as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


class Whole:
    """A call run on whole tensors: its outputs and the gradients of its inputs for a random upstream gradient."""

    def __init__(self, case: Case) -> None:
        leaves = [t for t in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(t, torch.Tensor)]
        self.values = {
            id(t): Value(f"x{i}", tuple(t.shape), t.dtype, t.requires_grad) for i, t in enumerate(dict.fromkeys(leaves))
        }
        self.tensors = {self.values[id(t)].name: t for t in leaves}
        args, kwargs = self.exchange((case.args, case.kwargs), lambda t: self.values[id(t)])
        result = outputs_of(case.target(*case.args, **case.kwargs))
        self.op = Op(
            "op",
            case.target,
            args,
            kwargs,
            values_in((args, kwargs)),
            tuple(Value(f"y{i}", tuple(r.shape), r.dtype, r.requires_grad) for i, r in enumerate(result)),
        )
        self.tensors[SEED.name] = torch.tensor([7, 2, 1, 0])
        if torch.Tag.nondeterministic_seeded in case.target.tags and find_rule(self.op):
            result = run_on_one(self.op, self.tensors)  # random numbers are ours, not torch's
        self.outputs = [r.detach() for r in result]
        generator = torch.Generator().manual_seed(7)
        self.upstream = [
            torch.randn(r.shape, dtype=r.dtype, generator=generator) if r.requires_grad else None for r in result
        ]
        wanted = [t for t in self.tensors.values() if t.requires_grad]
        kept = [(r, g) for r, g in zip(result, self.upstream) if g is not None]
        found = (
            torch.autograd.grad([r for r, _ in kept], wanted, [g for _, g in kept], allow_unused=True)
            if kept and wanted
            else [None] * len(wanted)
        )
        names = [n for n, t in self.tensors.items() if t.requires_grad]
        self.gradients = {n: torch.zeros_like(t) if g is None else g for n, t, g in zip(names, wanted, found)}

    @staticmethod
    def exchange(tree: Any, change) -> Any:
        return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def assignments(bound: Bound, devices: int) -> Iterator[Assignment]:
    """Assignments of the digits of the device number to factors that may be split.

    On four devices: each factor in four, with either digit as the major one; each factor in two, by the digits in turn;
    each two factors in two each, with the digits in turn.
    """
    free = [i for i, f in enumerate(bound.factors) if f.splittable and f.size > 1]
    found: list[dict[int, tuple[Digit, ...]]] = [{}, *({i: (Digit(devices, 1),)} for i in free)]
    if devices == 4:
        major, minor = Digit(2, 2), Digit(2, 1)
        found += [{i: (minor, major)} for i in free]
        found += [{i: ((major, minor)[n % 2],)} for n, i in enumerate(free)]
        found += [
            {i: (major,), j: (minor,)} if (n + m) % 2 else {i: (minor,), j: (major,)}
            for (n, i), (m, j) in combinations(enumerate(free), 2)
        ]
    yield from dict.fromkeys(a for digits in found if bound.is_consistent(a := bound.cut_by(devices, digits)))


def assembled(layout: Layout, slices: list[torch.Tensor], shape: tuple[int, ...], what: str) -> torch.Tensor:
    """The whole tensor of its slices; replicas must agree, and be of the right shape."""
    out = torch.empty(shape, dtype=slices[0].dtype)
    expected, places = layout.local_shape(shape), [layout.slice(shape, rank) for rank in range(len(slices))]
    for rank, local in enumerate(slices):
        assert tuple(local.shape) == expected, f"{what}: rank {rank} holds {tuple(local.shape)}"
        out[places[rank]] = local
    if sum(local.numel() for local in slices) > out.numel():
        for rank, local in enumerate(slices):
            assert close(out[places[rank]], local), f"{what}: replicas differ on rank {rank}"
    return out


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and (torch.equal(a, b) or torch.allclose(a, b, rtol=1e-9, atol=1e-11, equal_nan=True))


def relaid(source: Layout, target: Layout, slices: list[torch.Tensor], value: Value) -> list[torch.Tensor]:
    """A value on all ranks in another layout."""
    if source == target:
        return slices
    whole = assembled(source, slices, value.shape, f"{value} before it is {target}")
    return [whole[target.slice(value.shape, rank)] for rank in range(len(slices))]


def combined(slices: list[torch.Tensor], devices: int, digits, reduction: str = "sum") -> list[torch.Tensor]:
    """Every rank gets the reduction of what its group holds."""
    if not digits:
        return slices
    out = list(slices)
    for group in groups(devices, digits):
        terms = torch.stack([slices[r] for r in group])
        done = terms.sum(0) if reduction == "sum" else terms.amax(0) if reduction == "max" else terms.amin(0)
        for r in group:
            out[r] = done.to(slices[r].dtype)
    return out


def spanned(layout: Layout, halos: tuple[Halo, ...], slices: list[torch.Tensor]):
    """For each group of ranks that differ in the digits of the halos: the ranks with the places of their slices in what
    the group holds together, and the shape of that."""
    digits = [d for halo in halos for d in halo.digits]
    for ranks in groups(layout.devices, digits):
        shape, places = list(slices[0].shape), []
        for halo in halos:
            shape[halo.dim] = halo.size
        for rank in ranks:
            place = [slice(None)] * len(shape)
            for halo in halos:
                part = layout.position(halo.dim, rank)
                place[halo.dim] = slice(part * (halo.size // halo.parts), (part + 1) * (halo.size // halo.parts))
            places.append((rank, tuple(place)))
        yield places, tuple(shape)


def windows_at(layout: Layout, halos: tuple[Halo, ...], rank: int):
    """(dim, place in the dim, place in the window) of the part of a rank's window that lies within the tensor."""
    for halo in halos:
        begin = layout.position(halo.dim, rank) * halo.step - halo.padding
        inside = [j for j in range(halo.length) if 0 <= begin + j < halo.size]
        here = torch.tensor(inside, dtype=torch.int64)
        yield halo.dim, begin + here, here


def haloed(layout: Layout, halos: tuple[Halo, ...], slices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's slice with its halos, from the slices of all."""
    out = list(slices)
    for places, shape in spanned(layout, halos, slices):
        whole = slices[0].new_empty(shape)
        for rank, place in places:
            whole[place] = slices[rank]
        for rank, _ in places:
            window = whole
            for halo, (dim, there, here) in zip(halos, windows_at(layout, halos, rank)):
                wide = list(window.shape)
                wide[dim] = halo.length
                filled = window.new_full(wide, halo.fill)
                filled.index_copy_(dim, here, window.index_select(dim, there))
                window = filled
            out[rank] = window
    return out


def unhaloed(
    layout: Layout, halos: tuple[Halo, ...], gradients: list[torch.Tensor], shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """The gradients of the slices, from those of what each rank reads."""
    out = list(gradients)
    slices = [gradients[0].new_zeros(layout.local_shape(shape))] * len(gradients)
    for places, wide in spanned(layout, halos, slices):
        whole = gradients[0].new_zeros(wide)
        for rank, _ in places:
            window = gradients[rank]
            for dim, there, here in windows_at(layout, halos, rank):
                window = window.index_select(dim, here)
                full = window.new_zeros([*window.shape[:dim], wide[dim], *window.shape[dim + 1 :]])
                window = full.index_add(dim, there, window)
            whole = whole + window
        for rank, place in places:
            out[rank] = whole[place]
    return out


@dataclass
class Held:
    """A value on all ranks: its slices as the operator left them, and completed."""

    layout: Layout
    slices: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.completed = (
            combined(self.slices, self.layout.devices, self.layout.partial, self.layout.reduction)
            if self.layout.partial
            else self.slices
        )


@dataclass
class Ran:
    """A step that ran: what is needed to go back through it."""

    op: Op
    bound: Bound
    assignment: Assignment
    inputs: list[list[torch.Tensor]]  # [rank][input]
    outputs: list[list[torch.Tensor]]  # [rank][output]


class Sliced:
    """The same call run by its rule under one assignment.

    Args:
        keep_open: whether open sums pass through operators that their rule calls linear.
    """

    def __init__(self, whole: Whole, rule: Rule, bound: Bound, assignment: Assignment, keep_open: bool) -> None:
        self.whole, self.devices, self.keep_open = whole, assignment.devices, keep_open
        self.passed = False
        self.reduced: set[str] = set()  # values whose sum, maximum or minimum had to be completed
        self.held: dict[str, Held] = {}
        self.ran: list[Ran] = []
        steps, renamed = expand(whole.op, rule, bound, assignment)
        for op, described, step_bound, step_assignment in steps:
            self.run(op, described, step_bound, step_assignment)
        self.results = [renamed.get(v.name, v) for v in whole.op.outputs]
        self.reduced.update(v.name for v in self.results if self.held[v.name].layout.partial)

    def run(self, op: Op, described: Rule, bound: Bound, assignment: Assignment) -> None:
        held = [self.held.get(v.name) for v in op.inputs]
        opened = {h.layout.partial if h is not None else () for h in held}
        reductions = {h.layout.reduction for h in held if h is not None}
        passing = (
            opened.pop()
            if self.keep_open and len(opened) == 1 and reductions <= {"sum"} and described.is_linear(op)
            else ()
        )
        self.passed |= bool(passing)
        if not passing:
            self.reduced.update(v.name for v, h in zip(op.inputs, held) if h is not None and h.layout.partial)
        local = local_call(op, described, bound, assignment)
        by_value = [self.local_inputs(i, v, held[i], bound, assignment, bool(passing)) for i, v in enumerate(op.inputs)]
        inputs = [[slices[rank] for slices in by_value] for rank in range(self.devices)]
        ran = Ran(op, bound, assignment, inputs, [outputs_of(made) for made in self.calls(local, inputs)])
        self.ran.append(ran)
        for i, value in enumerate(op.outputs):
            layout = bound.output_layout(i, assignment)
            assert layout.reduction == "sum" or not passing
            layout = layout.with_partial((*layout.partial, *passing), layout.reduction)
            slices, shape = [outputs[i].detach() for outputs in ran.outputs], layout.local_shape(value.shape)
            for s in slices:
                assert tuple(s.shape) == shape and s.dtype == value.dtype, (
                    f"{op.target} made {tuple(s.shape)} {s.dtype} where {layout} of {value.shape} was said"
                )
            self.held[value.name] = Held(layout, slices)

    def local_inputs(
        self, i: int, value: Value, held: Held | None, bound: Bound, assignment: Assignment, as_open: bool
    ) -> list[torch.Tensor]:
        """One input on all ranks."""
        layout = bound.input_layout(i, assignment)
        places = [layout.slice(value.shape, rank) for rank in range(self.devices)]
        if held is None:
            whole = self.whole.tensors[value.name].detach()
            local = [whole[place] for place in places]
        else:
            local = [x.detach() for x in (held.slices if as_open else held.completed)]
            if held.layout.is_replicated and not value.requires_grad:  # made from nothing: sliced where it is asked for
                return [x[place] for x, place in zip(local, places)]
            if held.layout.without_partial() != layout:  # laid otherwise by the expansion
                assert not as_open, f"{bound.notation.text}: {held.layout}, not {layout}"
                local = [x.detach() for x in relaid(held.layout.without_partial(), layout, held.completed, value)]
        if halos := bound.halos(i, assignment):
            local = haloed(layout, halos, local)
        return [x.clone().requires_grad_() for x in local] if value.requires_grad else local

    @staticmethod
    def calls(local: Any, inputs: list[list[torch.Tensor]]) -> Iterator[Any]:
        """The results of each rank's call. Values go by position: a value may stand twice, cut in two ways."""
        leaves, spec = pytree.tree_flatten((local.args, local.kwargs))
        for mine in map(iter, inputs):
            args, kwargs = pytree.tree_unflatten([next(mine) if isinstance(x, Value) else x for x in leaves], spec)
            yield local.target(*args, **kwargs)

    def outputs(self) -> list[torch.Tensor]:
        """The outputs, completed and put together."""
        return [
            assembled(self.held[v.name].layout.without_partial(), self.held[v.name].completed, v.shape, str(v))
            for v in self.results
        ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the inputs, put together."""
        totals: dict[str, torch.Tensor] = {}
        arrived: dict[str, list[torch.Tensor]] = {}
        for value, upstream in zip(self.results, self.whole.upstream):
            if upstream is not None:
                layout = self.held[value.name].layout
                arrived[value.name] = [upstream[layout.slice(value.shape, r)] for r in range(self.devices)]
        for ran in reversed(self.ran):
            per_rank = self.back(ran, arrived)
            for i, value in enumerate(ran.op.inputs):
                if not value.requires_grad:
                    continue
                gradients, layout = [grads[i] for grads in per_rank], ran.bound.input_layout(i, ran.assignment)
                if halos := ran.bound.halos(i, ran.assignment):
                    gradients = unhaloed(layout, halos, gradients, value.shape)
                summed = combined(gradients, self.devices, ran.bound.gradient_partial(i, ran.assignment))
                if value.name in self.whole.tensors:
                    total = assembled(layout, summed, value.shape, f"gradient of input {i}")
                    totals[value.name] = totals.get(value.name, 0) + total
                else:
                    summed = relaid(layout, self.held[value.name].layout.without_partial(), summed, value)
                    before = arrived.get(value.name)
                    arrived[value.name] = [a + b for a, b in zip(before, summed)] if before else summed
        return totals

    def back(self, ran: Ran, arrived: dict[str, list[torch.Tensor]]) -> list[list[torch.Tensor | None]]:
        """Each rank's gradients of a step's inputs. Ranks share no tensor that has one, so that one backward of all
        gives each rank its own."""
        into, outs, upstream = [t for inputs in ran.inputs for t in inputs if t.requires_grad], [], []
        for rank, outputs in enumerate(ran.outputs):
            for value, made in zip(ran.op.outputs, outputs):
                if value.name in arrived and made.requires_grad:
                    gradient, held = arrived[value.name][rank], self.held[value.name]
                    if held.layout.reduction != "sum":
                        gradient = gradient * (held.slices[rank] == held.completed[rank])
                    outs.append(made)
                    upstream.append(gradient)
        found = iter(
            torch.autograd.grad(outs, into, upstream, allow_unused=True) if outs and into else [None] * len(into)
        )

        def of_input(tensor: torch.Tensor) -> torch.Tensor:
            gradient = next(found) if tensor.requires_grad else None
            return torch.zeros_like(tensor) if gradient is None else gradient

        return [[of_input(tensor) for tensor in inputs] for inputs in ran.inputs]


def check(case: Case, *counts: int) -> int:
    """Run a case under the assignments of each of these numbers of devices; returns how many cut something.

    Raises:
        AssertionError: whole and sliced differ, with the assignment that shows it.
    """
    whole = Whole(case)
    rule = find_rule(whole.op)
    bound = bound_rule(whole.op, rule)
    cut = 0

    def subject() -> str:
        return f"{bound.notation.text} cut {bound.in_strategy(assignment)} {assignment.digits}"

    for assignment in (found for devices in counts for found in assignments(bound, devices)):
        for keep_open in (True, False):
            sliced = Sliced(whole, rule, bound, assignment, keep_open)
            if case.values_matter:
                for i, (got, want) in enumerate(zip(sliced.outputs(), whole.outputs, strict=True)):
                    assert close(got, want), f"{subject()}: output {i} differs:\n{got}\n{want}"
                for name, got in sliced.gradients().items():
                    want = whole.gradients[name]
                    assert close(got, want), f"{subject()}: gradient of {name} differs:\n{got}\n{want}"
            if not sliced.passed:
                break
        cut += bool(assignment.used)
    return cut
