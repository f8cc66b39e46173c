"""Space and channels exchanged: patches taken out and put back, pixels shuffled. Nothing is computed but sums of what
overlaps, so that open sums pass."""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import compound, named, operand
from .notation import Assignment, Bound
from .registry import Local, Rule, local_output_shape, register
from .window import windowed, windows_of

aten = torch.ops.aten


def _patches(op: Op) -> tuple[str, str, dict[str, int]]:
    """The texts of an image and of its patches ``n (c kernel) windows``, and the sizes of their factors."""
    is_image_made = op.kind == "col2im"
    image = (op.outputs if is_image_made else op.inputs)[0].shape
    kernel = op.argument("kernel_size")
    counts = [(size + 2 * padding - extent) // stride + 1
              for size, (stride, padding, extent) in zip(image[-2:], windows_of(op, kernel))]
    planes, windows, sizes = windowed(op, image[-2:], counts, kernel)
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
    """pixel_shuffle spreads each channel's r·r parts over the plane, pixel_unshuffle gathers them."""
    is_spread = op.kind == "pixel_shuffle"
    factor = op.argument("upscale_factor" if is_spread else "downscale_factor")
    deep, flat = "... (c p! q!) h w", "... c (h p!) (w q!)"
    *_, c, h, w = (op.outputs if is_spread else op.inputs)[0].shape
    sizes = {"p": factor, "q": factor, "c": c, "h": h // factor, "w": w // factor}
    return (f"{deep} -> {flat}" if is_spread else f"{flat} -> {deep}"), sizes


def _channels(op: Op) -> str:
    """channel_shuffle: the channels stay whole, since neighbours come to lie far apart."""
    rest = operand(named(len(op.inputs[0].shape) - 2, "s"))
    return f"n c! {rest} -> n c! {rest}"


register((aten.im2col.default,), Rule(_taken, linear=True))
register((aten.col2im.default,), Rule(_put_back, linear=True, localize=_local_put_back))
register((aten.pixel_shuffle.default, aten.pixel_unshuffle.default), Rule(_shuffled, linear=True))
register((aten.channel_shuffle.default,), Rule(_channels, linear=True))
