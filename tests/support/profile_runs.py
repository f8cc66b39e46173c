"""Profiles of a small network: in one process, and on ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime.distributed.process_groups import ProcessGroups

#: The names of the operators of `Blocks`.
OPERATORS = [
    *(f"layers.{i}.{name}" for i in (0, 1) for name in ("up linear", "relu", "down linear", "add")),
    "head linear",
    "cross_entropy_loss",
]

PIPELINE = {"stages": 2, "micro_batches": 2, "stage_config": {"layers.0": 0, "layers.1": 1, "head": 1}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Equal blocks and a head, with its loss."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), y)


class Towers(nn.Module):
    """Two branches on two devices; the result of the first is redistributed beside the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.join = sw.Operator(torch.add)
        for branch in (self.first, self.second):
            sw.shard(branch, ((2, 1), (1, 1)))
        self.join.shard(((1, 2), (1, 2)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.first(x)
        return nn.functional.cross_entropy(self.join(torch.sin(torch.tanh(self.second(x))), first), y)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.arange(rows * 16.0).view(rows, 16).cos(), torch.arange(rows) % 8


def wrapped(kind: str, net: nn.Module | None = None) -> Any:
    """A parallel model, with what the words of `kind` ask for."""
    net = net or (Towers() if "towers" in kind else Blocks())
    if "recompute" in kind:
        for layer in net.layers:
            sw.recompute(layer)
    mode = "dynamic_programming" if "searched" in kind else "semi_auto" if "towers" in kind else "data_parallel"
    model = sw.AutoParallel(net, parallel_mode=mode)
    model.dataset_strategy("full_batch")
    if "level" in kind:
        model.hsdp(threshold=0, optimizer_level=kind[kind.index("level") :][:6])
    if "pipeline" in kind:
        model.pipeline(**PIPELINE)
    return model


def profiled(model: Any, path: Path, steps: int = 2, rows: int = 8) -> Path:
    """A trace of steps of a model; the first step is not in it."""
    model(*batch(rows)).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            model(*batch(rows)).backward()
    profile.export_chrome_trace(str(path))
    return path


def on_ranks(rank: int, world: int, folder: Path, kinds: tuple[str, ...]) -> None:
    """A trace of each kind and rank, and rank 0's plans; ``library`` in a kind: as on NCCL."""
    sw.init()
    made = ProcessGroups.__init__
    for kind in kinds:
        if "library" in kind:
            ProcessGroups.__init__ = lambda self, *args, **given: made(
                self, *args, **(given | {"exchanges": False, "share": False})
            )
        torch.manual_seed(0)
        model = wrapped(kind)
        profiled(model, folder / f"{kind}.{rank}.json")
        if rank == 0:
            model.plan.save(folder / f"{kind}.plan.json")


def written(path: Path, each: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [], **more, "traceEvents": each}))
    return path


def events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]


def ranges(path: Path) -> list[str]:
    """The names of our ranges of a trace, without the prefix, in order of their begins."""
    ours = [e for e in events(path) if e["name"].startswith("sw::")]
    return [e["name"].removeprefix("sw::") for e in sorted(ours, key=lambda e: e["ts"])]


def inside(each: list[dict[str, Any]], event: dict[str, Any]) -> str:
    """The name of the innermost event around an event; "": none."""
    around = [
        e
        for e in each
        if e["tid"] == event["tid"] and e["ts"] <= event["ts"] and event["ts"] + event["dur"] <= e["ts"] + e["dur"]
    ]
    return min(around, key=lambda e: e["dur"])["name"] if around else ""


def linked_by_autograd(path: Path) -> list[tuple[str, str, str]]:
    """(autograd function, our range in the forward, our range in the backward), by the numbers with which the profiler
    itself links a function to the operator that made it: the last one of its number."""
    each = [e for e in events(path) if "Sequence number" in e.get("args", {})]
    ours = [e for e in events(path) if e["name"].startswith("sw::") and not e["name"].startswith("sw::st")]
    made: dict[int, dict[str, Any]] = {}
    for e in sorted(each, key=lambda e: e["ts"]):
        if not e["args"]["Fwd thread id"]:
            made[e["args"]["Sequence number"]] = e
    return [
        (e["name"], inside(ours, made[e["args"]["Sequence number"]]), inside(ours, e))
        for e in each
        if e["args"]["Fwd thread id"] and "AccumulateGrad" not in e["name"] and e["args"]["Sequence number"] in made
    ]


def check_backward(path: Path) -> None:
    """Each function of autograd runs in the range that belongs to the range of its operator."""
    links = linked_by_autograd(path)
    assert len([link for link in links if link[1]]) > 10
    assert [link for link in links if link[2] != (f"{link[1]} backward" if link[1] else "")] == []
