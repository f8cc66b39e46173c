"""The warnings that announce further programs."""

from __future__ import annotations

import warnings

import torch
from one_device import parallel
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw

X = draw(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=D)
        self.beta, self.gamma, self.mode, self.scale = 0.0, 1, "a", torch.ones((), dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.beta * self.gamma * len(self.mode) * float(self.scale)


def words(model: sw.AutoParallel) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(X)
    return [str(w.message) for w in caught if w.category is sw.RecaptureWarning]


def test_a_number_that_changes_at_each_step() -> None:
    """The third warning advises a tensor and is the last; other attributes are counted by themselves."""
    net = Net()
    model = parallel(net, devices=2)
    model(X)
    for step in range(1, 6):
        net.beta = step / 10
        texts = words(model)
        assert len(texts) == (step < 4)
        for text in texts:
            assert text.startswith(f"net.beta was {(step - 1) / 10} and is {step / 10}: the model is captured")
            assert ("a registered buffer, or a tensor as an input" in text) == (step == 3)
            assert ("Further changes of net.beta are not announced" in text) == (step == 3)
    net.gamma = 2
    assert words(model) == ["net.gamma was 1 and is 2: the model is captured and planned anew"]
    for mode in "bcdefgh":
        net.mode = mode
        assert len(words(model)) == 1  # no number
    for step in range(4):
        net.scale.fill_(step / 8)
        assert len(words(model)) == (step < 3)
