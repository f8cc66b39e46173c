"""`shardwright plan`: a script or a function's model planned from the command line, and two plans compared."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from forked_python import fresh
from paths import EXAMPLES
from torch import nn

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.cli import main
from shardwright.cli.command_line import without_weights
from shardwright.layout import digits_size
from shardwright.report.format import cost_text, size_text


@pytest.fixture(autouse=True)
def _as_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands change these, as a process may."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("SHARDWRIGHT_DEVICES", "")  # so that it is put back, whatever the command makes of it
    monkeypatch.setattr(process, "_current", [])
    monkeypatch.chdir(tmp_path)


def command(*words: object) -> int:
    try:
        return main.main(["plan", *map(str, words)])
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        return exit_.code


MODEL = """
import torch, torch.nn as nn
import shardwright as sw

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
        sw.shard(self.up, ((2, 1), (4, 1)))
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def as_dict():
    net = Net()
    assert all(p.is_meta for p in net.parameters()), "no weights"
    return dict(net=net, inputs=(torch.ones(64, 1024),), loss_fn=nn.MSELoss(), targets=torch.ones(64, 1024))

def as_tuple():
    return Net(), (torch.ones(64, 1024),), torch.ones(64, 1024), nn.MSELoss()

def as_nothing():
    return None
"""

SCRIPT = (
    MODEL
    + """
sw.init()
net = Net().to(torch.bfloat16).to("cpu")
net.up.weight.data.normal_()
model = sw.AutoParallel(net, loss_fn=nn.MSELoss()).hsdp(threshold=0)
optimizer = torch.optim.Adam(model.parameters())
x = torch.zeros(64, 1024, dtype=torch.bfloat16)
try:
    model(x, x).backward()
finally:
    print("unwound")
