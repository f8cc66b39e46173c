"""A small ResNet and its loss in single operators, as the goldens have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

#: Names of the original's parameters and operators -> ours.
NAMES = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
KINDS = {"Conv2D": "conv2d", "BatchNorm": "batch_norm", "ReLU": "relu", "MaxPool": "max_pool2d", "MatMul": "linear"}


def conv(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after)]


class Bottleneck(nn.Module):
    def __init__(self, before: int, inside: int, after: int, stride: int) -> None:
        super().__init__()
        self.c = nn.Sequential(
            *conv(before, inside, 1), nn.ReLU(), *conv(inside, inside, 3, stride), nn.ReLU(), *conv(inside, after, 1)
        )
        self.d = nn.Sequential(*conv(before, after, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.c(x) + self.d(x))


class ResNetLike(nn.Module):
    """Stem, two bottlenecks, mean over the places, one product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.b1, self.b2 = Bottleneck(64, 64, 256, 1), Bottleneck(256, 128, 512, 2)
        self.fc = nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.b2(self.b1(self.stem(x))).mean((2, 3), keepdim=True).flatten(1))


def expanded_cross_entropy(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Softmax cross entropy in single operators, as the original writes it."""
    raised = torch.exp(scores - scores.amax(1, keepdim=True))
    logs = torch.log(raised / raised.sum(1, keepdim=True) + 1e-24)
    return ((F.one_hot(target, scores.shape[1]) * logs).sum(1) * -1.0).mean()
