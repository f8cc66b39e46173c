"""A trace beside its plan: from real traces of this process, and from one of a GPU that is written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from profile_runs import events, profiled, wrapped, written

import shardwright as sw
from shardwright import process_runtime as process
from shardwright.cli.main import main
from shardwright.rehearsal.trace_comparison import TraceComparison, compare_trace


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two devices in one process, and its trace of three steps."""
    made = tmp_path_factory.mktemp("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_current", [])
        sw.init(devices=2)
        model = wrapped("")
        profiled(model, made / "trace.json", steps=3)
        model.plan.save(made / "plan.json")
    return made


def test_equal_layers_share_a_row(local: Path) -> None:
    made = compare_trace(local / "plan.json", local / "trace.json")
    of = {o.operator: o for o in made.operators}
    rows = {o.operator: o for o in made.layers}
    down = [o for name, o in of.items() if "down" in sw.Plan.load(local / "plan.json").decisions[name].op.module]
    assert len(down) == 2
    assert rows["layers.{0-1}.down (linear)"].seconds == pytest.approx(sum(o.seconds for o in down))
    assert rows["layers.{0-1}.down (linear)"].promised == pytest.approx(sum(o.promised for o in down))


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_fits(width: int, local: Path) -> None:
    text = compare_trace(local / "plan.json", local / "trace.json").summary(width)
    assert "medians of 3 steps" in text and "one process computed for all 2 ranks" in text
    tables = text.split("\n\n", 2)[2]
    assert max(map(len, tables.splitlines())) <= width and "head" in tables and "..." not in tables


def test_stages_of_one_rank_of_a_local_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_current", [])
    sw.init(devices=2)
    model = wrapped("pipeline")
    path = profiled(model, tmp_path / "trace.json", steps=1)
    both = compare_trace(model.plan, path)
    one = compare_trace(model.plan, path, rank=1)
    assert (both.stages, one.stages) == ((0, 1), (1,))
    assert {o.operator for o in one.operators} < {o.operator for o in both.operators}
    assert all(o.forward > 0 for o in (*one.operators, *both.operators))


