"""Cost of random numbers that are the same on any number of devices: native dropout against ours, exact and fast.

    python benchmarks/random_stream.py               a minute
    python benchmarks/random_stream.py --quick       few rounds
    python benchmarks/random_stream.py --output random_stream.json

One thread. ``elements``: one dropout of p = 0.1 with its backward, on tensors of several sizes; what is called is what
a lowered program calls. ``network``: a step of a network that drops three times: in plain PyTorch, wrapped for one
device, and for eight devices in this process. Contenders take turns, what counts is the ratio of two steps of one
round; before anything is timed, exact losses on eight devices are compared with those on one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from race import Contender, Figure, Results, Spread, order, timed
from rich.console import Console
from torch import Tensor, nn

import shardwright as sw
from shardwright.rules.random_numbers.counter_rng import PLAIN

SIZES = ((64,), (32, 32), (128, 128), (512, 512), (2048, 2048))
P, DEVICES, BATCH, WIDTH = 0.1, 8, 64, 1024
LOSS_TOLERANCE = 2e-6

#: From how many elements on the target holds: below, what counts is the number of calls, not of numbers.
LARGE = 1 << 10


# -- one dropout -------------------------------------------------------------------------------------------------------


def native(x: Tensor) -> Tensor:
    """torch's own."""
    return F.dropout(x, P)


def ours(exact: bool) -> Callable[[Tensor], Tensor]:
    """The call of a lowered program for a dropout on one device."""
    mask = PLAIN[torch.ops.shardwright.mask.default]
    seed = torch.tensor([1, 2, int(exact), 0])

    def dropped(x: Tensor) -> Tensor:
        size = list(x.shape)
        return x * mask(seed, [], x.detach(), [], size, size, 3, 1 - P, 1 / (1 - P), x.dtype, None)

    return dropped


def one_dropout(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Contender:
    x, upstream = torch.randn(shape, requires_grad=True), torch.ones(shape)

    def step() -> Tensor:
        y = function(x)
        y.backward(upstream)
        x.grad = None
        return y.detach()

    return Contender(step, lambda: [], alone=True)


# -- a network ---------------------------------------------------------------------------------------------------------


def network(marked: bool) -> nn.Module:
    """Three wide layers, a dropout after each."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.drops = [sw.shard(F.dropout, ((4, 2),)) if marked else F.dropout for _ in range(3)]

        def forward(self, x: Tensor) -> Tensor:
            for layer, drop in zip(self.layers, self.drops):
                x = drop(torch.relu(layer(x)), P)
            return x

    return Network()


def trained(devices: int | None, random: str = "exact") -> Contender:
    """A step on so many devices in this process; None: plain PyTorch."""
    net = network(marked=devices is not None and devices > 1)
    if devices is not None:
        sw.init(devices=devices)
        mode = "stand_alone" if devices == 1 else "semi_auto"
        net = sw.AutoParallel(net, parallel_mode=mode, random=random).dataset_strategy("full_batch")
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        return loss.detach()

    return Contender(step, lambda: list(net.parameters()), alone=True)


NETWORKS: dict[str, Callable[[], Contender]] = {
    "native": lambda: trained(None),
    "exact": lambda: trained(1),
    "fast": lambda: trained(1, "fast"),
    "exact, eight devices": lambda: trained(DEVICES),
    "fast, eight devices": lambda: trained(DEVICES, "fast"),
}


def check() -> None:
    """Exact losses on eight devices are those on one.

    Raises:
        AssertionError: they are not.
    """
    losses = []
    for devices in (1, DEVICES):
        made = trained(devices)
        torch.manual_seed(5)
        losses.append([made.step().item() for _ in range(3)])
    if not all(abs(a - b) <= LOSS_TOLERANCE * abs(a) for a, b in zip(*losses)) or len(set(losses[0])) < 3:
        raise AssertionError(f"losses on one device {losses[0]}, on {DEVICES} {losses[1]}")


# -- the run -----------------------------------------------------------------------------------------------------------


def race(contenders: dict[str, Contender], steps: int) -> dict[str, list[float]]:
    """Contender -> the milliseconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for entry in contenders.values():
        entry.step()
    for turn in range(steps):
        for name in order(list(contenders), turn):
            times[name].append(1e3 * timed(contenders[name]))
    return times


def measure(results: Results, steps: int) -> None:
    """Everything."""
    for shape in SIZES:
        count = torch.Size(shape).numel()
        section, target = f"{'×'.join(map(str, shape))} elements", {"at_most": 3.0} if count >= LARGE else {}
        entries = {"native": native, "exact": ours(True), "fast": ours(False)}
        results.times[section] = race({name: one_dropout(f, shape) for name, f in entries.items()}, steps)
        results.compare(section, "exact", "native", **target)
        results.compare(section, "fast", "native")
        for name, values in results.times[section].items():
            each = Spread.of([1e6 * ms / count for ms in values])
            results.figures.append(Figure(section, f"{name}, ns an element", each))
    results.times["network"] = race({name: make() for name, make in NETWORKS.items()}, steps)
    results.compare("network", "exact", "native", at_most=3.0)
    results.compare("network", "fast", "native")
    results.compare("network", "exact, eight devices", "fast, eight devices")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="rounds (default: 40)")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--output", type=Path, default=Path("random_stream.json"), help="default: random_stream.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    console, results = Console(), Results()
    with console.status("random stream"):
        check()
        measure(results, 5 if args.quick else args.steps)
    return results.finish(console, args.output)


if __name__ == "__main__":
    sys.exit(main())
