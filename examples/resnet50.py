"""ResNet-50 on CIFAR-10, written for one device: data-parallel, or with single operators split.

    python examples/resnet50.py --steps 20                                      eight devices inside this one process
    shardwright run --worker_num 8 examples/resnet50.py --steps 20               eight processes
    torchrun --nproc-per-node 8 examples/resnet50.py --parallel_mode semi_auto   the same, by PyTorch's own launcher
    python examples/resnet50.py --parallel_mode stand_alone                      one device

`data_parallel`: every device has the whole network and a part of the batch; batch norms see that part alone, unless
--sync_batch_norm. `semi_auto`: the first convolution is split by its output channels and the last layer by its classes,
the others by the batch; batch norms see the whole batch, as on one device.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from cifar import CLASSES, images
from common import positive

import shardwright as sw


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, and the input added; `stride` is the middle one's."""

    def __init__(self, before, inside, stride):
        super().__init__()
        after = 4 * inside
        self.conv1, self.bn1 = nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside)
        self.conv2, self.bn2 = nn.Conv2d(inside, inside, 3, stride, 1, bias=False), nn.BatchNorm2d(inside)
        self.conv3, self.bn3 = nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """Four stages of bottlenecks.

    Args:
        blocks: how many in each stage: (3, 4, 6, 3) is ResNet-50.
        width: channels of the stem; 64 is ResNet-50.
        small: a stem for images of 32 by 32: 3x3 without a stride, in place of 7x7 by 2 and a pool by 2.
    """

    def __init__(self, blocks=(3, 4, 6, 3), width=64, classes=CLASSES, small=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if small else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        before, stages = width, []
        for stage, count in enumerate(blocks):
            inside = width * 2**stage
            for i in range(count):
                stages.append(Bottleneck(before, inside, 2 if stage > 0 and i == 0 else 1))
                before = 4 * inside
        self.blocks = nn.Sequential(*stages)
        self.fc = nn.Linear(before, classes)

    def forward(self, x):
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = F.adaptive_avg_pool2d(self.blocks(x), 1)
        return self.fc(x.flatten(1))


def split(net, devices):
    """Mark two layers: each device of a pair has one half of the stem's channels and of the classes."""
    half = 2 if devices % 2 == 0 else 1
    rows = devices // half
    sw.shard(net.conv1, in_strategy=((rows, 1, 1, 1), (half, 1, 1, 1)))  # image; weight [channels, 3, 3, 3]
    sw.shard(net.fc, in_strategy=((rows, 1), (half, 1), (half,)))  # features; weight [classes, features]; bias
    return net


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parallel_mode", choices=("data_parallel", "semi_auto", "stand_alone"), default="data_parallel"
    )
    parser.add_argument("--devices", type=positive, default=8, help="where no launcher says how many there are")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=None, help="steps in an epoch (default: all batches)")
    parser.add_argument("--batch", type=positive, default=32, help="images in a step, over all devices")
    parser.add_argument("--width", type=positive, default=64, help="channels of the stem; 64 is ResNet-50")
    parser.add_argument("--blocks", type=positive, nargs=4, default=(3, 4, 6, 3), help="in each stage")
    parser.add_argument("--stem", choices=("small", "large"), default="small", help="for images of 32 or 224 pixels")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--sync_batch_norm", action="store_true", help="data_parallel: statistics of the whole batch")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    dtype = getattr(torch, args.dtype)
    runtime = sw.init(devices=args.devices)  # the world that a launcher started, or so many devices in this process
    torch.manual_seed(0)
    net = ResNet(args.blocks, args.width, small=args.stem == "small").to(dtype)
    if args.parallel_mode == "semi_auto":
        split(net, runtime.devices)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, fused=True)

    model = sw.AutoParallel(net, nn.CrossEntropyLoss(), args.parallel_mode, sync_batch_norm=args.sync_batch_norm)
    model.dataset_strategy("full_batch")  # every process feeds the same whole batch

    losses = []
    for epoch in range(args.epochs):  # from here on: the loop of a one-device program
        loader = images(args.batch, shuffle_seed=epoch, dtype=dtype, limit=args.steps)
        for step, (image, label) in enumerate(loader):
            loss = model(image, label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 5 == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {losses[-1]}", flush=True)
    return losses


if __name__ == "__main__":
    main()
