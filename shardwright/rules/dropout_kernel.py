"""The mask of a dropout in one kernel, where Triton compiles for the device: NVIDIA's, AMD's and Intel's GPUs.

Each element of the mask is a comparison of half a word with ``p·2³²`` (`counter_rng`). The kernel computes the word,
takes the half and stores the comparison: one byte is written for each element, and positions of rows alone are read.
The operators of `counter_rng.device_words` write and read the words fifteen times. The bits are the same.

Example: the slice [2, 3] at row 1 of a whole tensor [4, 6] has the rows at positions 6 and 12. Its element (1, 2) has
position 14: the lower half of word 7.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

__all__ = ["available", "store_mask"]

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # a build of torch for CPUs alone
    triton = tl = None


#: Elements of one program of the kernel.
BLOCK = 1024


def available(device: torch.device) -> bool:
    """True where Triton compiles for a device."""
    return triton is not None and device.type in ("cuda", "xpu")


def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations: pointers have none
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
    position = tl.load(rows + at // run, mask=inside, other=0) + at % run if MANY else at + first
    z = (start + (position >> 1) * step).to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    half = tl.where(position % 2 == 0, z, z >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.store(out + at, (half < below).to(tl.uint8), mask=inside)


if triton is not None:
    # Numbers that differ from call to call are not compiled into the kernel.
    _compiled = triton.jit(_kernel, do_not_specialize=["numel", "run", "first", "start", "step", "below"])


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
