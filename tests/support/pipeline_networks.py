"""Pipelines against one device, in float64: networks of four layers, and the comparison of their training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from one_device import Optimizer, close, parallel
from small_networks import D, draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.pipeline.schedules import schedule

#: The stage of each layer of a `Chain`, by how many stages there are.
CUTS = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1), 4: (0, 1, 2, 3)}

#: Settings of a pipeline in which each schedule runs: micro-batches -> (groups of devices, chunks).
SHAPES: dict[str, dict[int, tuple[int, int]]] = {
    **{name: {1: (1, 1), 2: (2, 1), 4: (4, 1)} for name in ("gpipe", "1f1b", "zero_bubble", "csv")},
    **{name: {1: (1, 2), 2: (2, 2), 4: (2, 2)} for name in ("interleaved", "zbv")},
}


class Chain(nn.Module):
    """Four layers, each with a ReLU but the last.

    Args:
        tied: the second and the third have one weight.
        skip: what the first gives is added to what the third gives.
    """

    def __init__(self, tied: bool = False, skip: bool = False, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=D) for _ in range(4))
        for i, layer in enumerate(self.layers):
            layer.weight.data, layer.bias.data = draw(width, width, seed=i) / 4, draw(width, seed=10 + i)
        if tied:
            self.layers[2].weight = self.layers[1].weight
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.layers[0](x))
        third = torch.relu(self.layers[2](torch.relu(self.layers[1](first))))
        return self.layers[3](third + first if self.skip else third)


class Weight(nn.Module):
    """A layer whose weight belongs to another one as well."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class TiedEnds(nn.Module):
    """The first and the last layer have one weight, and nothing else; between them are two layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        weight = nn.Parameter(draw(width, width, seed=3) / 4)
        self.first, self.inner, self.last = Weight(weight), Chain(width=width), Weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(torch.relu(self.first(x)))))


def staged(count: int, path: str = "layers") -> dict[str, int]:
    """The `stage_config` of a `Chain` in so many stages."""
    return {f"{path}.{i}": stage for i, stage in enumerate(CUTS[count])}


def setting(name: str, micro_batches: int, folder: Any = None) -> dict[str, Any]:
    """The arguments of `AutoParallel.pipeline` for a `Chain`; "csv": a file in `folder`, of our own order."""
    groups, chunks = SHAPES[name][micro_batches]
    given = dict(stages=groups, scheduler=name, micro_batches=micro_batches, stage_config=staged(groups * chunks))
    if name == "csv":
        path = folder / "schedule.csv"
        path.write_text(schedule("gpipe", groups, micro_batches).to_csv())
        rows = [row.split(",") for row in path.read_text().splitlines()]
        # All forwards, then the backwards from the last to the first, unlike any schedule that has a name.
        rows = [row[:micro_batches] + row[: micro_batches - 1 : -1] for row in rows]
        path.write_text("\n".join(",".join(row) for row in rows))
        given["scheduler"] = str(path)
    elif chunks == 2:
        given["chunks"] = 2
    return given


def batches(count: int = 2, rows: int = 16, width: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [(draw(rows, width, seed=20 + i), draw(rows, width, seed=30 + i)) for i in range(count)]


def assert_pipeline_as_one_device(
    net: nn.Module,
    given: Sequence[tuple],
    pipeline: Mapping[str, Any],
    *,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    named: Mapping[str, Any] | None = None,
    settle: Callable[[sw.AutoParallel], Any] | None = None,
    reference: Callable[..., Any] | None = None,
    **options: Any,
) -> sw.AutoParallel:
    """Train copies of a model on each batch, as a pipeline and on one device: losses, gradients, parameters and buffers
    agree, and what both return besides.

    Args:
        given: tuples of arguments; with `loss_fn` the last one is the target, else the model returns its loss, alone or
            first.
        pipeline: the arguments of `AutoParallel.pipeline`.
        named: keyword arguments of the model.
        settle: makes further settings.
        reference: (the one-device model, *batch) -> what it returns; None: called as it is.
        options: as `one_device.parallel`.

    Returns:
        The wrapped model.
    """
    one, named = copy.deepcopy(net), dict(named or {})
    model = parallel(net, loss_fn, **options).pipeline(**pipeline)
    if settle is not None:
        settle(model)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    ours, theirs = make(net.parameters()), make(one.parameters())
    for batch in given:
        got = model(*batch, **named)
        if reference is not None:
            expected = reference(one, *batch, **named)
        elif loss_fn is None:
            expected = one(*batch, **named)
        else:
            expected = loss_fn(one(*batch[:-1], **named), batch[-1])
        close(got, expected, "what is returned")
        mine, yours = (x[0] if isinstance(x, tuple) else x for x in (got, expected))
        mine.backward(), yours.backward()
        close(
            {n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()}, "gradients"
        )
        ours.step(), theirs.step(), ours.zero_grad(), theirs.zero_grad()
    close(dict(net.state_dict()), dict(one.state_dict()), "state after the last step")
    return model
