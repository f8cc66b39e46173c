"""A small GPT, trained on eight devices inside this one process and on one device, side by side.

    python examples/demo.py              what `make demo` runs: half a minute
    python examples/demo.py --steps 5    fewer steps

The model is `gpt.py` as it stands: the batch is cut in two, every product in four. Both runs begin with the same values
and see the same text, in float64. A plan changes where tensors lie and what is sent, never what is computed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import positive
from gpt import GPT, mark
from language import Loss, passages
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn

import shardwright as sw

DEVICES, DATA_PARALLEL, MODEL_PARALLEL = 8, 2, 4
BATCH, LENGTH, LAYERS, WIDTH = 8, 64, 4, 64
TOLERANCE = 1e-9
COLOURS = ("blue", "dark_orange", "green", "red", "cyan", "yellow", "magenta", "white")
GLYPHS = "█▓▒░"
BAR = 40  # columns of the longest bar

#: Dims of a weight [out, in].
DIMS = ("rows", "columns")

#: Weights of the first layer and of both ends, by their names for readers.
WEIGHTS = {
    "embedding": "tokens.weight",
    "query": "blocks.0.attention.query.weight",
    "out": "blocks.0.attention.out.weight",
    "up": "blocks.0.up.weight",
    "down": "blocks.0.down.weight",
    "norm": "blocks.0.norm1.weight",
}


class Training:
    """A model in training, with its loss and its optimizer."""

    def __init__(self, devices: int) -> None:
        torch.manual_seed(0)
        net, self.loss_fn = GPT(length=LENGTH, layers=LAYERS, width=WIDTH).double(), Loss()
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=True)
        self.model: sw.AutoParallel | None = None
        self.net = net
        if devices > 1:
            mark(net, self.loss_fn, DATA_PARALLEL, MODEL_PARALLEL)
            self.model = sw.AutoParallel(net, self.loss_fn).dataset_strategy("full_batch")

    def step(self, tokens: torch.Tensor, following: torch.Tensor) -> float:
        """The loss of one step: the same loop for one device and for eight."""
        loss = self.loss_fn(self.net(tokens), following) if self.model is None else self.model(tokens, following)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def slices(plan: sw.Plan) -> Table:
    """A picture of the plan: for each weight the slice that each device holds, in one colour a slice."""
    table = Table(title="What each device holds: one colour and number a slice", title_justify="left", box=None)
    table.add_column("weight")
    table.add_column("shape", justify="right")
    for rank in range(DEVICES):
        table.add_column(f"device {rank}" if not rank else str(rank), justify="center")
    table.add_column("cut", no_wrap=True)
    for name, path in WEIGHTS.items():
        value = plan.parameters[path]
        layout, shape = value.layout, value.shape
        places = [tuple((s.start, s.stop) for s in layout.slice(shape, rank)) for rank in range(DEVICES)]
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        cells = [Text(f" {numbers[p]} ", style=f"bold black on {COLOURS[numbers[p]]}") for p in places]
        parts = [whole // local for whole, local in zip(shape, layout.local_shape(shape))]
        cut = ", ".join(f"{DIMS[dim]} in {part}" for dim, part in enumerate(parts) if part > 1) or "whole on each"
        table.add_row(name, "x".join(map(str, shape)), *cells, cut)
    return table


def bars(rows: Mapping[str, Mapping[str, float]]) -> Group:
    """A picture of memory: a bar for each row, a colour for each kind of tensors."""
    kinds = [kind for kind in next(iter(rows.values())) if any(row.get(kind) for row in rows.values())]
    most = max(sum(row.values()) for row in rows.values())
    title = Text("Memory at its peak:")
    for kind, glyph, colour in zip(kinds, GLYPHS, COLOURS):
        title.append(f"  {glyph * 2} ", style=colour).append(kind)
    table = Table(box=None, show_header=False)
    for name, row in rows.items():
        bar = Text()
        for kind, glyph, colour in zip(kinds, GLYPHS, COLOURS):
            bar.append(glyph * round(BAR * row.get(kind, 0) / most), style=colour)
        table.add_row(name, bar, f"{sum(row.values()) / 2**20:.1f} MiB")
    return Group(title, table)


def line(step: int, steps: int, one: float, eight: float) -> Text:
    """The line that changes while the models train."""
    filled = round(BAR / 2 * step / steps)
    return Text(
        f"step {step} of {steps} {'━' * filled}{'╌' * (BAR // 2 - filled)} loss {one:.8f} on one, {eight:.8f} on eight"
    )


def trained(console: Console, steps: int) -> tuple[float, sw.Plan, sw.Plan]:
    """The largest relative difference of the losses, and the plans for eight devices and for one."""
    sw.init(devices=DEVICES)
    one, eight, worst = Training(1), Training(DEVICES), 0.0
    assert eight.model is not None
    tokens, following = next(passages(BATCH, LENGTH))
    alone = sw.plan(one.net, (tokens,), one.loss_fn, following, parallel_mode="stand_alone", devices=1)
    shown: RenderableType = Text("capturing and planning ...")
    with Live(shown, console=console, auto_refresh=False, transient=False) as live:
        for step, batch in enumerate(passages(BATCH, LENGTH, limit=steps), start=1):
            losses = one.step(*batch), eight.step(*batch)
            gap = abs(losses[0] - losses[1]) / abs(losses[0])
            worst = max(worst, gap if gap == gap else float("inf"))
            plan = eight.model.plan
            if step == 1:
                pictures = Group(slices(plan), Text(), bars(memory(alone, plan)), Text())
            live.update(Group(pictures, line(step, steps, *losses)), refresh=console.is_terminal)
        live.refresh()
    return worst, plan, alone


def memory(alone: sw.Plan, plan: sw.Plan) -> dict[str, dict[str, float]]:
    """Bytes of a device by kind, at the moment when it holds most: they add up to the plan's peak."""
    rows = {}
    for name, each in (("one device", alone), (f"each of {DEVICES}", plan)):
        held = each.timeline.kinds
        row = {kind: held.get(kind, 0.0) for kind in ("parameters", "gradients", "optimizer")}
        rows[name] = row | {"activations": each.peak - sum(row.values())}  # and all else that is alive then
    return rows


