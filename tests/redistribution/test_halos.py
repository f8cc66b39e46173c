"""Halos: the numbers of `Halo` against windows that are listed element by element, and the steps made of them."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shardwright.errors import LayoutError
from shardwright.layout import Digit, Layout
from shardwright.redistribution import CollectiveKind, Halo, Window, halo_exchange, halo_reduce


@st.composite
def cuts(draw: Any) -> tuple[Window, int]:
    """Windows as operators have them, and a number of parts that divides the dim and the windows; or does not."""
    stride, extent, padding = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(-2, 6))
    size = draw(st.integers(1, 30))
    count = draw(st.integers(1, 30))
    return Window(count, size, stride, padding, extent), draw(st.integers(1, 6))


def read_by(window: Window, parts: int, part: int) -> list[int]:
    """The elements that the windows of a part cover, those outside of the dim too, from the first to the last."""
    each = math.ceil(window.count / parts)
    covered = {
        o * window.stride - window.padding + k
        for o in range(part * each, (part + 1) * each)
        for k in range(window.extent)
    }
    return list(range(min(covered), max(covered) + 1))


@settings(max_examples=200)
@given(cuts())
def test_parts_read_what_their_windows_cover(made: tuple[Window, int]) -> None:
    window, parts = made
    halo = window.cut(0, (Digit(parts, 1),))
    own = math.ceil(window.size / parts)
    sent, received, partners = [0] * parts, [0] * parts, [0] * parts
    for reader in range(parts):
        elements = read_by(window, parts, reader)
        assert (halo.begins(reader), halo.length) == (elements[0], len(elements))
        inside = [e for e in elements if 0 <= e < window.size]
        assert list(halo.reads(reader)) == inside
        assert [e for _, shared in halo.sources(reader) for e in shared] == inside
        for part in range(parts):
            shared = [e for e in inside if e // own == part]
            assert list(halo.shared(part, reader)) == shared
            if part != reader and shared:
                sent[part] += len(shared)
                received[reader] += len(shared)
                partners[part] += 1
    assert (halo.sent, halo.received, halo.partners) == (max(sent), max(received), max(partners))


def grid(*windows: Window, parts: tuple[int, ...]) -> tuple[Layout, tuple[Halo, ...]]:
    """A tensor whose dims are all cut, the last one by the fastest digit; and its halos."""
    devices = math.prod(parts)
    digits = [Digit(n, math.prod(parts[d + 1 :])) for d, n in enumerate(parts)]
    layout = Layout.of(devices, [(d,) for d in digits])
    return layout, tuple(window.cut(d, (digits[d],)) for d, window in enumerate(windows))


def by_neighbours(layout: Layout, halos: tuple[Halo, ...], shape: tuple[int, ...]) -> list[int]:
    """The elements that each rank sends where every other rank is sent at once the box that it reads, corners too: the
    original's NeighborExchangeV2."""
    boxes = [[halo.reads(layout.position(halo.dim, rank)) for halo in halos] for rank in range(layout.devices)]
    out = []
    for rank in range(layout.devices):
        place = layout.slice(shape, rank)
        out.append(
            sum(
                math.prod(
                    max(0, min(box.stop, own.stop) - max(box.start, own.start)) for box, own in zip(boxes[other], place)
                )
                for other in range(layout.devices)
                if other != rank
            )
        )
    return out


