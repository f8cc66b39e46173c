"""One rank of a plan, played alone: structure, memory, the order of operators by their times, and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, mark
from resnet_like import ResNetLike
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.cli.main import main
from shardwright.partition.local_program import LocalOp
from shardwright.pipeline.pipeline_plan import timeline_of
from shardwright.rehearsal import rehearse as rehearsing
from shardwright.rehearsal.simulated_ranks import DrawnValues, index_limits
from shardwright.rehearsal.step_in_time import promised_seconds, step_of
from shardwright.torch_private import TorchDispatchMode, pytree

PIPELINE = {
    "stages": 2,
    "micro_batches": 4,
    "stage_config": {
        "tokens": 0, "positions": 0, "blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1, "norm": 1, "head": 1
    },
}  # fmt: skip


class TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt(
    marks: tuple[int, int] | None = None,
    devices: int = 8,
    batch: int = 32,
    layers: int = 2,
    dropout: float = 0.0,
    again: bool = False,
    length: int = 64,
    vocabulary: int = 128,
    width: int = 64,
    **settings: Any,
) -> Any:
    with torch.device("meta"):
        net = GPT(vocabulary, length, layers, width, heads=8, dropout=dropout)
        loss, tokens = TokenLoss(), torch.zeros(batch, length, dtype=torch.long)
    if marks:
        mark(net, loss, *marks)
    for block in net.blocks if again else ():
        sw.recompute(block)
    return sw.plan(net, (tokens,), loss, tokens, devices=devices, **settings)


def resnet(size: int = 64, **settings: Any) -> Any:
    with torch.device("meta"):
        net, x, y = ResNetLike(), torch.zeros(64, 3, size, size), torch.zeros(64, dtype=torch.long)
    return sw.plan(net, (x,), nn.CrossEntropyLoss(), y, devices=8, **settings)


class Detached(nn.Module):
    """A part that no gradient reaches, though its parameters require one."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
        self.body, self.head = nn.Sequential(*layers), nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).detach())
        return y


def detached(**settings: Any) -> Any:
    with torch.device("meta"):
        net, x, y = Detached(), torch.zeros(4096, 128), torch.zeros(4096, 8)
    return sw.plan(net, (x,), nn.MSELoss(), y, devices=8, **settings)


