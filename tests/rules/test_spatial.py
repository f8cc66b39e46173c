"""Windows, interpolation and patches of any geometry: where a rule lets a spatial dim be cut, slices give the whole."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import assume, given, settings
from rule_reference import Case, Sliced, Whole, check

from shardwright.layout import Digit
from shardwright.rules import bound_rule, find_rule

aten = torch.ops.aten


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).requires_grad_()


@st.composite
def pools(draw: Any) -> tuple[Any, tuple]:
    """Max and mean pools of 1×1×size, by every kind of window that fits."""
    kernel, stride, dilation = (draw(st.integers(1, 4)) for _ in range(3))
    padding = draw(st.integers(0, kernel // 2))
    size = draw(st.sampled_from([stride * 2, stride * 4, stride * 4 + 1, kernel, kernel * dilation + 3]))
    ceil = draw(st.booleans())
    if draw(st.booleans()):
        assume(size + 2 * padding > dilation * (kernel - 1))
        return aten.max_pool1d.default, ([kernel], [stride], [padding], [dilation], ceil), size
    assume(size + 2 * padding >= kernel)
    return aten.avg_pool1d.default, ([kernel], [stride], [padding], ceil, draw(st.booleans())), size


@settings(max_examples=150)
@given(pools())
def test_random_pools(made) -> None:
    target, arguments, size = made
    check(Case(0, target, (numbers(1, 1, size), *arguments), {}), 2)


@settings(max_examples=150)
@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.booleans(),
    st.sampled_from(
        [
            aten.adaptive_avg_pool1d.default,
            aten.upsample_nearest1d.vec,
            aten._upsample_nearest_exact1d.vec,
            aten.upsample_linear1d.vec,
        ]
    ),
)
def test_random_sizes(before, after, scaled, target) -> None:
    """Adaptive means and interpolation from any size to any, by the size or by a factor that rounds to it."""
    if target is aten.adaptive_avg_pool1d.default:
        arguments: tuple = ([after],)
    else:
        sized = (None, [(after + 0.3) / before if after % 3 else after / before]) if scaled else ([after], None)
        arguments = sized if "nearest" in str(target) else (sized[0], False, sized[1])
    assume(int(before * (arguments[-1] or [1.0])[0]) > 0)
    case = Case(0, target, (numbers(1, 1, before), *arguments), {})
    check(case, 2, 4)


@settings(max_examples=80)
@given(st.data())
def test_random_patches(data) -> None:
    def pick(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)) for _ in range(2)]

    kernel, stride, dilation, padding = pick(1, 3), pick(1, 3), pick(1, 2), pick(0, 1)
    plane = [s * c for s, c in zip(stride, pick(2, 4))]
    extent = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    assume(all(size + 2 * p >= e for size, p, e in zip(plane, padding, extent)))
    image = numbers(1, 2, *plane)
    arguments = (kernel, dilation, padding, stride)
    check(Case(0, aten.im2col.default, (image, *arguments), {}), 2)
    patches = aten.im2col.default(image.detach(), *arguments).requires_grad_()
    check(Case(0, aten.col2im.default, (patches, plane, *arguments), {}), 2)


def cut(target: Any, *args: Any, factor: str) -> Sliced:
    """The call with one factor cut in two."""
    whole = Whole(Case(0, target, args, {}))
    rule = find_rule(whole.op)
    bound = bound_rule(whole.op, rule)
    index = [f.name for f in bound.factors].index(factor)
    return Sliced(whole, rule, bound, bound.cut_by(2, {index: (Digit(2, 1),)}), keep_open=False)


def test_a_mean_over_a_cut_plane_needs_one_sum() -> None:
    for target, argument in ((aten.adaptive_avg_pool2d.default, [1, 1]), (aten.avg_pool2d.default, [4, 6])):
        run = cut(target, numbers(2, 2, 4, 6), argument, factor="h1")
        assert len(run.reduced) == 1
        assert [ran.op.kind for ran in run.ran] == ["sum", "div"]


def test_separate_windows_need_nothing() -> None:
    for target in (aten.max_pool2d.default, aten.avg_pool2d.default):
        run = cut(target, numbers(2, 2, 4, 6), [2, 3], factor="o0")
        assert not run.reduced and len(run.ran) == 1


def test_channels_may_be_cut_where_pixels_are_shuffled() -> None:
    for target, shape in ((aten.pixel_shuffle.default, (1, 8, 3, 3)), (aten.pixel_unshuffle.default, (1, 2, 6, 6))):
        x = numbers(*shape)
        torch.testing.assert_close(cut(target, x, 2, factor="c").outputs()[0], target(x.detach(), 2))


def test_a_half_precision_mean_is_summed_wide() -> None:
    """4096 · 32 is past the largest float16."""
    x = torch.full((1, 1, 2, 4096), 32.0, dtype=torch.float16)
    run = cut(aten.adaptive_avg_pool2d.default, x, [1, 1], factor="h1")
    assert run.outputs()[0].item() == 32.0