def called(command: str) -> str:
    """A command as this shell can run it: with the path of this environment, unless the environment is active."""
    here = Path(sys.executable).with_name("shardwright")
    return command if shutil.which("shardwright") else f"{os.path.relpath(here.parent)}/{command}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=40)
    args = parser.parse_args(argv)
    console = Console(file=sys.stdout)
    console.print(
        f"A GPT of {LAYERS} layers in float64, on {DEVICES} devices inside this process and on one.\n"
        f"The plan: data {DATA_PARALLEL} x tensor {MODEL_PARALLEL}.\n"
    )
    worst, plan, alone = trained(console, args.steps)
    if not worst <= TOLERANCE:
        console.print(f"\nThe losses differ by up to {worst:.1e}, more than {TOLERANCE:.0e}.", style="bold red")
        return 1
    console.print(
        f"\nsame losses ({worst:.0e} apart at most), {plan.sent:,} bytes sent a step and device,\n"
        f"peak {plan.peak / 2**20:.1f} MiB a device (one device alone: {alone.peak / 2**20:.1f} MiB)\n",
        style="green",
        highlight=False,
    )
    console.print("Next:")
    for command, meaning in NEXT.items():
        console.print(f"  {called(command)}\n      {meaning}", highlight=False, soft_wrap=True)
    return 0


#: The commands to try next, and what each does.
NEXT = {
    "shardwright plan examples/gpt.py --mode dynamic_programming": "let a search plan the same script",
    "shardwright explain plan.json": "why each operator is split as it is",
    "shardwright run --worker_num=2 examples/gpt.py --model_parallel 2": "the same script on two processes",
}

if __name__ == "__main__":
    sys.exit(main())
