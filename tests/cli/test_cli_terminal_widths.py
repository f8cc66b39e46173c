"""Commands that print tables, in a terminal of 80 and of 100 columns: no line is longer, and no word is broken."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rich.console
import torch
from pipeline_networks import Chain, setting
from test_description import gpt, transformer
from test_pipeline_document import planned
from torch import nn

import shardwright as sw
from shardwright import process_runtime as runtime_init
from shardwright.cli import main as cli
from shardwright.runtime.profile_ranges import RangeNames

MODEL = """
import torch
from torch import nn

class LongNamedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.feed_forward_projection = nn.Linear(width, 4 * width)
        self.feed_forward_reduction = nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.feed_forward_reduction(torch.relu(self.feed_forward_projection(x)))

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.transformer_layers = nn.ModuleList(LongNamedBlock(width) for _ in range(3))
    def forward(self, x):
        for layer in self.transformer_layers:
            x = layer(x)
        return x

def build(width=64):
    x = torch.ones(width, width)
    return dict(net=Net(width), inputs=(x,), loss_fn=nn.MSELoss(), targets=x)

def large():
    return build(1024)
"""

#: Each command, as words.
COMMANDS = [
    "plan --devices 16 --cluster h100x8x2 --mode dynamic_programming --output made.json model.py:large",
    "plan diff plan.json other.json",
    "plan diff pipeline.json other_pipeline.json",
    "explain plan.json",
    "explain plan.json transformer_layers.1",
    "explain plan.json feed_forward_reduction",
    "explain pipeline.json",
    "explain pipeline.json layers.2",
    "explain attention.json blocks.1.attention",
    "explain attention.json",
    "simulate plan.json",
    "simulate pipeline.json",
    "verify --devices 4 --steps 1 model.py:build",
    "rehearse plan.json --steps 1",
    "compare-trace plan.json trace.json",
    "checkpoint info runs",
    "checkpoint verify runs",
    "doctor --quick",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans of several kinds, a trace and a run's checkpoints."""
    made = tmp_path_factory.mktemp("widths")
    (made / "model.py").write_text(MODEL)
    names: dict[str, Any] = {}
    exec(MODEL, names)
    given = names["large"]()
    plan = sw.plan(**given, devices=16, cluster="h100x8x2", parallel_mode="dynamic_programming")
    plan.save(made / "plan.json")
    other = {"hsdp": {"threshold": 0, "optimizer_level": "level3"}, "dataset_strategy": "data_parallel"}
    sw.plan(**given, devices=16, cluster="h100x8x2", parallel_mode="data_parallel", **other).save(made / "other.json")
    transformer(gpt).save(made / "attention.json")
    planned(Chain(tied=True, skip=True)).save(made / "pipeline.json")
    planned(Chain(), pipeline=setting("zbv", 4)).save(made / "other_pipeline.json")
    ranges = [f"sw::step rank 0 of 16, plan {plan.fingerprint}", f"sw::{RangeNames.of(plan).operator('linear')}"]
    each = [{"ph": "X", "cat": "user_annotation", "name": n, "pid": 1, "tid": 1, "ts": 5, "dur": 1} for n in ranges]
    (made / "trace.json").write_text(json.dumps({"traceEvents": each}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_init, "_current", [])
        sw.init(devices=4)
        net = names["build"]()["net"]
        model = sw.AutoParallel(net, loss_fn=nn.MSELoss(), parallel_mode="data_parallel")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        model(torch.ones(64, 64), torch.ones(64, 64)).backward()
        optimizer.step()
        sw.save_checkpoint(model, optimizer, made / "runs", step=3)
    return made


@pytest.fixture
def terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function from a command and a width to what a terminal of that width shows."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(rich.console.Console, "is_terminal", True)

    def shown(command: str, width: int) -> str:
        monkeypatch.setattr(runtime_init, "_current", [])
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(command.split()) in (0, 1)
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    return shown


@pytest.fixture
def computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan, the rehearsal and the verification of a command are computed once, and printed at every width."""
    for target in ("cli.plan_command.planned", "rehearsal.rehearse.rehearse", "cli.verify_command.verify_function"):
        module, _, name = f"shardwright.{target}".rpartition(".")
        compute = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(f"{module}.{name}", partial(first_result, [], compute))


def first_result(results: list[object], compute: Callable[..., object], *given: object, **named: object) -> object:
    if not results:
        results.append(compute(*given, **named))
    return results[0]


@pytest.mark.usefixtures("computed_once")
@pytest.mark.parametrize("command", COMMANDS)
def test_lines_fit_and_words_are_whole(command: str, terminal: Any) -> None:
    words = lambda text: set(re.findall(r"[A-Za-z_]{2,}", text))
    known = words(terminal(command, 1000))
    for width in (80, 100):
        text = terminal(command, width)
        lines = text.splitlines()
        assert max(map(len, lines)) <= width, [line for line in lines if len(line) > width]
        headings = {"before", "after", "forward", "backward", "each", "where", "strategy", "layouts", "local", "shapes"}
        assert not words(text) - known - headings - {"operator", "sent"}, text


def test_links_are_abbreviated_and_no_layers_are_explained_where_there_are_none(terminal: Any, folder: Path) -> None:
    text = terminal("explain plan.json", 100)
    assert re.search(r" by\s+IB NDR", text) and "of them)" not in text
    assert "layers.{0-3}.up: the operator of layers 0 to 3" in terminal("explain attention.json blocks.1", 80)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    plan = sw.plan(net, (torch.empty(8, 8),), devices=2)
    plan.save(folder / "flat.json")
    assert "layers.{0-3}" not in terminal("explain flat.json 0", 80)
    plan.explain(width=80)
