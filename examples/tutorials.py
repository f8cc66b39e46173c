"""The four tutorial networks, each trained on eight devices inside this one process and on one device.

Both start from the same values and see the same batches, in float64. A strategy changes where things lie and what is
sent, never what is computed: the losses may differ by the order of floating-point sums alone.
"""

import contextlib
import io
import math
import sys
import time

import layout_functional
import layout_objects
import operator_functional
import operator_objects
import torch
import torch.nn as nn
from data import digits
from rich import box
from rich.console import Console
from rich.table import Table

STEPS, BATCH, TOLERANCE = 50, 32, 1e-6
SHOWN = (0, 10, 20, 30, 40, 49)
NETWORKS = {
    "operator, objects": operator_objects,
    "operator, functional": operator_functional,
    "layout, objects": layout_objects,
    "layout, functional": layout_functional,
}


def one_device(example):
    """The losses of plain PyTorch: a marked operator that no wrapper captures is just its function."""
    torch.manual_seed(0)
    net = example.Network(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, fused=True)
    loss_fn = nn.CrossEntropyLoss()
    losses = []
    for image, label in digits(BATCH, dtype=torch.float64, limit=STEPS):
        loss = loss_fn(net(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def eight_devices(example):
    """The losses of the example as a user runs it."""
    with contextlib.redirect_stdout(io.StringIO()):
        return example.main(["--steps", str(STEPS), "--batch_size", str(BATCH), "--dtype", "float64"])


def timed(train, example):
    start = time.perf_counter()
    return train(example), time.perf_counter() - start


def difference(one, eight):
    """The largest difference over all steps; infinite if a loss is missing or not a number."""
    gaps = [abs(a - b) for a, b in zip(one, eight)]
    if not len(one) == len(eight) == STEPS or not all(map(math.isfinite, gaps)):
        return math.inf
    return max(gaps)


def main():
    console = Console(file=sys.stdout)  # the examples' own lines are kept from it
    console.print(f"{STEPS} steps of {BATCH} digits, float64: eight devices in this process, and one")
    table = Table(
        "network",
        "step",
        "1 device",
        "8 devices",
        "max. diff.",
        "seconds",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in table.columns[1:]:
        column.justify = "right"

    next(digits(BATCH))  # so that the first time does not pay for loading the digits
    worst = 0.0
    for name, example in NETWORKS.items():
        with console.status(f"{name}: 8 devices"):
            eight, eight_seconds = timed(eight_devices, example)
        with console.status(f"{name}: 1 device"):
            one, one_seconds = timed(one_device, example)
        gap = difference(one, eight)
        worst = max(worst, gap)
        for row, step in enumerate(step for step in SHOWN if step < min(len(one), len(eight))):
            ends = () if row else (f"{gap:.1e}", f"{one_seconds:.1f} / {eight_seconds:.1f}")
            table.add_row("" if row else name, str(step), f"{one[step]:.10f}", f"{eight[step]:.10f}", *ends)
        table.add_section()
    console.print(table)

    if not worst <= TOLERANCE:
        console.print(f"The losses differ by up to {worst:.1e}, more than {TOLERANCE:.0e}.", style="bold red")
        return 1
    console.print(f"The same losses on eight devices as on one: {worst:.1e} apart at most.", style="green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