@pytest.mark.parametrize("parts", [(4, 2), (2, 2), (3, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize(("extent", "stride"), [(3, 1), (5, 1), (7, 2), (4, 2)])
def test_no_more_is_sent_than_neighbours_need(parts: tuple[int, ...], extent: int, stride: int) -> None:
    """The most that a rank sends, there and back, is at most what it sends by boxes, corners included."""
    size = 24
    count = size // stride
    window = Window(count, size, stride, (extent - 1) // 2, extent)
    layout, halos = grid(window, window, parts=parts)
    most = max(by_neighbours(layout, halos, (size, size)))
    forward, backward = halo_exchange(layout, halos), halo_reduce(layout, halos)
    shape = layout.local_shape((size, size))
    shapes = forward.local_shapes(shape)
    sent = sum(step.sent(math.prod(before)) for step, before in zip(forward.steps, shapes))
    assert sent <= most
    assert forward.sent == Fraction(sent, size * size)
    back = backward.local_shapes(shapes[-1])
    assert back == shapes[::-1]
    assert sum(step.sent(math.prod(before)) for step, before in zip(backward.steps, back)) <= most


def test_an_example_by_hand() -> None:
    """A kernel of 7 with stride 2 over 16 rows in 4 parts: 3 rows from above, 2 from below; 16 columns in 2 parts."""
    layout, halos = grid(Window(8, 16, 2, 3, 7), Window(16, 16, 1, 1, 3), parts=(4, 2))
    assert [(h.begins(1), h.length, h.part_size) for h in halos] == [(1, 9, 4), (7, 10, 8)]
    found = halo_exchange(layout, halos)
    assert [str(s.kind) for s in found.steps] == ["halo_exchange"] * 2
    assert found.local_shapes((4, 8)) == ((4, 8), (9, 8), (9, 10))
    rows, columns = found.steps
    assert rows.sent(4 * 8) == 5 * 8  # 2 to the part above, 3 to the part below
    assert columns.sent(9 * 8) == 9 * 1  # one column of 9 rows: an inner part reads 9 rows within the tensor
    back = halo_reduce(layout, halos)
    assert [step.halo.dim for step in back.steps] == [1, 0]
    assert back.steps[0].sent(9 * 10) == 9 and back.steps[1].sent(9 * 8) == 5 * 8
    assert found.exchanges_halos and back.exchanges_halos and found.source == found.target == layout


def test_rows_outside_of_the_tensor_do_not_travel() -> None:
    layout, halos = grid(Window(8, 8, 1, 3, 7), Window(8, 8, 1, 1, 3), parts=(2, 2))
    rows, columns = halo_exchange(layout, halos).steps
    assert rows.sent(16) == 3 * 4
    assert columns.sent(10 * 4) == 7  # of 10 rows, 3 lie outside


def test_a_halo_of_nothing_is_not_sent() -> None:
    """Windows that reach over the border, but over no part's."""
    layout, halos = grid(Window(4, 6, 2, 1, 2), parts=(2,))
    (step,) = halo_exchange(layout, halos).steps
    assert not step.communicates and step.sent(3) == 0
    assert halo_exchange(layout, halos).collectives == ()


def test_another_size_is_refused() -> None:
    layout, halos = grid(Window(8, 8, 1, 1, 3), parts=(2,))
    with pytest.raises(LayoutError, match="dim 0 .* has size 5, not 4"):
        halo_exchange(layout, halos).local_shapes((5,))
    with pytest.raises(LayoutError, match="dim 0 .* has size 4, not 6"):
        halo_reduce(layout, halos).local_shapes((4,))


def test_steps_with_other_halos_differ() -> None:
    """Ranks compare plans by the text of their steps."""
    layout, halos = grid(Window(8, 8, 1, 1, 3), parts=(2,))
    others = [
        grid(window, parts=(2,))[1]
        for window in (
            Window(8, 8, 1, 2, 3),
            Window(8, 8, 1, 1, 4),
            Window(4, 8, 2, 1, 3),
            Window(8, 8, 1, 1, 3, -math.inf),
        )
    ]
    texts = {str(halo_exchange(layout, each)) for each in (halos, *others)}
    assert len(texts) == 5
    assert halo_exchange(layout, halos) != halo_exchange(layout, others[0])
    assert CollectiveKind.HALO_EXCHANGE.transpose is CollectiveKind.HALO_REDUCE


@given(st.integers(1, 4), st.integers(1, 4))
def test_the_parts_of_all_ranks_are_read_once(rows: int, columns: int) -> None:
    """Windows that are the slices themselves move nothing."""
    layout, halos = grid(
        Window(rows * 3, rows * 3, 1, 0, 1), Window(columns * 2, columns * 4, 2, 0, 2), parts=(rows, columns)
    )
    for rank, (halo, d) in product(range(layout.devices), zip(halos, (0, 1))):
        part = layout.position(d, rank)
        assert halo.reads(part) == halo.has(part)
    assert halo_exchange(layout, halos).sent == 0