def test_command(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a compressed trace."""
    packed = tmp_path / "trace.json.gz"
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        file.write((local / "trace.json").read_text())
    assert main(["compare-trace", str(local / "plan.json"), str(packed)]) == 0
    message = capsys.readouterr().out
    assert message.startswith(
        "2 ranks in one process, measured on the host; the plan is priced for h100x8; medians of 3"
    )
    for word in ("computing", "exposed", "a step", "promised", "layers.{0-1}.relu", "head (linear)"):
        assert word in message
    assert main(["compare-trace", str(local / "plan.json"), str(packed), "--rank", "0", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)
    assert words["steps"] == 3 and words["rank"] is None and words["total_computing"]["ratio"] > 0
    assert all(o["forward"] > 0 for o in words["operators"])


# -- errors ------------------------------------------------------------------------------------------------------------


def test_traces_that_cannot_be_compared(local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = local / "plan.json"
    ours = "sw::step 2 ranks in one process, plan 0123", "sw::attention linear"
    other = [{"ph": "X", "name": name, "pid": 1, "tid": 1, "ts": 1, "dur": 1} for name in ours]
    none = [e for e in events(local / "trace.json") if not e["name"].startswith("sw::")]
    cases = [
        (written(tmp_path / "none.json", none), "it was profiled without a call of the model"),
        (written(tmp_path / "other.json", other), r"is of plan 0123; plan \w+ has no 'attention linear'"),
        (plan, "it has no list traceEvents"),
        (Path(__file__), "is no Chrome trace"),
    ]
    for path, words in cases:
        with pytest.raises(sw.ShardwrightError, match=words):
            compare_trace(plan, path)
        assert main(["compare-trace", str(plan), str(path)]) == 2
        assert "shardwright compare-trace: error: " in capsys.readouterr().err
    assert main(["compare-trace", str(plan), str(tmp_path / "gone.json")]) == 2
    assert "gone.json" in capsys.readouterr().err


def test_a_plan_with_the_same_names_is_noted(local: Path, tmp_path: Path) -> None:
    plan = sw.Plan.load(local / "plan.json")
    other = [dict(e, name=e["name"].replace(plan.fingerprint, "0123")) for e in events(local / "trace.json")]
    made = compare_trace(plan, written(tmp_path / "other.json", other))
    assert made.notes[0] == f"the trace is of plan 0123, not of {plan.fingerprint}; its operators have the same names"
    mixed = [*events(local / "trace.json"), dict(other[0], name="sw::step 2 ranks in one process, plan 0123", ts=9e15)]
    made = compare_trace(plan, written(tmp_path / "mixed.json", mixed))
    assert made.steps == 3 and made.notes[0] == "1 step of other plans (0123) left out"
    last = max(e["ts"] for e in mixed if e["name"].startswith("sw::step") and plan.fingerprint in e["name"])
    ended = [e for e in events(local / "trace.json") if e["ts"] <= last or not e["name"].endswith("backward")]
    made = compare_trace(plan, written(tmp_path / "ended.json", ended))
    assert made.steps == 2 and made.notes[0] == "1 step without a backward left out"


# -- a GPU -------------------------------------------------------------------------------------------------------------


class Kineto:
    """Events as Kineto writes them for a GPU: ranges and operators on threads, launches, kernels on streams."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.number = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int, pid: int = 7, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def range(self, text: str, ts: float, dur: float, tid: int = 7) -> None:
        self.number += 1
        self.add("user_annotation", f"sw::{text}", ts, dur, tid, **{"External id": self.number, "Ev Idx": self.number})
        # Kineto's projection of the range onto the stream is no range of the host.
        self.add("gpu_user_annotation", f"sw::{text}", ts + 500, 300, 20, 0, **{"External id": self.number})

    def kernel(
        self,
        launched: float,
        ts: float,
        dur: float,
        name: str = "sm80_xmma_gemm_f32f32",
        tid: int = 7,
        cat: str = "kernel",
        linked: str = "correlation",
        stream: int = 7,
    ) -> None:
        """A kernel, and its launch; without correlation, the operator around the launch."""
        self.number += 1
        ids = {"External id": self.number, "correlation": self.number + 1000}
        if linked == "correlation":
            self.add("cuda_runtime", "cudaLaunchKernel", launched, 2, tid, **ids, cbid=211)
            flow = {"cat": "ac2g", "name": "ac2g", "id": ids["correlation"]}
            self.events.append({"ph": "s", "pid": 7, "tid": tid, "ts": launched, **flow})
            self.events.append({"ph": "f", "pid": 0, "tid": stream, "ts": ts, "bp": "e", **flow})
        else:
            self.add("cpu_op", "aten::mm", launched - 1, 5, tid, **{"External id": self.number, "Sequence number": 3})
        self.add(cat, name, ts, dur, stream, 0, **ids, device=0, stream=stream)


def gpu_trace(plan: Any, path: Path) -> Path:
    """Two steps of rank 1. The second takes twice as long on the device."""
    made = Kineto()
    for start, slow in ((1000.0, 1), (10_000.0, 2)):
        made.range(f"step rank 1 of 2, plan {plan.fingerprint}", start, 500)
        made.range("layers.0.up linear", start + 10, 50)
        made.kernel(start + 20, start + 600, 100 * slow)
        made.kernel(start + 30, start + 600 + 100 * slow, 20 * slow, "Memset (Device)", cat="gpu_memset")
        made.range("head linear", start + 100, 50)
        made.kernel(start + 110, start + 2000, 40 * slow, linked="External id")
        # The backward has a thread of its own; an operator recomputes inside of another one's backward.
        made.range("head linear backward", start + 600, 100, tid=9)
        made.kernel(start + 610, start + 3000, 80 * slow, tid=9)
        made.range("layers.0.relu recomputed", start + 630, 20, tid=9)
        made.kernel(start + 640, start + 3500, 10 * slow, "elementwise_kernel", tid=9)
        # A sum of gradients on the stream of NCCL: 300, of which 100 beside a kernel of no range (an optimizer's).
        made.range(
            "bucket 1: all_reduce of the gradients of head.bias to layers.0.up.weight (10) issue", start + 800, 9, 9
        )
        nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        made.kernel(start + 802, start + 4000, 300 * slow, nccl, tid=9, stream=20)
        made.kernel(start + 900, start + 4000, 100 * slow, "adam", tid=7)
        made.kernel(start + 870, start + 4200, 100 * slow, "elementwise_kernel", tid=9)
        made.range("layers.0.up linear backward", start + 860, 20, tid=9)
    return written(path, made.events, deviceProperties=[{"id": 0, "name": "NVIDIA H200"}], distributedInfo={"rank": 1})


def test_kernels_count_for_the_ranges_that_launched_them(local: Path, tmp_path: Path) -> None:
    plan = sw.Plan.load(local / "plan.json")
    made: TraceComparison = compare_trace(plan, gpu_trace(plan, tmp_path / "gpu.json"), rank=1)
    assert (made.device, made.steps, made.rank) == ("NVIDIA H200", 2, 1)
    us = lambda seconds: round(seconds * 1e6, 3)
    found = {
        plan.decisions[o.operator].op.module or o.operator: (us(o.forward), us(o.backward)) for o in made.operators
    }
    assert found["layers.0.up"] == (180.0, 150.0)  # medians of 120 and 240, 100 and 200
    assert found["head"] == (60.0, 120.0)
    assert found["layers.1.up"] == (0.0, 0.0)
    relu = next(o for o in made.operators if plan.decisions[o.operator].op.kind == "relu")
    assert (us(relu.forward), us(relu.backward)) == (0.0, 15.0)
    (bucket,) = [o for o in made.communication if o.operator.startswith("bucket")]
    assert us(bucket.backward) == 450.0
    # Of 300 µs 100 run beside the backward of `up`; in the second step of 600, 200.
    assert us(made.exposed) == 300.0
    assert us(made.step) == (4300 + 4600) / 2
    assert made.promised_exposed == plan.price.exposed
    assert "rank 1 of 2, measured on NVIDIA H200" in made.summary()
