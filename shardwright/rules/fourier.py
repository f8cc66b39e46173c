"""Fourier transforms, and short-time transforms of windows: the transformed dims stay whole, the others may be cut.

    fft       d0 d1 t! -> d0 d1 o!                 along the last dim, or along those that an argument names
    rfft2     d0 t1! t2! -> d0 o1! o2!             an output dim may have another size
    stft      b t!, w! -> b o1! o2!                frequencies and windows of a signal

All are linear: partial sums pass through.

Example: rfft of [8, 16] with dim 0 cut in 4: each rank transforms [2, 16] to [2, 9].
"""

from __future__ import annotations

from ..graph import Op
from ..torch_private import operators
from .dims import dims_of, named, operand, whole
from .registry import Rule, register


def _transformed(op: Op) -> tuple[int, ...]:
    """The dims that a transform, or a shift of frequencies, mixes."""
    rank = len(op.inputs[0].shape)
    dims, sizes = op.argument("dim"), op.argument("s", None)
    if dims is None and sizes is not None:
        return tuple(range(rank - len(sizes), rank))
    return dims_of(dims, rank)


def _transform(op: Op) -> str:
    before, after = named(len(op.inputs[0].shape)), named(len(op.inputs[0].shape))
    for d in _transformed(op):
        before[d], after[d] = f"t{d}!", f"o{d}!"
    return f"{operand(before)} -> {operand(after)}"


def _short_time(op: Op) -> str:
    """The notation of stft and istft: the signals of a batch are independent, and share the window."""
    signal, *window = op.inputs
    spectrum = op.kind == "istft"
    rank = (3 if signal.dtype.is_complex else 4) if spectrum else 2
    batch = ["b"] if len(signal.shape) == rank else []
    sides = [
        operand([*batch, *whole(named(len(value.shape) - len(batch), prefix))])
        for value, prefix in ((signal, "i"), (op.output(0), "o"))
    ]
    return f"{', '.join([sides[0], *('w!' for _ in window)])} -> {sides[1]}"


_TRANSFORMS = """fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift"""
register(operators(*_TRANSFORMS.split()), Rule(_transform, linear=True))
register(operators("stft", "stft.center", "istft"), Rule(_short_time, linear=lambda op: len(op.inputs) == 1))
