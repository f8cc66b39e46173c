"""Spatial operators: convolutions, patches and shuffles, pooling, resampling.

1. *Windows* over the spatial dims, shared by convolutions, pooling and patches:

       window o of a dim has the elements  o·stride - padding + dilation·(0 … kernel-1)

   A dim is divided into stretches of `stride` elements. Window o stays within stretch o where nothing is padded and
   dilation·(kernel-1) < stride. If the stretches fill the dim, it is ``(o r!)``: it may be cut between stretches, and
   the same call applies the windows to each slice.

   Other windows of convolutions and pooling read elements of neighbouring slices: `redistribution.halos` has the
   formula. With o the greatest common divisor of the dim's size and the number of windows, the dim is ``(o~ r!)`` and
   that of the windows ``(o~ m!)``: each part gets equal numbers of both, and a halo. A part is filled where it reaches
   over the border, and the call itself pads only dims that are not cut.

2. *Convolutions*, also transposed. The factors in the device matrix are n, groups, c_in, h, w, c_out, in this order.
   Cut input channels leave a partial sum; the bias is added once, to the completed sum. Channels of groups are
   ``(g ci)`` and ``(g co)``: cuts fall between groups first, and a rank convolves the groups that it holds. The
   kernel stays whole. A transposed convolution is the mirror image: its windows cover the output. Where the output has
   `stride` elements for each of the input, an input dim may be cut with halos too. Input element i adds to the outputs
   i·stride - padding + (0 … extent-1), so the outputs o·stride + (0 … stride-1) read the inputs

       o - before … o + ⌊(stride-1 + padding) / stride⌋        before = ⌊(extent-1 - padding) / stride⌋

   The call on these inputs, without padding, gives outputs from (o - before)·stride on; the part's own begin `padding +
   before·stride` further on. Other transposed convolutions keep such dims whole.

3. *Patches and shuffles* exchange space and channels. Patches are extracted and put back, pixels shuffled. Nothing is
   computed but sums of overlapping elements, so partial sums may pass.

4. *Pooling*. Batch and channels may be cut, spatial dims by windows; outside of the tensor a maximum reads -∞. A mean
   over windows that reach over the border divides by fewer elements there. The call on a slice with a halo divides by
   the whole kernel; its result is multiplied by kernel / elements, a function of the position.

   One window that covers a whole dim is a mean over the dim: over a cut dim a sum divided by the global count. An
   adaptive mean from a·g to b·g elements, g their greatest common divisor, takes each stretch of a elements to b: the
   dim may be cut between stretches. Where indices are returned, which count in the whole plane, spatial dims stay
   whole.

5. *Resampling*: interpolation and grids. Interpolation from a·g to b·g elements takes stretches of a elements to b. A
   dim may be cut between stretches in two cases: nearest neighbours stay within their stretch (where a/b is a power
   of two, so that positions are exact), and a dim that keeps its size is not changed. Every other interpolation reads
   neighbours, and its spatial dims stay whole.

Example: a kernel of 3 with padding 1 and stride 1 over 8 elements cut in 2. Rank 0 has 0 to 3 and needs element 4 too:
a halo of one element, and zeros at its border.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..graph import Op, Value
from ..redistribution import Window
from ..torch_private import operators
from .dims import compound, cut_size, filling, local_operator, named, operand, operands, positions, whole, wide
from .notation import Assignment, Bound
from .registry import Builder, Expansion, Local, Rule, local_output_shape, register

__all__ = ["Texts", "per_dim", "spatial", "windowed", "windows_of"]


# -- windows


class Texts(NamedTuple):
    """The spatial dims of an operator.

    Attributes:
        before: the texts of the dims that windows cover.
        after: the texts of the dims that count windows.
        sizes: the sizes of their factors.
        windows: the windows of the factors whose cuts need halos.
    """

    before: list[str]
    after: list[str]
    sizes: dict[str, int]
    windows: dict[str, Window]


def spatial(op: Op) -> int:
    """The number of spatial dims of an operator, read from its name, such as ``max_pool2d_with_indices``."""
    return next(int(letter) for letter in op.kind if letter.isdigit())


def per_dim(argument: object, count: int) -> tuple[int, ...]:
    """An argument with one entry for each spatial dim; one given entry holds for all dims."""
    listed = tuple(argument) if isinstance(argument, (tuple, list)) else (argument,)
    return listed * count if len(listed) == 1 else listed


def windows_of(op: Op, kernel: Sequence[int]) -> list[tuple[int, int, int]]:
    """The (stride, padding, extent) of an operator's windows in each spatial dim; an extent is dilation·(kernel-1) + 1,
    the padding that before the dim: the padding "same" of an even extent has one element more behind it.
    """
    count, padding = len(kernel), op.argument("padding", 0)
    strides = per_dim(op.argument("stride") or kernel, count)
    dilations = per_dim(op.argument("dilation", 1), count)
    extents = [d * (k - 1) + 1 for d, k in zip(dilations, kernel)]
    if isinstance(padding, str):
        padding = [(e - 1) // 2 for e in extents] if padding == "same" else 0
    return list(zip(strides, per_dim(padding, count), extents))


def windowed(
    op: Op, sizes: Sequence[int], counts: Sequence[int], kernel: Sequence[int], fill: float | None = None
) -> Texts:
    """The spatial dims of an operator's windows.

    Args:
        sizes: of the dims that the windows cover: the input of a convolution, the output of a transposed one.
        counts: the number of windows in each dim.
        kernel: the size of the kernel in each dim.
        fill: the value that the operator reads outside of the dims; None: windows over several slices keep a dim whole.
    """
    made = Texts([], [], {}, {})
    for i, (size, windows, (stride, padding, extent)) in enumerate(zip(sizes, counts, windows_of(op, kernel))):
        shared = math.gcd(size, windows)
        if padding == 0 and extent <= stride and size == windows * stride:
            made.before.append(f"(o{i} r{i}!)")
            made.after.append(f"o{i}")
            made.sizes.update({f"o{i}": windows, f"r{i}": stride})
        elif fill is not None and shared > 1:
            made.before.append(f"(o{i}~ r{i}!)")
            made.after.append(f"(o{i}~ m{i}!)")
            made.sizes.update({f"o{i}": shared, f"r{i}": size // shared, f"m{i}": windows // shared})
            made.windows[f"o{i}"] = Window(windows, size, stride, padding, extent, fill)
        else:
            made.before.append(f"s{i}!")
            made.after.append(f"o{i}!")
    return made


def _spread_windows(op: Op, sizes: Sequence[int], counts: Sequence[int], kernel: Sequence[int]) -> Texts:
    """The spatial dims of a transposed convolution, whose windows cover the output.

    Args:
        sizes: of the output.
        counts: of the input.
        kernel: the size of the kernel in each dim.
    """
    made = windowed(op, sizes, counts, kernel)
    for i, (size, count, (stride, padding, extent)) in enumerate(zip(sizes, counts, windows_of(op, kernel))):
        before, after = (extent - 1 - padding) // stride, (stride - 1 + padding) // stride
        if made.after[i] == f"o{i}!" and size == count * stride and padding + before * stride >= 0 and count > 1:
            made.before[i], made.after[i] = f"(o{i}~ r{i}!)", f"o{i}~"
            made.sizes.update({f"o{i}": count, f"r{i}": stride})
            made.windows[f"o{i}"] = Window(count, count, 1, before, before + after + 1)
    return made


def _halo_dims(bound: Bound, assignment: Assignment) -> list[int]:
    """The spatial dims that are cut with halos."""
    return [int(bound.factors[f].name[1:]) for f in sorted(bound.windowed) if assignment.digits[f]]


def _without(numbers: object, dims: Sequence[int], count: int) -> list[int]:
    """An argument with one number for each of `count` spatial dims, 0 in `dims`."""
    return [0 if i in dims else number for i, number in enumerate(per_dim(numbers, count))]


aten = torch.ops.aten


def _is_transposed(op: Op) -> bool:
    return op.kind.startswith("conv_transpose") or bool(op.argument("transposed", False))


def _text(op: Op) -> tuple[str, dict[str, int], dict[str, Window]]:
    x, weight, out = op.argument("input").shape, op.argument("weight").shape, op.output(0).shape
    count, groups, is_transposed = len(weight) - 2, op.argument("groups"), _is_transposed(op)
    if is_transposed:
        after, before, sizes, windows = _spread_windows(op, out[-count:], x[-count:], weight[2:])
    else:
        before, after, sizes, windows = windowed(op, x[-count:], out[-count:], weight[2:], 0)
    group = ["g"] * (groups > 1)
    inward, outward = compound([*group, "ci"]), compound([*group, "co"])
    filters = [inward, "co"] if is_transposed else [outward, "ci"]
    batch = ["n"] * (len(x) - count - 1)
    texts = operands(
        op,
        input=operand([*batch, inward, *before]),
        weight=operand([*filters, *(f"{k}!" for k in named(count, "k"))]),
        bias=compound([*group, "co?"]),
    )
    channels = {"g": groups, "ci": x[-count - 1] // groups, "co": out[-count - 1] // groups}
    return f"{texts} -> {operand([*batch, outward, *after])}", channels | sizes, windows


def _local(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(groups=op.argument("groups") // cut_size(bound, assignment, ["g"]))
    return Local(op.target, args, kwargs)


@local_operator(
    "convolution_part(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] behind, int[] dilation,"
    " bool transposed, int[] output_padding, int groups, int[] skipped, int[] lengths) -> Tensor"
)
def convolution_part(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    behind: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    skipped: list[int],
    lengths: list[int],
) -> torch.Tensor:
    """A convolution of a slice with halos, where a plain call cannot say it.

    Args:
        behind: zeros behind each dim, beside the padding on both sides.
        skipped, lengths: for a transposed convolution, the outputs of each dim to leave out at the front, and the
            number of those that follow; empty: all.
        stride, padding, dilation, transposed, output_padding, groups: as ``torch.convolution``.
    """
    if any(behind):
        x = torch.nn.functional.pad(x, [n for more in reversed(behind) for n in (0, more)])
    batched = x.dim() == weight.dim()
    made = torch.convolution(
        x if batched else x.unsqueeze(0), weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    for i, (start, length) in enumerate(zip(skipped, lengths)):
        if start or length != made.shape[2 + i]:
            made = made.narrow(2 + i, start, length)
    return made if batched else made.squeeze(0)


def _local_part(op: Op, bound: Bound, assignment: Assignment) -> Local:
    """The call on a slice with halos: without padding along the dims that are cut."""
    kernel = op.argument("weight").shape[2:]
    count, cut, windows = len(kernel), _halo_dims(bound, assignment), windows_of(op, kernel)
    groups = op.argument("groups") // cut_size(bound, assignment, ["g"])
    uneven = [0] * count  # what the padding "same" has more behind a dim
    if op.argument("padding") == "same":
        uneven = _without([(extent - 1) % 2 for _, _, extent in windows], cut, count)
    padding = _without([p for _, p, _ in windows], cut, count)
    if not _is_transposed(op) and not any(uneven):
        args, kwargs = op.with_arguments(padding=padding, groups=groups)
        by_name = isinstance(op.argument("padding"), str)
        return Local(op.target.overloadpacket.default if by_name else op.target, args, kwargs)
    output_padding = list(per_dim(op.argument("output_padding", 0), count))
    skipped: list[int] = []
    lengths: list[int] = []
    if _is_transposed(op):
        out = local_output_shape(bound, assignment)[-count:]
        halos = {halo.dim: halo for halo in bound.halos(0, assignment)}
        first = len(op.argument("input").shape) - count
        for i, (stride, pad, extent) in enumerate(windows):
            halo = halos.get(first + i)
            skipped.append(0 if halo is None else pad + halo.padding * stride)
            lengths.append(out[i])
            if halo is not None:
                output_padding[i] = max(0, skipped[i] + out[i] - ((halo.length - 1) * stride + extent))
    strides, dilations = (per_dim(op.argument(name), count) for name in ("stride", "dilation"))
    args = (
        op.argument("input"),
        op.argument("weight"),
        op.argument("bias"),
        list(strides),
        padding,
        uneven,
        list(dilations),
        _is_transposed(op),
        output_padding,
        groups,
        skipped,
        lengths,
    )
    return Local(convolution_part, args, {})


def _bias_after(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    bias = op.argument("bias")
    if bias is None or cut_size(bound, assignment, ["ci"]) == 1:
        return None
    args, kwargs = op.with_arguments(bias=None)
    beside = [*bias.shape, *(1 for _ in op.argument("weight").shape[2:])]
    return lambda b: b.call(
        aten.add.Tensor, b.call(op.target, *args, **kwargs), b.call(aten.view.default, bias, beside)
    )


register(
    (
        aten.conv1d.default,
        aten.conv1d.padding,
        aten.conv2d.default,
        aten.conv2d.padding,
        aten.conv3d.default,
        aten.conv3d.padding,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
        aten.convolution.default,
    ),
    Rule(_text, localize=_local, with_halos=_local_part, expand=_bias_after, neutral=0),
)


# -- patches and shuffles


def _patches(op: Op) -> tuple[str, str, dict[str, int]]:
    """The texts of an image and of its patches ``n (c kernel) windows``, and the sizes of their factors."""
    is_image_made = op.kind == "col2im"
    image = (op.output(0) if is_image_made else op.inputs[0]).shape
    kernel = op.argument("kernel_size")
    counts = [
        (size + 2 * padding - extent) // stride + 1
        for size, (stride, padding, extent) in zip(image[-2:], windows_of(op, kernel))
    ]
    planes, windows, sizes, _ = windowed(op, image[-2:], counts, kernel)
    batch = ["n"] * (len(image) - 3)
    elements = compound(["c", *(f"{k}!" for k in named(2, "k"))])
    sizes |= {"c": image[-3]} | dict(zip(named(2, "k"), kernel)) | dict(zip(named(2, "o"), counts))
    return operand([*batch, "c", *planes]), operand([*batch, elements, compound(windows)]), sizes


def _taken(op: Op) -> tuple[str, dict[str, int]]:
    image, patches, sizes = _patches(op)
    return f"{image} -> {patches}", sizes


def _put_back(op: Op) -> tuple[str, dict[str, int]]:
    image, patches, sizes = _patches(op)
    return f"{patches} -> {image}", sizes


def _local_put_back(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(output_size=list(local_output_shape(bound, assignment)[-2:]))
    return Local(op.target, args, kwargs)


def _shuffled(op: Op) -> tuple[str, dict[str, int]]:
    """The notation of pixel_shuffle, which spreads each channel's r·r parts over the plane, and of its inverse."""
    is_spread = op.kind == "pixel_shuffle"
    factor = op.argument("upscale_factor" if is_spread else "downscale_factor")
    deep, flat = "... (c p! q!) h w", "... c (h p!) (w q!)"
    *_, c, h, w = (op.output(0) if is_spread else op.inputs[0]).shape
    sizes = {"p": factor, "q": factor, "c": c, "h": h // factor, "w": w // factor}
    return (f"{deep} -> {flat}" if is_spread else f"{flat} -> {deep}"), sizes


def _channels(op: Op) -> str:
    """The notation of channel_shuffle: the channels stay whole, since adjacent channels move far apart."""
    rest = operand(named(len(op.inputs[0].shape) - 2, "s"))
    return f"n c! {rest} -> n c! {rest}"


register((aten.im2col.default,), Rule(_taken, linear=True))
register((aten.col2im.default,), Rule(_put_back, linear=True, localize=_local_put_back))
register((aten.pixel_shuffle.default, aten.pixel_unshuffle.default), Rule(_shuffled, linear=True))
register((aten.channel_shuffle.default,), Rule(_channels, linear=True))


# -- pooling


def _lead(op: Op) -> list[str]:
    """Names of the dims before the spatial dims."""
    return ["n", "c"][2 - (len(op.inputs[0].shape) - spatial(op)) :]


def _planes(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The spatial sizes of the input and of the output."""
    count = spatial(op)
    return op.inputs[0].shape[-count:], op.output(0).shape[-count:]


def _slid(op: Op, fill: float) -> Texts:
    before, after = _planes(op)
    return windowed(op, before, after, per_dim(op.argument("kernel_size"), len(before)), fill)


def _spread(op: Op) -> Texts:
    """The dims of adaptive windows."""
    made = Texts([], [], {}, {})
    for i, (before, after) in enumerate(zip(*_planes(op))):
        shared = math.gcd(before, after)
        made.before.append(f"(o{i} r{i}!)")
        made.after.append(f"(o{i} m{i}!)")
        made.sizes.update({f"o{i}": shared, f"r{i}": before // shared, f"m{i}": after // shared})
    return made


def _covered(op: Op) -> list[int]:
    """The spatial dims that one window covers without padding."""
    before, after = _planes(op)
    if "adaptive" in op.kind:
        return [i for i, size in enumerate(after) if size == 1]
    if op.argument("divisor_override") is not None:
        return []
    windows = windows_of(op, per_dim(op.argument("kernel_size"), len(before)))
    return [i for i, (_, padding, extent) in enumerate(windows) if (extent, padding, after[i]) == (before[i], 0, 1)]


def _maximum_text(op: Op) -> tuple[str, dict[str, int], dict[str, Window]]:
    before, after, sizes, windows = _slid(op, filling(op.inputs[0].dtype, -math.inf))
    return f"{operand(_lead(op) + before)} -> {operand(_lead(op) + after)}", sizes, windows


def _mean_text(op: Op) -> tuple[str, dict[str, int], dict[str, Window]]:
    before, after, sizes, windows = _spread(op) if "adaptive" in op.kind else _slid(op, 0)
    for i in _covered(op):
        before[i], after[i] = f"h{i}", "1"
        windows.pop(f"o{i}", None)
    return f"{operand(_lead(op) + before)} -> {operand(_lead(op) + after)}", sizes, windows


def _local_pool(op: Op, bound: Bound, assignment: Assignment) -> Local:
    """The call on a slice with halos: without padding along the dims that are cut."""
    kernel = op.argument("kernel_size")
    padding = _without(op.argument("padding"), _halo_dims(bound, assignment), spatial(op))
    args, kwargs = op.with_arguments(kernel_size=list(per_dim(kernel, spatial(op))), padding=padding)
    return Local(op.target, args, kwargs)


def _local_adaptive(op: Op, bound: Bound, assignment: Assignment) -> Local:
    plane = list(local_output_shape(bound, assignment)[-spatial(op) :])
    return Local(op.target, (op.inputs[0], plane), {})


@local_operator(
    "window_shares(Tensor windows, int stride, int padding, int kernel, int size, bool padded, int behind,"
    " ScalarType dtype) -> Tensor"
)
def window_shares(
    windows: torch.Tensor,
    stride: int,
    padding: int,
    kernel: int,
    size: int,
    padded: bool,
    behind: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The kernel's size relative to the elements of a dim that a mean counts, for each of these windows.

    Args:
        windows: the numbers of the windows.
        size: of the dim.
        padded: the padding counts too, but not what lies beyond.
        stride, padding, kernel: of the mean.
        behind: the number of dims of the result behind that of the windows, of size 1.
        dtype: of the result.
    """
    begin = windows * stride - padding
    end = (begin + kernel).clamp(max=size + padding if padded else size)
    counted = end - (begin if padded else begin.clamp(min=0))
    shares = kernel / counted.clamp(min=1).to(dtype)  # padding of a dim that its cut does not divide counts nothing
    return shares.view(-1, *[1] * behind)


register((window_shares,), Rule(lambda op: f"o -> {operand(['o', *['1'] * op.argument('behind')])}"))


def _reaching(op: Op, bound: Bound, assignment: Assignment) -> dict[int, tuple[int, int, int, int, bool]]:
    """The spatial dims that are cut with halos and in which a mean counts fewer elements than its kernel has at the
    border, each with the numbers of `window_shares`."""
    dims = _halo_dims(bound, assignment)
    if not dims or op.argument("divisor_override") is not None:
        return {}
    before, after = _planes(op)
    kernel, padded, out = per_dim(op.argument("kernel_size"), len(before)), op.argument("count_include_pad"), {}
    for i, (stride, padding, extent) in enumerate(windows_of(op, kernel)):
        beyond = (after[i] - 1) * stride - padding + extent > before[i] + (padding if padded else 0)
        if i in dims and (beyond or (padding and not padded)):
            out[i] = stride, padding, extent, before[i], padded
    return out


def _expand_mean(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Expand a mean: first over the dims that one window covers, then the windows of the other dims; those that reach
    over the border are divided by fewer elements."""
    covered, (before, after) = _covered(op), _planes(op)
    is_mean = cut_size(bound, assignment, [f"h{i}" for i in covered]) > 1
    reaching = _reaching(op, bound, assignment)
    if not is_mean and not reaching:
        return None
    x, out, lead = op.inputs[0], op.output(0).dtype, len(_lead(op))
    dims, elements = [lead + i for i in covered], math.prod(before[i] for i in covered)

    def work(b: Builder) -> Value:
        if not is_mean:
            return divided(b, b.call(op.target, *op.args, **op.kwargs))
        total = b.call(aten.sum.dim_IntList, x, dims, True, dtype=wide(out))
        mean = b.to(b.call(aten.div.Tensor, total, elements), out)
        if len(covered) == len(before):
            return mean
        if "adaptive" in op.kind:
            return b.call(op.target, mean, list(after))
        kernel = per_dim(op.argument("kernel_size"), len(before))
        strides = [stride for stride, _, _ in windows_of(op, kernel)]
        window_sizes = [[1 if i in covered else size for i, size in enumerate(sizes)] for sizes in (kernel, strides)]
        made = b.call(op.target, mean, *window_sizes, *map(op.argument, ("padding", "ceil_mode", "count_include_pad")))
        return divided(b, made)

    def divided(b: Builder, made: Value) -> Value:
        for i, numbers in reaching.items():
            windows = positions(b, x, made, lead + i)
            shares = b.call(window_shares, windows, *numbers, len(before) - 1 - i, wide(out))
            made = b.to(b.call(aten.mul.Tensor, made, shares), out)
        return made

    return work


def _plane_text(op: Op) -> str:
    """The notation of operators on whole planes; further inputs and outputs have the same batch and channels."""
    lead = _lead(op)
    sides = [
        ", ".join(
            operand([*lead, *whole(named(len(v.shape) - len(lead), f"{letter}{i}_"))])
            for i, v in enumerate(side)
            if v is not None
        )
        for letter, side in (("s", op.inputs), ("o", op.outputs))
    ]
    return " -> ".join(sides)


register(
    (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default),
    Rule(_maximum_text, with_halos=_local_pool),
)
register(
    (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
    Rule(_mean_text, linear=True, with_halos=_local_pool, expand=_expand_mean),
)
register(
    (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
    Rule(_mean_text, linear=True, localize=_local_adaptive, expand=_expand_mean),
)
register(
    (
        aten.max_pool1d_with_indices.default,
        aten.max_pool2d_with_indices.default,
        aten.max_pool3d_with_indices.default,
        aten.adaptive_max_pool1d.default,
        aten.adaptive_max_pool2d.default,
        aten.adaptive_max_pool3d.default,
        aten.fractional_max_pool2d.default,
        aten.fractional_max_pool3d.default,
        aten.max_unpool2d.default,
        aten.max_unpool3d.default,
    ),
    Rule(_plane_text),
)


# -- resampling


def _keeps_apart(op: Op, before: int, after: int, scale: float | None) -> bool:
    """True where interpolation of `before` to `after` elements reads within the stretches common to both."""
    shared = math.gcd(before, after)
    stretch, made = before // shared, after // shared
    if scale is not None and scale * stretch != made:
        return False  # positions depend on the scale, which the rounded sizes hide
    if "nearest" in op.kind:
        return (stretch * made).bit_count() == 1
    return stretch == made == 1 and not op.argument(
        "align_corners"
    )  # with align_corners, a slice of 1 element has no scale


def _interpolated(op: Op) -> tuple[str, dict[str, int]]:
    count = spatial(op)
    before: list[str] = []
    after: list[str] = []
    sizes: dict[str, int] = {}
    scales = per_dim(op.argument("scale_factors"), count)
    for i, (size, out, scale) in enumerate(zip(op.inputs[0].shape[2:], op.output(0).shape[2:], scales)):
        if _keeps_apart(op, size, out, scale):
            shared = math.gcd(size, out)
            before.append(f"(g{i} a{i}!)")
            after.append(f"(g{i} b{i}!)")
            sizes |= {f"g{i}": shared, f"a{i}": size // shared, f"b{i}": out // shared}
        else:
            before.append(f"s{i}!")
            after.append(f"o{i}!")
    return f"n c {operand(before)} -> n c {operand(after)}", sizes


def _local_interpolated(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.args, op.kwargs
    if op.argument("output_size") is not None:
        args, kwargs = op.with_arguments(output_size=list(local_output_shape(bound, assignment)[2:]))
    return Local(op.target, args, kwargs)


def _sampled(op: Op) -> str:
    """The notation of grid_sampler: the plane stays whole, since a grid position may name any element."""
    count = len(op.inputs[0].shape) - 2
    out = operand(named(count, "o"))
    return f"n c {operand(whole(named(count, 's')))}, n {out} xy! -> n c {out}"


def _grid(op: Op) -> str:
    return f"n rows! columns! -> n {operand(whole(named(len(op.output(0).shape) - 2, 'o')))} rows!"


def _local_grid(op: Op, bound: Bound, assignment: Assignment) -> Local:
    size = [local_output_shape(bound, assignment)[0], *op.argument("size")[1:]]
    return Local(op.target, (op.inputs[0], size, op.argument("align_corners")), {})


register(
    (
        aten.upsample_nearest1d.vec,
        aten.upsample_nearest2d.vec,
        aten.upsample_nearest3d.vec,
        aten.upsample_linear1d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_trilinear3d.vec,
        aten.upsample_bicubic2d.vec,
        *operators(
            *(
                f"_upsample_{way}.vec"
                for way in (
                    "nearest_exact1d",
                    "nearest_exact2d",
                    "nearest_exact3d",
                    "bilinear2d_aa",
                    "bicubic2d_aa",
                    "lanczos2d_aa",
                )
            )
        ),
    ),
    Rule(_interpolated, linear=True, localize=_local_interpolated),
)
register((aten.grid_sampler.default,), Rule(_sampled))
register((aten.affine_grid_generator.default,), Rule(_grid, linear=True, localize=_local_grid))
