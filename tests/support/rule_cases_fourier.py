"""Concrete calls of Fourier transforms."""

from __future__ import annotations

import torch
from rule_cases import fixed, rand
from rule_reference import collected

from shardwright.torch_private import operators

aten = torch.ops.aten

CASES, case = collected()

WINDOWS = """bartlett_window bartlett_window.periodic blackman_window blackman_window.periodic hamming_window
    hamming_window.periodic hann_window hann_window.periodic kaiser_window kaiser_window.periodic"""


def waves(*shape: int) -> torch.Tensor:
    """Complex numbers that want a gradient."""
    return torch.complex(fixed(rand(*shape)), fixed(rand(*shape))).requires_grad_()


for name in ("fft", "ifft", "rfft", "ihfft", "irfft", "hfft"):
    made = waves if name in ("irfft", "hfft") else rand
    target, two, many = (getattr(aten, f"fft_{name}{kind}").default for kind in ("", "2", "n"))
    case(2, target, made(4, 8, 6))
    case(1, target, made(4, 8), 5, 0)
    case(0, target, made(8), None, -1, "ortho")
    case(1, two, made(8, 4, 6))
    case(1, two, made(4, 8, 6), None, [0, 2], "ortho")
    case(0, many, made(4, 6))
    case(1, many, made(8, 4, 6), [4, 4])
    case(2, many, made(4, 8, 6), None, [-1])
case(2, aten.fft_fft.default, waves(4, 8, 6))
for target in operators("fft_fftshift", "fft_ifftshift"):
    case(2, target, rand(4, 8, 5), [2])
    case(2, target, rand(4, 8, 5), -1)
    case(0, target, rand(4, 8))
case(0, aten.fft_fftfreq.default, 8)
case(0, aten.fft_rfftfreq.default, 8, 0.5)
for target in operators(*WINDOWS.split()):
    case(0, target, 8, **({"periodic": False} if "periodic" in str(target) else {}))
for target in operators("hamming_window.periodic_alpha"):
    case(0, target, 8, True, 0.5)
for target in operators("hamming_window.periodic_alpha_beta"):
    case(0, target, 8, True, 0.5, 0.5)
for target in operators("kaiser_window.beta"):
    case(0, target, 8, True, 10.0)

_WINDOW = torch.hann_window(4, dtype=torch.float64)
for target in operators("stft"):
    case(1, target, rand(8, 12), 4, return_complex=True)
    case(1, target, rand(8, 12), 4, 2, 4, rand(4), return_complex=True)
    case(1, target, rand(8, 12), 4, None, None, _WINDOW, return_complex=False)
    case(0, target, rand(12), 4, return_complex=True)
for target in operators("stft.center"):
    case(1, target, rand(8, 12), 4, return_complex=True)
for target in operators("istft"):
    case(1, target, waves(8, 3, 9), 4, None, None, _WINDOW)
    case(0, target, waves(3, 9), 4, None, None, _WINDOW)