print("the script goes no further")
"""
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "planned_model.py"
    path.write_text(MODEL)
    return path


def test_a_function_s_model(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert command("--devices", 16, "--cluster", "h100x8x2", "--mode", "semi_auto", f"{model}:as_dict") == 0
    out = capsys.readouterr().out
    plan = sw.Plan.load("plan.json")
    assert (plan.devices, plan.cluster.name, plan.mode) == (16, "h100x8x2", "semi_auto")
    assert plan.operator("up").in_strategy == ((2, 1), (4, 1), (4,)) or plan.operator("up").cause == "mark"
    lines = out.splitlines()
    assert lines[0] == f"semi_auto on 16 devices of h100x8x2: {len(plan.operators)} operators, plan {plan.fingerprint}"
    assert lines[1:4] == ["the model: in parts", "    up: data 2 x tensor 4 (column) x 2 replicas", "    down: data 16"]
    known = "cluster: h100x8x2, 8 by NVLink 4 (450 GB/s), 2 by InfiniBand NDR (50 GB/s), 75 GiB a device"
    assert lines[4] == known, "the cluster was named"
    assert lines[5].startswith('inputs: every rank is fed the whole batch (dataset_strategy="full_batch"')
    assert lines[6].startswith("a step takes ") and "communication" in lines[6]
    assert lines[7].startswith("with messages beside computation, as on a library such as NCCL, a step takes ")
    assert lines[8].startswith("waited for longest: ")
    assert lines[9] == "nothing was searched, so there is no lower bound"
    assert lines[-1] == "written to plan.json"
    for kind in plan.memory(0):
        assert any(line.strip().startswith(f"{kind} ") for line in lines)
    dearest = plan.price.collectives[0]
    assert any(dearest.kind in line and dearest.phase in line for line in lines)
    assert "2 by InfiniBand NDR" in out, "which links are crossed"


def test_a_search_says_how_far_it_is_from_the_best(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert command("--devices", 8, "--mode", "dynamic_programming", "--output", "best.json", f"{model}:as_tuple") == 0
    plan = sw.Plan.load("best.json")
    assert cost_text(plan.cost, plan.bound, plan.gap) in capsys.readouterr().out


def test_a_search_keeps_the_memory_or_says_the_least(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "few.py").write_text(
        "import torch\nfrom torch import nn\n\ndef few():\n    return nn.Sequential("
        "nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), (torch.zeros(64, 16),)\n"
    )
    words = ("--devices", 2, "--mode", "dynamic_programming", f"{tmp_path / 'few.py'}:few")
    assert command("--memory", "4KB", *words) == 1
    error = capsys.readouterr().err
    assert "no plan fits in 4.00 KB" in error and "backward of linear" in error
    least = int(error.split("memory=")[1].split()[0])
    for memory, limit in ((least, least), ("cluster", sw.Cluster.of("cpu", 2).memory)):
        assert command("--memory", memory, *words) == 0
        assert sw.Plan.load("plan.json").peak <= limit
    assert command("--memory", int(0.98 * least), *words) == 1


@pytest.mark.long
def test_gpt3_on_1024_devices_of_a_file_within_their_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    cluster = sw.Cluster.of("h200x8x128")
    cluster.save(tmp_path / "h200x128.json")
    (tmp_path / "few.py").write_text("from gpt3 import gpt3\n\ndef few():\n    return gpt3(layers=2)\n")
    assert (
        command(
            "--devices", 1024, "--cluster", tmp_path / "h200x128.json", "--memory", "60GB", f"{tmp_path / 'few.py'}:few"
        )
        == 0
    )
    plan, out = sw.Plan.load("plan.json"), capsys.readouterr().out
    assert (plan.mode, plan.devices) == ("dynamic_programming", 1024) and 0 <= plan.gap <= 1e-3
    assert plan.peak <= 60e9 < cluster.memory and f"gap {plan.gap:.3%}" in out
    assert "InfiniBand" in out and size_text(plan.peak) in out


@pytest.mark.long
def test_gpt3_s_width_on_16384_devices(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "wide.py").write_text("from gpt3 import gpt3\n\ndef wide():\n    return gpt3(layers=1)\n")
    assert command("--devices", 16384, "--cluster", "h200x8x2048", f"{tmp_path / 'wide.py'}:wide") == 0
    plan, lines = sw.Plan.load("plan.json"), capsys.readouterr().out.splitlines()
    assert (plan.mode, plan.devices) == ("dynamic_programming", 16384) and 0 <= plan.gap <= 1e-3
    assert lines[0].startswith("dynamic_programming on 16384 devices of h200x8x2048: ")
    assert f"gap {plan.gap:.3%}" in next(line for line in lines if line.startswith("cost "))
    kinds = plan.timeline.kinds
    assert {"parameters", "gradients", "optimizer", "activations"} <= kinds.keys()
    for kind, count in (*kinds.items(), ("all together", sum(kinds.values()))):
        (line,) = (line for line in lines if line.startswith(f" {kind}"))
        assert line.split()[-2:] == size_text(count).split()
    assert sum(kinds.values()) == pytest.approx(plan.peak)
    at = next(i for i, line in enumerate(lines) if line.startswith(" communication"))
    rows = re.findall(r"^ (\w+)\n((?:    .*\n)+)", "\n".join(lines[at + 2 :]), re.MULTILINE)
    shown, first = [(kind, " ".join(cells.split())) for kind, cells in rows], plan.price.collectives[0]
    assert any(
        kind == first.kind
        and cells.startswith(f"ranks: {digits_size(first.digits)}; ")
        and f"; phase: {first.phase}; " in cells
        for kind, cells in shown
    )
    assert any("IB NDR" in cells for _, cells in shown if "; phase: gradient; " in cells), "and where they go"


def test_settings_go_over_the_function_s(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert command("--hsdp", "level3", "--devices", 8, f"{model}:as_tuple") == 0
    plan = sw.Plan.load("plan.json")
    assert plan.hsdp.optimizer_level == "level3" and "gathered" in capsys.readouterr().out
    assert (
        command(
            "--strategies",
            "plan.json",
            "--mode",
            "data_parallel",
            "--output",
            "again.json",
            "--devices",
            8,
            f"{model}:as_tuple",
        )
        == 0
    )
    again = sw.Plan.load("again.json")
    assert [o.in_strategy for o in again.operators] == [o.in_strategy for o in plan.operators]


def test_the_devices_are_the_cluster_s_where_nobody_says(model: Path, tmp_path: Path) -> None:
    sw.Cluster.of("a100x8x2").save(tmp_path / "mine.json")
    assert command("--cluster", tmp_path / "mine.json", f"{model}:as_dict") == 0
    assert sw.Plan.load("plan.json").devices == 16


def test_a_script_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert command("--devices", 8, "--cluster", "h100x8", script) == 0
    out = capsys.readouterr().out
    assert "unwound" in out and "no further" not in out
    plan = sw.Plan.load("plan.json")
    assert (plan.devices, plan.mode, plan.hsdp.threshold) == (8, "semi_auto", 0)
    assert plan.input_placement.per_rank_batch, "as the wrapper feeds: each its own part"
    assert {str(v.dtype) for v in plan.graph.parameters.values()} == {"torch.bfloat16"}
    assert plan.operator("up").cause == "mark"


def test_options_behind_the_target(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n" + SCRIPT)
    words = ("--lr", 3, "--devices", 8, "--output", "b.json", "x", "--", "--mode", "fast")
    assert command("--devices", 2, script, *words) == 0
    assert "['--lr', '3', 'x', '--mode', 'fast']" in capsys.readouterr().out
    assert sw.Plan.load("b.json").devices == 8
    assert command(script, "--devices", 8, "--parallel_mode", "data_parallel") == 0
    shown = capsys.readouterr()
    assert "['--parallel_mode', 'data_parallel']" in shown.out
    assert f"plan: --parallel_mode is for {script}; that of this command is --mode. " in shown.err
    assert (
        command(script, "--devices", 8, "--", "--parallel_mode", "x") == 0 and "is for" not in capsys.readouterr().err
    )
    assert command(script, "--devices", "none") == 2
    assert "not a number from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, words", [("operator_functional", ()), ("gpt", ("--layers", "1")), ("layout_objects", ())]
)
def test_examples_for_more_devices_than_there_are(name: str, words: tuple, capsys: pytest.CaptureFixture) -> None:
    assert command("--devices", 8, EXAMPLES / f"{name}.py", *words) == 0
    assert " on 8 devices" in capsys.readouterr().out
    assert sw.Plan.load("plan.json").devices == 8


def test_a_script_that_looks_at_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "looks.py"
    script.write_text(SCRIPT.replace("model = ", "print(f'mean {net.up.weight.float().mean().item():.1f}')\nmodel = "))
    with pytest.raises(Exception, match="meta"):
        command("--devices", 8, script)
    assert "--with-weights builds it with them" in capsys.readouterr().err
    assert command("--with-weights", "--devices", 8, script) == 0
    assert "mean" in capsys.readouterr().out


def test_weights_take_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "large.py").write_text(MODEL.replace("1024", "8192").replace("4096", "65536").replace("(64,", "(1024,"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert command("--devices", 1024, "--cluster", "h200x8x128", f"{tmp_path / 'large.py'}:as_dict") == 0
    plan = sw.Plan.load("plan.json")
    assert plan.devices == 1024 and sum(v.nbytes for v in plan.graph.parameters.values()) > 4 * 2**30
    assert "more than a device has" not in capsys.readouterr().out
    assert command("--cluster", "cpu", "--devices", 8, f"{tmp_path / 'large.py'}:as_dict") == 0
    assert "more than a device has" in capsys.readouterr().out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB: less than a quarter of it"


def test_what_has_no_weights() -> None:
    with without_weights():
        one, two = nn.Linear(8, 4), nn.Linear(8, 4)
        two.weight = one.weight
        shared = nn.Parameter(torch.ones(4))
        one.scale, two.scale = shared, shared
        one.scale.note = "kept"
        both = nn.Sequential(one, two, nn.BatchNorm1d(4)).double()
    assert both[0].weight is both[1].weight and both[0].scale is both[1].scale and both[1].scale.note == "kept"
    assert all(p.is_meta and p.dtype == torch.float64 for p in both.parameters())
    assert both[0].weight.shape == (4, 8) and not both[2].running_var.is_meta
    assert not nn.Linear(2, 2).weight.is_meta, "afterwards all is as before"
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with without_weights():
        holder = nn.Module()
        holder.frozen = frozen
    assert holder.frozen.is_meta and not holder.frozen.requires_grad and not frozen.is_meta


# -- what cannot be planned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (("nowhere.py",), "no such script"),
        (("nowhere.py:f",), "no such file"),
        (("no.where:f",), "no such module"),
        (("shardwright:nothing",), "no function"),
        (("--devices", "0", "x.py"), "not a number from 1"),
        (("--hsdp", "level9", "x.py"), "invalid choice"),
        (("--output", "/nowhere/plan.json", "x:f"), "no folder /nowhere"),
        (("--output", "/", "x:f"), "is a folder"),
        (("--import", "no.where", "x:f"), "no such module: no.where"),
        ((), "arguments are required: target ("),
    ],
)
def test_nothing_to_plan(words: tuple, message: str, capsys: pytest.CaptureFixture) -> None:
    assert command(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (("--devices", "7"), "up"),
        (("--mode", "by_chance"), "unknown parallel_mode 'by_chance'"),
        (("--cluster", "cray1"), "cray1"),
        (("--cluster", "nowhere.json"), "nowhere.json"),
        (("--cluster", "broken.json"), "'memory_bandwidth'"),
        (("--cluster", "h100x8", "--devices", "9"), "8 devices, not 9"),
        (("--memory", "70GB"), "semi_auto searches nothing"),
        (("--strategies", "broken.json"), "broken.json"),
    ],
)
def test_what_cannot_be_planned(
    words: tuple, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cluster = sw.Cluster.of("h100x8").to_dict()
    del cluster["memory_bandwidth"]
    (tmp_path / "broken.json").write_text(json.dumps(cluster))
    assert command(*words, f"{model}:as_dict") == 1
    error = capsys.readouterr().err
    assert error.startswith("shardwright plan: error: ") and message in error and "legal: " in error
    assert not Path("plan.json").exists()


def test_functions_that_return_something_else(model: Path, capsys: pytest.CaptureFixture) -> None:
    assert command(f"{model}:as_nothing") == 1
    assert "returns NoneType" in capsys.readouterr().err and not Path("plan.json").exists()
    assert command(f"{model}:as_dict", "--zzz=9") == 2
    assert "takes no arguments, but got --zzz=9; the options are --help, --devices, " in capsys.readouterr().err
    assert command(f"{model}:as_dict", "--parallel_mode=data_parallel") == 2
    assert "; did you mean --mode? the options are --help, " in capsys.readouterr().err


def test_a_script_without_a_call(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('idle')\n")
    assert command("--devices", 8, script) == 2
    assert "without a call of an AutoParallel model" in capsys.readouterr().err
    script.write_text(SCRIPT.replace("(4, 1)", "(5, 1)"))
    assert command("--devices", 8, script) == 1
    assert "up" in capsys.readouterr().err


# -- two plans ---------------------------------------------------------------------------------------------------------


def test_diff(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command("--devices", 8, "--output", "a.json", f"{model}:as_dict") == 0
    lines = Path("a.json").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"name": "relu"' in line)
    words = json.loads(lines[at].strip().rstrip(","))
    lines[at] = "    " + json.dumps(words | {"in_strategy": [[1, 8]]}) + ","
    Path("b.json").write_text("\n".join(lines))
    capsys.readouterr()
    assert command("diff", "a.json", "a.json") == 0
    assert capsys.readouterr().out.startswith("equal; a step: ")
    assert command("diff", "a.json", "b.json") == 1
    out = capsys.readouterr().out.splitlines()
    before = tuple(map(tuple, words["in_strategy"]))
    assert len(out) == 2 and out[0].startswith(f"~ relu: {before}") and "((1, 8),)" in out[0]
    assert out[1].startswith("1 operator and 0 parameters differ; a step: ")
    assert command("diff", "a.json", "nowhere.json") == 2
    assert "nowhere.json" in capsys.readouterr().err
    Path("b.json").write_text("\n".join(lines)[:2000])
    assert command("diff", "a.json", "b.json") == 2
    assert "cut short" in capsys.readouterr().err
    for given in ((), ("a.json",), ("a.json", "b.json", "c.json")):
        assert command("diff", *given) == 2
        assert "diff takes two plans" in capsys.readouterr().err


@pytest.mark.long
def test_a_saved_plan_is_read_in_a_process_that_has_made_none(model: Path, tmp_path: Path) -> None:
    """Nothing but the command itself imports the module that reads plans: each command has a process of its own."""
    saved = tmp_path / "a.json"
    assert not command("--output", saved, f"{model}:as_dict")
    calls = [["explain", str(saved), "up"], ["simulate", str(saved)], ["plan", "diff", str(saved), str(saved)]]
    code = (
        "import os, sys, torch, torch._dynamo\n"  # which each child would import by itself
        "gc.freeze()\n"
        "from shardwright.cli.main import main\n"
        f"for words in {calls}:\n    child = os.fork()\n    if not child:\n        sys.exit(main(words))\n"
        "    print(words[0], os.waitpid(child, 0)[1], file=sys.stderr)\n"
    )
    done = fresh(code)
    for words in calls:
        assert f"{words[0]} 0\n" in done.stderr, done.stderr


def test_operators_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A module that the command imports first registers the operators."""
    (tmp_path / "own_operators.py").write_text("""
import torch
import shardwright as sw

@torch.library.custom_op("plan_cli_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2

halved.register_fake(torch.empty_like)
sw.rule(halved, "... -> ...")
""")
    (tmp_path / "user.py").write_text("""
import torch

class Net(torch.nn.Module):
    def forward(self, x):
        return torch.ops.plan_cli_tests.halved(x)

def model():
    return dict(net=Net(), inputs=(torch.empty(8, 8),), devices=4)
""")
    assert command("--import", "own_operators", f"{tmp_path / 'user.py'}:model") == 0
    assert sw.Plan.load("plan.json").operator("halved").in_strategy == ((4, 1),)
    capsys.readouterr()
    assert command("--import", "own_operators", "diff", "plan.json", "plan.json") == 0
