"""A dropout in one kernel, and its mask in another, where Triton compiles for the device: NVIDIA's, AMD's and Intel's
GPUs.

Each element of the mask is a comparison of half a word with ``p·2³²`` (`counter_rng`). The kernel computes the word,
takes the half and stores the comparison: one byte is written for each element, and positions of rows alone are read.
The operators of `counter_rng.device_words` write and read the words fifteen times. The bits are the same.

The kernel of a dropout (`drop`) reads x, and writes x · mask · scale beside the mask. The product is rounded once, as
that of ``x * mask * scale``.

Example: the slice [2, 3] at row 1 of a whole tensor [4, 6] has the rows at positions 6 and 12. Its element (1, 2) has
position 14: the lower half of word 7.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # a build of torch for CPUs alone
    triton = tl = None

__all__ = ["available", "drop", "store_mask"]

#: Elements of one program of the kernel.
BLOCK = 1024


def available(device: torch.device) -> bool:
    """True where Triton compiles for a device."""
    return triton is not None and device.type in ("cuda", "xpu")


def _half_at(  # type: ignore[no-untyped-def]  # Triton reads annotations: tensors have none
    at, inside, rows, run, first, start, step, MANY: tl.constexpr
):
    """The halves of words that belong to elements, as signed numbers.

    Args:
        at: the numbers of the elements; `inside` is True for those that are there.
        rows, run, first, start, step, MANY: as of `_mask_kernel`.
    """
    position = tl.load(rows + at // run, mask=inside, other=0) + at % run if MANY else at + first
    z = (start + (position >> 1) * step).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return tl.where(position % 2 == 0, z, z >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


def _mask_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations: pointers have none
    out,
    rows,
    numel: tl.int64,
    run: tl.int64,
    first: tl.int64,
    start: tl.int64,
    step: tl.int64,
    below: tl.int32,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store ``half < below`` for `BLOCK` elements of `out`.

    Args:
        out: booleans, as bytes.
        rows: the position of the first element of each run; read where `MANY` is set, else `first` is the only one.
        numel, run: the numbers of elements of the mask and of a run.
        start, step: of the stream, as signed numbers.
        below: the bound of a half, as a signed number of 32 bits.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    half = _half_at(at, inside, rows, run, first, start, step, MANY)
    tl.store(out + at, (half < below).to(tl.uint8), mask=inside)


def _drop_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations: pointers have none
    x,
    y,
    out,
    rows,
    numel: tl.int64,
    run: tl.int64,
    first: tl.int64,
    start: tl.int64,
    step: tl.int64,
    below: tl.int32,
    scale: tl.float32,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store x · mask · scale in `y`, and the mask in `out`; further arguments as of `_mask_kernel`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    keep = _half_at(at, inside, rows, run, first, start, step, MANY) < below
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32) * keep.to(tl.float32) * scale
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
    tl.store(out + at, keep.to(tl.uint8), mask=inside)


if triton is not None:
    _half_at = triton.jit(_half_at)
    # Numbers that differ from call to call are not compiled into the kernel.
    _CALLS = ["numel", "run", "first", "start", "step", "below", "scale"]
    _compiled = triton.jit(_mask_kernel, do_not_specialize=_CALLS[:-1])
    _compiled_drop = triton.jit(_drop_kernel, do_not_specialize=_CALLS)


def drop(
    x: Tensor, rows: Tensor | int, run: int, start: int, step: int, below: int, scale: float
) -> tuple[Tensor, Tensor]:
    """x · mask · scale, and the mask, in one kernel.

    Args:
        x: contiguous, of a dtype that is multiplied in float32.
        rows, run, start, step, below: as of `store_mask`.
    """
    y, mask = torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)
    numel, many = x.numel(), not isinstance(rows, int)
    first = 0 if many else rows
    where = rows if many else mask
    _compiled_drop[(-(-numel // BLOCK),)](
        x, y, mask.view(torch.uint8), where, numel, run, first, start, step, below, scale, MANY=many, BLOCK=BLOCK
    )
    return y, mask


def store_mask(out: Tensor, rows: Tensor | int, run: int, start: int, step: int, below: int) -> None:
    """Fill a mask.

    Args:
        out: booleans, contiguous.
        rows: the position of the first element of each run, on the same device; or of the only run.
        run: elements of a run.
        start, step: of the stream, as signed numbers of 64 bits.
        below: an element is True where its half, as a signed number of 32 bits, is below.
    """
    numel, many = out.numel(), not isinstance(rows, int)
    first = 0 if many else rows
    where = rows if many else out
    _compiled[(-(-numel // BLOCK),)](
        out.view(torch.uint8), where, numel, run, first, start, step, below, MANY=many, BLOCK=BLOCK
    )
