"""Small networks of images and volumes whose convolutions and pools are cut in height, width and depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwright as sw


def block(before: int, after: int, size: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size // 2)
    return nn.Sequential(
        nn.Conv2d(before, after, size, stride, padding, dilation, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


class UNet(nn.Module):
    """Two levels: pools down, transposed convolutions up (kernels of 2 and of 4), and the finer level beside."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2 = block(2, width), block(width, 2 * width)
        self.bottom = nn.Sequential(block(2 * width, 4 * width), block(4 * width, 4 * width, dilation=2))
        self.pool = nn.MaxPool2d(2)
        self.smooth = nn.AvgPool2d(3, 2, 1)
        self.up2, self.up1 = (
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.side2, self.side1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        coarse = self.down2(self.pool(fine))
        y = self.bottom(self.smooth(coarse))
        y = self.side2(torch.cat((coarse, self.up2(y)), 1))
        y = self.side1(torch.cat((fine, self.up1(y)), 1))
        return self.head(y)


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = block(before, after, 3, stride), nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False))
        self.norm = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.b(self.a(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem of 7 x 7 by 2 and a pool of 3 x 3 by 2, residual blocks, the mean over the plane, classes."""

    def __init__(self, width: int = 4, classes: int = 8) -> None:
        super().__init__()
        self.stem, self.pool = block(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Residual(width, width, 1), Residual(width, 2 * width, 2))
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mean(self.blocks(self.pool(self.stem(x)))).flatten(1))


class Volumes(nn.Module):
    """Convolutions in three dims, with groups, strides and the padding "same"."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, width, 3, padding="same")
        self.second = nn.Conv3d(width, width, (3, 5, 3), (1, 2, 1), (1, 2, 1), groups=2)
        self.pool = nn.MaxPool3d(3, (2, 1, 1), 1)
        self.back = nn.ConvTranspose3d(width, 2, (4, 3, 3), (2, 1, 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.pool(torch.relu(self.second(torch.relu(self.first(x))))))


#: Modules whose first input is an image or a volume, and the dims of their further inputs.
MARKED = {
    nn.Conv1d: (3,),
    nn.Conv2d: (4,),
    nn.Conv3d: (5,),
    nn.ConvTranspose2d: (4,),
    nn.ConvTranspose3d: (5,),
    nn.MaxPool2d: (),
    nn.MaxPool3d: (),
    nn.AvgPool2d: (),
    nn.BatchNorm2d: (1, 1, 1, 1),
}


def mark(net: nn.Module, *cuts: int) -> nn.Module:
    """Mark each convolution, pool and batch norm: its spatial dims are cut by these numbers, the rest stays whole."""
    for module in net.modules():
        if type(module) in MARKED:
            sw.shard(module, ((1, 1, *cuts), *((1,) * dims for dims in MARKED[type(module)])))
    return net
