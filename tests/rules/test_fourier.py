"""Spectra in models, cut along the other dims beside one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_device import assert_as_one_device
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

X = draw(8, 4, 8)


class Apply(nn.Module):
    def __init__(self, f: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.f = nn.Linear(8, 8, dtype=D), f
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.register_buffer("window", torch.hann_window(4, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, self.layer(x))


def there_and_back(m: nn.Module, h: Tensor) -> Tensor:
    made = torch.stft(h.flatten(1), 4, window=m.window, return_complex=True)
    return torch.istft(made, 4, window=torch.hann_window(4, dtype=D))


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "mixing of tokens": lambda m, h: torch.fft.fft2(h).real,
    "a filter": lambda m, h: torch.fft.irfft(torch.fft.rfft(h) * m.filter, n=8),
    "frequencies": lambda m, h: torch.fft.fftshift(torch.fft.fft(h, dim=1).abs(), 1) * torch.fft.fftfreq(8, dtype=D),
    "spectrogram": lambda m, h: torch.stft(h.flatten(1), 4, window=m.window, return_complex=True).abs(),
    "there and back": there_and_back,
}


TRANSFORMS = {
    "mixing of tokens": "fft_fft2",
    "a filter": "fft_rfft",
    "frequencies": "fft_fft",
    "spectrogram": "stft",
    "there and back": "istft",
}


@pytest.mark.parametrize("mode", ["semi_auto", "dynamic_programming"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_one_device(name: str, mode: str) -> None:
    options = {"cluster": sw.Cluster.of("h100x8", 4).with_free_links()} if mode == "dynamic_programming" else {}
    model = assert_as_one_device(Apply(FUNCTIONS[name]), (X,), (X + 1,), devices=4, mode=mode, **options)
    assert max(model.plan.operator(TRANSFORMS[name]).in_strategy[0]) == 4