PARTS = {"parallel_mode": "data_parallel", "dataset_strategy": "data_parallel"}
PLANS: dict[str, Callable[[], Any]] = {
    "data_parallel": lambda: gpt(**PARTS, batch=64),
    "dp2 x tp4": lambda: gpt((2, 4)),
    "hsdp level1": lambda: gpt(**PARTS, batch=64, hsdp={"threshold": 0, "optimizer_level": "level1"}),
    "hsdp level3": lambda: gpt(**PARTS, batch=64, hsdp={"threshold": 0, "optimizer_level": "level3"}),
    "dropout": lambda: gpt((2, 4), dropout=0.1),
    "recompute": lambda: gpt((2, 4), batch=128, again=True),
    "mixed precision": lambda: gpt((2, 4), mixed_precision={"param_dtype": torch.bfloat16}),
    "1024 devices": lambda: gpt(**PARTS, devices=1024, batch=16 * 1024),
    "64 x 16 devices": lambda: gpt((64, 8), devices=512, batch=64 * 16),
    "one device": lambda: gpt(devices=1),
    "detached": lambda: detached(**PARTS),
    "pipeline": lambda: gpt((1, 2), devices=4, layers=4, batch=64, pipeline=PIPELINE),
    "resnet": lambda: resnet(**PARTS),
    "resnet, searched": lambda: resnet(parallel_mode="dynamic_programming", memory="1GB"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The plan of a name, and its file."""
    made: dict[str, tuple[Any, Path]] = {}

    def write(name: str) -> tuple[Any, Path]:
        if name not in made:
            path = tmp_path_factory.mktemp("plans") / "plan.json"
            plan = PLANS[name]()
            plan.save(path)
            made[name] = plan, path
        return made[name]

    return write


def operators_of(plan: Any, rank: int) -> list[str]:
    """The operators whose kernels a rank runs."""
    plans = [stage.plan for stage in plan.of_rank(rank)] if hasattr(plan, "stages") else [plan]
    return list(dict.fromkeys(i.operator for one in plans for i in one.program.instructions if isinstance(i, LocalOp)))


@pytest.mark.parametrize("name", PLANS)
def test_every_operator_is_timed_and_memory_is_the_plans(name: str, written: Any) -> None:
    plan, path = written(name)
    rank = min(37, plan.devices - 1)
    made = sw.rehearse(path, rank=rank, device="cpu", steps=1)
    assert (made.rank, made.devices) == (rank, plan.devices)
    assert [o.operator for o in made.operators] == operators_of(plan, rank)
    assert all(o.forward > 0 for o in made.operators)
    # An addition hands its gradient on as it is, and a redistribution may do the work of a short backward.
    worked = [o for o in made.operators if o.promised_backward > o.promised_forward > 0]
    assert worked and all(o.backward > 0 for o in worked)
    assert made.computing == pytest.approx(sum(o.forward + o.backward for o in made.operators))
    assert made.step == pytest.approx(made.computing + made.rest, rel=1e-6)
    assert made.promised_step == plan.cost
    if not hasattr(plan, "stages"):
        assert made.promised_computing <= plan.price.compute * (1 + 1e-9)
        assert made.communication == plan.price.communication
        assert made.promised_peak == plan.peak
        assert made.promised_exposed == plan.price.exposed and made.promised_elapsed == plan.price.elapsed
        casts = plan.price.compute - made.promised_computing  # of redistributions, by the cost model
        assert made.elapsed == pytest.approx(made.computing + made.exposed + casts)
    # The plan has gradients during the whole step; a step may begin without them.
    assert 0.9 <= made.peak_accumulating / made.promised_peak <= 1.1, made.ratios()
    assert made.peak <= made.peak_accumulating


#: A device of which the seconds of a kernel are known: flops a second, bytes a second, seconds of any kernel.
PEAK, BANDWIDTH, OVERHEAD = 1e11, 1e10, 1e-6


class WorkClock(TorchDispatchMode):
    """A clock that goes on by what each kernel that runs takes on that device: its flops, or its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        counted = flop_registry.get(op.overloadpacket)
        flops = counted(*args, **(kwargs or {}), out_val=out) if counted else 0
        tensors = [t for t in pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        if not op.is_view:
            self.now += OVERHEAD + max(flops / PEAK, sum(t.nbytes for t in tensors) / BANDWIDTH)
        return out


def test_operators_take_long_in_the_order_that_the_plan_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for a device whose kernels take what their flops and bytes say: no clock of this machine decides."""
    figures = {"peak": {"float32": PEAK}, "memory_bandwidth": BANDWIDTH, "overhead": OVERHEAD, "name": "counted"}
    cluster = sw.Cluster.from_dict(sw.Cluster.of("h100x8", 8).to_dict() | figures)
    parts: dict[str, Any] = {**PARTS, "cluster": cluster}
    plans = {"GPT": gpt(**parts, batch=16, length=256, vocabulary=2048, width=256), "ResNet": resnet(**parts, size=96)}
    for name, plan in plans.items():
        clock = WorkClock()
        monkeypatch.setattr(rehearsing.time, "perf_counter", lambda: clock.now)
        with clock:
            found = sw.rehearse(plan, rank=3, device="cpu", steps=1)
        assert (found.correlation() or 0.0) > 0.9, (name, found.correlation())


def test_nothing_is_left_of_it(written: Any) -> None:
    plan, _ = written("dropout")
    torch.manual_seed(5)
    before, runtime = torch.get_rng_state(), process._current[:]
    made = sw.rehearse(plan, rank=3, device="cpu", steps=1)
    assert not dist.is_initialized() and process._current == runtime
    assert torch.equal(torch.get_rng_state(), before)
    assert made.rank == 3


def test_each_rank_of_a_pipeline_plays_its_stage(written: Any) -> None:
    plan, path = written("pipeline")
    first, last = (sw.rehearse(path, rank=rank, device="cpu", steps=1) for rank in (0, 3))
    assert (first.stages, last.stages) == ((0,), (1,))
    assert any("embedding" in o.operator or o.operator == "tokens" for o in first.operators)
    assert any("cross_entropy" in o.operator for o in last.operators)
    assert not {o.operator for o in first.operators} & {o.operator for o in last.operators}
    line = timeline_of(plan, beside=True)
    assert first.promised_waiting == line.total - line.busy(0) > 0 and first.promised_elapsed == line.total
    assert first.promised_elapsed == last.promised_elapsed and first.waiting > 0
    assert first.promised_peak == plan.simulation.peak(0)


def test_what_is_recomputed_is_time_of_the_backward(written: Any) -> None:
    plain = sw.rehearse(written("dp2 x tp4")[1], device="cpu", steps=1)
    again = sw.rehearse(written("recompute")[1], device="cpu", steps=1)
    name = next(o.operator for o in again.operators if o.operator.endswith("gelu"))
    of = lambda made: next(o for o in made.operators if o.operator == name)
    assert of(again).promised_backward > of(again).promised_forward * 1.5  # runs twice in the backward
    assert of(again).backward > 0 and of(plain).backward > 0


@pytest.mark.parametrize("name", ["hsdp level3", "recompute", "pipeline"])
def test_a_step_in_time_is_the_plans_where_operators_take_the_promised_time(name: str, written: Any) -> None:
    """And messages hide behind operators that take longer."""
    plan, _ = written(name)
    rank = plan.devices - 1
    plans = [stage.plan for stage in plan.of_rank(rank)] if hasattr(plan, "stages") else [plan]
    promised = promised_seconds(plans, getattr(plan, "micro_batches", 1))
    assert step_of(plan, rank, promised) == pytest.approx(step_of(plan, rank), rel=1e-9, abs=1e-15)
    slow = step_of(plan, rank, {key: 100 * seconds for key, seconds in promised.items()})
    fast = step_of(plan, rank, {key: seconds / 100 for key, seconds in promised.items()})
    exposed = step_of(plan, rank).exposed
    assert 0 < slow.exposed <= exposed * (1 + 1e-9) and exposed <= fast.exposed * (1 + 1e-9)
    if name == "hsdp level3":
        assert 2 * exposed < min(fast.exposed, plan.price.communication)


def test_links_take_the_time_that_the_plan_has(written: Any) -> None:
    slow = sw.Cluster.of("h100x8", 8).to_dict()
    for level in slow["levels"]:
        level["latency"] = 1e-3
    for name, settings in (("marks", {}), ("pipeline", {"pipeline": PIPELINE, "devices": 4, "layers": 4})):
        plan = gpt((1, 2) if settings else (2, 4), cluster=sw.Cluster.from_dict(slow), **settings)
        made = sw.rehearse(plan, device="cpu", steps=1, links=True)
        without = sw.rehearse(plan, device="cpu", steps=1)
        assert made.slept is not None and without.slept is None
        assert made.step > made.slept > 0.5 * made.communication > 0.005, name
        assert made.slept < 2 * made.communication + (made.waiting if settings else 0)
        assert without.step < made.step


def test_command(written: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = written("64 x 16 devices")
    assert main(["rehearse", str(path), "--rank", "37", "--device", "cpu", "--steps", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 37 of 512, played on the CPU")
    for word in (
        "computing",
        "communication",
        "  exposed",
        "a step in time",
        "peak memory",
        "ratio",
        "cross_entropy",
        "blocks.{0-1}.gelu",
    ):
        assert word in text
    assert main(["rehearse", str(path), "--rank=37", "--device=cpu", "--steps=1", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert words["rank"] == 37 and words["ratios"]["peak"] > 0 and words["operators"][0]["forward"] > 0


def test_bad_input(written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written("dp2 x tp4")[1]
    with pytest.raises(sw.PlanError, match=r"rank 8 is outside the 8 devices"):
        sw.rehearse(path, rank=8)
    with pytest.raises(sw.SettingError, match=r"rehearse\(device='cuda:99'\): there is no such device"):
        sw.rehearse(path, device="cuda:99")
    with pytest.raises(sw.SettingError, match=r"steps=0"):
        sw.rehearse(path, steps=0)
    document = json.loads(path.read_text())
    del document["captured"]
    (tmp_path / "no_graph.json").write_text(json.dumps(document))
    with pytest.raises(sw.PlanError, match="no captured graph"):
        sw.rehearse(tmp_path / "no_graph.json")
    assert main(["rehearse", str(tmp_path / "no_graph.json")]) == 2
    assert "shardwright rehearse: error: " in capsys.readouterr().err


def test_too_little_memory_is_said_before_anything_runs(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = written("dp2 x tp4")
    monkeypatch.setattr(rehearsing, "memory_of", lambda device: plan.peak - 1)
    with pytest.raises(sw.SettingError, match=r"promises to need .* on rank 0, and cpu has .* free"):
        sw.rehearse(path, device="cpu")
    assert sw.rehearse(path, device="cpu", steps=1, force=True).peak > 0


IN_A_GROUP = """
import sys
import torch.distributed as dist
import shardwright as sw
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
try:
    sw.rehearse(sys.argv[1], device="cpu")
except sw.SettingError as error:
    print(error)
"""


def test_a_process_of_a_group_does_not_rehearse(written: Any) -> None:
    _, path = written("dp2 x tp4")
    text = forked_python.run([sys.executable, "-c", IN_A_GROUP, str(path)])
    assert (
        "a rehearsal plays one of 8 ranks by itself, and this process is rank 0 of a process group of 2" in text.stdout
    ), text.stderr


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(50, 8), nn.Embedding(3, 8)

    def forward(self, words: Tensor, kinds: Tensor, chosen: Tensor, seen: Tensor) -> Tensor:
        x = self.words(words.flatten(0, 1)) + self.kinds(kinds).flatten(0, 1)
        x = x.index_select(0, chosen)
        return x.masked_fill(~seen.unsqueeze(1), 0.0)


def test_whole_numbers_are_legal_indices() -> None:
    net = Lookups()
    words, kinds = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)
    chosen, seen = torch.zeros(6, dtype=torch.long), torch.ones(6, dtype=torch.bool)
    plan = sw.plan(net, (words, kinds, chosen, seen), devices=1)
    limits = index_limits(plan.graph)
    inputs = plan.graph.inputs
    assert [limits.get(v.name) for v in inputs] == [50, 3, 20, None]
    values = DrawnValues([plan.graph], torch.device("cpu"))
    drawn = [values.draw(v, (4000,)) for v in inputs]
    assert [int(x.max()) for x in drawn[:3]] == [49, 2, 19] and all(int(x.min()) == 0 for x in drawn[:3])
    assert drawn[3].all()
