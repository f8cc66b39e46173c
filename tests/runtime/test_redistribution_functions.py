"""The autograd function of redistributions: a gradient, and a gradient of a gradient. Exchanges of halos: in one
process by lists and by one tensor, and on Gloo ranks, against windows of the whole tensor; and the elements that ranks
send.
"""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from ranks import run_ranks
from torch import Tensor

import shardwright as sw
from shardwright.layout import Digit, Layout
from shardwright.redistribution import Halo, Window, halo_exchange, halo_reduce
from shardwright.runtime.distributed import collectives
from shardwright.runtime.distributed.collectives import bind_all
from shardwright.runtime.distributed.process_groups import ProcessGroups
from shardwright.runtime.local.shards import Axes, assemble, convert_shards, scatter
from shardwright.runtime.redistribution_functions import RedistributionFunction, exchanging


def test_a_gradient_of_a_gradient_runs_the_forward_again() -> None:
    """The steps' factors tell which steps have run: 2 the forward, 3 its transpose."""
    x = torch.ones(3, requires_grad=True)
    y = RedistributionFunction.apply(x, (lambda t: t * 2,), (lambda t: t * 3,))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(first, torch.full((3,), 12.0))  # 2 * 2 * 3
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, torch.full((3,), 12.0))  # 2 the forward again, 2 of the square, 3 the transpose
    with pytest.raises(sw.SettingError, match="gradient of the parameter 'weight' is a sum over ranks"):
        torch.autograd.grad(RedistributionFunction.apply(x, (), (), "weight").sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(RedistributionFunction.apply(x, (), (lambda t: t * 3,)).sum(), x)
    assert torch.equal(plain, torch.full((3,), 3.0)) and not plain.requires_grad


#: (cuts of rows and columns on 4 ranks, minor digit first or last; windows of rows and of columns; sizes)
SAME = Window(12, 12, 1, 1, 3)
WAYS = {
    "rows": ((4, 1), SAME, None),
    "columns": ((1, 4), None, SAME),
    "both": ((2, 2), SAME, SAME),
    "both, far": ((2, 2), Window(12, 12, 1, 5, 11), Window(12, 12, 1, 4, 9)),
    "over several parts": ((4, 1), Window(12, 12, 1, 4, 9), None),
    "strides": ((4, 1), Window(4, 12, 3, 2, 7), None),
    "strides that drop rows": ((2, 2), Window(4, 12, 3, 0, 2), Window(12, 12, 1, 0, 2)),
    "minus infinity": ((2, 2), Window(12, 12, 1, 1, 3, -math.inf), Window(12, 12, 1, 1, 3, -math.inf)),
    "nothing sent": ((2, 1), Window(4, 6, 2, 1, 2), None),
    "not divided": ((4, 1), Window(10, 10, 1, 1, 3), None),
    "an empty part": ((4, 1), Window(9, 9, 1, 1, 3), None),
}


def made(name: str, turned: bool = False) -> tuple[Layout, tuple[Halo, ...], tuple[int, ...]]:
    """(layout of a [2, rows, columns] tensor, halos, shape); turned: the columns have the major digit."""
    (rows, columns), *windows = WAYS[name]
    major, minor = (columns, rows) if turned else (rows, columns)
    first, last = Digit(major, minor * (4 // (rows * columns))), Digit(minor, 4 // (rows * columns))
    digits = ((), (last,), (first,)) if turned else ((), (first,), (last,))
    halos = tuple(w.cut(1 + d, digits[1 + d]) for d, w in enumerate(windows) if w is not None)
    return (
        Layout.of(4, digits),
        halos,
        (2, *(w.size if w is not None else 5 * cut for w, cut in zip(windows, (rows, columns)))),
    )


def padded(x: Tensor, layout: Layout) -> Tensor:
    """The tensor with rows of NaN, where its cuts do not divide."""
    wide = layout.padded(x.shape)
    out = x.new_full(wide, math.nan)
    out[tuple(map(slice, x.shape))] = x
    return out


def expected(x: Tensor, layout: Layout, halos: tuple[Halo, ...], rank: int) -> Tensor:
    """The rows that a rank reads, from the whole tensor."""
    index = [slice(None) if not digits else None for digits in layout.dims]
    window = x
    for d, digits in enumerate(layout.dims):
        halo = next((h for h in halos if h.dim == d), None)
        if halo is None:
            window = window[(*[slice(None)] * d, layout.slice(layout.padded(x.shape), rank)[d])] if digits else window
            continue
        begin = layout.position(d, rank) * halo.step - halo.padding
        rows = [
            window.select(d, begin + j)
            if 0 <= begin + j < halo.size
            else torch.full_like(window.select(d, 0), halo.fill)
            for j in range(halo.length)
        ]
        window = torch.stack(rows, d)
    assert len(index) == window.dim()
    return window


def numbers(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_in_one_process(name: str, turned: bool) -> None:
    layout, halos, shape = made(name, turned)
    x = numbers(shape)
    forward, backward = halo_exchange(layout, halos), halo_reduce(layout, halos)
    shards = scatter(padded(x, layout), layout)
    got = convert_shards(forward, shards)
    gradients = [numbers(tuple(g.shape), seed=r) for r, g in enumerate(got)]
    back = convert_shards(backward, gradients)
    axes = Axes.of_layouts(4, [layout])
    held = axes.along(layout.carried)
    stacked = exchanging(axes.numbers, len(axes.sizes), forward)(axes.stack(shards, held))
    stacked_back = exchanging(axes.numbers, len(axes.sizes), backward)(
        axes.stack([gradients[r] for r in _firsts(axes, held)], held)
    )
    leaf = x.clone().requires_grad_()
    outputs = [expected(leaf, layout, halos, rank) for rank in range(4)]
    for rank in range(4):
        torch.testing.assert_close(got[rank], outputs[rank].detach(), rtol=0, atol=0)
        torch.testing.assert_close(axes.shards(stacked, held)[rank], outputs[rank].detach(), rtol=0, atol=0)
    firsts = sorted(set(_firsts(axes, held)))
    (wanted,) = torch.autograd.grad([outputs[r] for r in firsts], [leaf], [gradients[r] for r in firsts])
    true = tuple(map(slice, shape))
    torch.testing.assert_close(assemble(axes.shards(stacked_back, held), layout)[true], wanted)
    if not layout.replicas:
        torch.testing.assert_close(assemble(back, layout)[true], wanted)
        assert torch.equal(assemble(back, layout), assemble(axes.shards(stacked_back, held), layout))


def _firsts(axes: Axes, held: tuple[int, ...]) -> list[int]:
    """For each rank the first one with its shard."""
    places = axes.places(held)
    return [places.index(p) for p in places]


@settings(max_examples=60)
@given(st.data())
def test_random_exchanges_in_one_process(data: Any) -> None:
    """Any windows over one dim in any number of parts: the exchange, and that its transpose is one."""
    parts = data.draw(st.integers(1, 5))
    window = Window(
        data.draw(st.integers(1, 12)),
        data.draw(st.integers(1, 12)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(-1, 4)),
        data.draw(st.integers(1, 6)),
    )
    digits = (Digit(parts, 1),)
    layout = Layout.of(parts, ((), digits, ()))
    halos = (window.cut(1, digits),)
    x = numbers((2, window.size, 3))
    got = convert_shards(halo_exchange(layout, halos), scatter(padded(x, layout), layout))
    for rank in range(parts):
        torch.testing.assert_close(got[rank], expected(x, layout, halos, rank), rtol=0, atol=0)
    gradients = [numbers(tuple(g.shape), seed=r) for r, g in enumerate(got)]
    back = assemble(convert_shards(halo_reduce(layout, halos), gradients), layout)
    assert not back[:, window.size :].any()  # padding gets no gradient
    there = sum((g * y).sum() for g, y in zip(got, gradients))
    torch.testing.assert_close(there, (x * back[:, : window.size]).sum())


# -- ranks -------------------------------------------------------------------------------------------------------------


def exchanged(rank: int, world: int, exchanges: bool | None, share: bool, dtype: torch.dtype) -> dict:
    """By way: (what the rank reads, the gradient of its slice, elements sent there and back)."""
    groups = ProcessGroups(world, rank, exchanges=exchanges, share=share)
    count, plain, out = [0], collectives.exchange, {}

    def counted(group, x, sends=(), receives=()):
        assert x.numel() == sum(sends) and sends[group.position] == 0
        count[0] += sum(sends)
        return plain(group, x, sends, receives)

    collectives.exchange = counted
    for name in WAYS:
        for turned in (False, True):
            layout, halos, shape = made(name, turned)
            forward, backward = halo_exchange(layout, halos), halo_reduce(layout, halos)
            x = scatter(padded(numbers(shape), layout), layout)[rank].to(dtype)
            before, count[0] = x.clone(), 0
            steps = bind_all(forward, tuple(x.shape), rank, groups)
            back = bind_all(backward, forward.local_shapes(x.shape)[-1], rank, groups)
            y = x
            for step in steps:
                y = step(y)
            sent = count[0]
            g = numbers(tuple(y.shape), seed=rank).to(dtype)
            for step in back:
                g = step(g)
            torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
            out[name, turned] = y, g, sent, count[0] - sent
    collectives.exchange = plain
    return out


@pytest.mark.parametrize(
    ("exchanges", "share", "dtype"),
    [
        pytest.param(None, True, torch.float64, id="one host"),
        pytest.param(None, False, torch.float64, id="Gloo"),
        pytest.param(False, False, torch.float64, id="a library"),
        pytest.param(None, False, torch.bfloat16, id="bfloat16"),
        pytest.param(None, False, torch.complex64, id="complex numbers"),
    ],
)
def test_ranks_do_as_one_process(exchanges: bool | None, share: bool, dtype: torch.dtype) -> None:
    results = run_ranks(exchanged, 4, exchanges, share, dtype)
    for name, turned in results[0]:
        layout, halos, shape = made(name, turned)
        shards = [x.to(dtype) for x in scatter(padded(numbers(shape), layout), layout)]
        got = convert_shards(halo_exchange(layout, halos), shards)
        gradients = [numbers(tuple(g.shape), seed=r).to(dtype) for r, g in enumerate(got)]
        back = convert_shards(halo_reduce(layout, halos), gradients)
        for rank in range(4):
            y, g, _, _ = results[rank][name, turned]
            assert torch.equal(y, got[rank]), (name, turned, rank)
            assert torch.equal(g, back[rank]), (name, turned, rank)


def test_ranks_send_what_their_neighbours_read() -> None:
    """Each rank sends the elements of its slice that other ranks read, corners once, and as much comes back."""
    results = run_ranks(exchanged, 4, None, False, torch.float64)
    for name, turned in results[0]:
        layout, halos, shape = made(name, turned)
        cut = {halo.dim: halo for halo in halos}
        wide = layout.padded(shape)
        needed = []
        for rank in range(4):
            place, total = layout.slice(wide, rank), 0
            for other in range(4):
                if any(layout.position(d, rank) != layout.position(d, other) for d in range(3) if d not in cut):
                    continue  # other columns, which no window of this operator reads
                if layout.replicas and rank % layout.replicas[0].size != other % layout.replicas[0].size:
                    continue  # other replicas, which have the same
                box = [
                    cut[d].shared(layout.position(d, rank), layout.position(d, other))
                    if d in cut
                    else range(place[d].start, place[d].stop)
                    for d in range(3)
                ]
                total += (rank != other) * math.prod(map(len, box))
            needed.append(total)
        sent = [results[rank][name, turned][2] for rank in range(4)]
        back = [results[rank][name, turned][3] for rank in range(4)]
        assert sum(sent) == sum(back) == sum(needed), (name, turned)
        found = halo_exchange(layout, halos)
        bound = sum(
            step.sent(math.prod(before))
            for step, before in zip(found.steps, found.local_shapes(layout.local_shape(wide)))
        )
        assert max(sent) <= bound
        if len(halos) == 1:
            assert sent == needed and max(sent) == bound, (name, turned)


def compiled(rank: int, world: int) -> dict:
    groups, out = ProcessGroups(world, rank), {}
    for name in ("both", "over several parts"):
        layout, halos, shape = made(name)
        x = scatter(numbers(shape), layout)[rank]
        steps = bind_all(halo_exchange(layout, halos), tuple(x.shape), rank, groups)

        @torch.compile(fullgraph=True, backend="eager")
        def run(x: Tensor, steps: Any = steps) -> Tensor:
            for step in steps:
                x = step(x)
            return x

        out[name] = run(x)
    return out


def test_exchanges_can_be_traced_by_compile() -> None:
    torch.compile(torch.relu, backend="eager")(torch.ones(1))  # its imports: once here, and not in every rank
    results = run_ranks(compiled, 4)
    for name in results[0]:
        layout, halos, shape = made(name)
        for rank, y in enumerate(convert_shards(halo_exchange(layout, halos), scatter(numbers(shape), layout))):
            assert torch.equal(results[rank][name], y)
