"""Figures of lines: share of peak, memory, computation and exposed communication."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_networks import D, draw, labels
from torch import nn

import shardwright as sw
import shardwright.monitor as monitor_module
from shardwright import accelerators
from shardwright.monitor import PlanWork, memory_figures
from shardwright.process_runtime import Runtime, playing
from shardwright.runtime.distributed.rank_positions import WaitPoint, position, waiting

CLUSTER = replace(sw.Cluster.of("h100x8"), name="mine", peak={"float64": 1e9, "float32": 1e12})
#: Products of a step of `net`: forward and by the weight backward; by what came in too, but for what is fed.
FLOPS = 2 * 64 * 8 * 16 * (2 + 2 + 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False, dtype=D), nn.Linear(16, 8, bias=False, dtype=D))


def planned(devices: int = 4, **given: Any) -> Any:
    x, y = draw(64, 8), labels(64)
    return sw.plan(net(), (x,), nn.CrossEntropyLoss(), y, parallel_mode="data_parallel", devices=devices, **given)


def ranks_of(device: str = "cpu") -> Any:
    """A block in which this process is rank 0 of four, without a process group."""
    return playing(Runtime(True, 4, 0, torch.device(device), watch=False))


# -- share of peak -----------------------------------------------------------------------------------------------------


def test_the_share_of_peak_is_of_all_devices_in_the_dtype_of_each_operator() -> None:
    with ranks_of():
        rate, share = PlanWork(planned(cluster=CLUSTER), named=True).figures(1000.0)
    assert rate.value == FLOPS * 1000 / 1e12
    assert share.tag == "throughput/share_of_peak"
    assert share.value == pytest.approx(FLOPS * 1000 / (4 * 1e9))
    assert share.text == f"{100 * share.value:.3g} % of peak"
    with ranks_of():
        rate, share = PlanWork(planned(cluster=CLUSTER), named=True).figures(1e-3)
    assert rate.text == f"{FLOPS * 1e-3 / 1e6:.3g} MFLOP/s" and share.text == "less than 0.01 % of peak"


def test_a_cpu_has_no_share_of_a_cluster_that_nobody_named() -> None:
    plan = planned()
    with ranks_of():
        found = [len(PlanWork(plan, named).figures(1.0)) for named in (False, True)]
    assert found == [1, 2]


def test_a_cluster_that_is_assumed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "is_accelerator", lambda device: True)
    plan = planned()
    with ranks_of():
        (_, assumed), (_, named) = (PlanWork(plan, given).figures(1.0) for given in (False, True))
    assert assumed.tag == "throughput/share_of_assumed_peak" and named.tag == "throughput/share_of_peak"
    assert assumed.text.endswith(" % of the peak of h100x8, which is assumed") and assumed.value == named.value > 0


def test_one_device_that_stands_for_several_has_no_share() -> None:
    assert [f.text[-6:] for f in PlanWork(planned(cluster=CLUSTER), named=True).figures(1.0)] == ["FLOP/s"]
    assert len(PlanWork(planned(devices=1, cluster=CLUSTER), named=True).figures(1.0)) == 2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_of_an_accelerator_is_the_most_since_the_last_line(monkeypatch) -> None:
    counts = [3 << 30, 2 << 30]
    module = SimpleNamespace(
        max_memory_allocated=lambda device: counts[0], reset_peak_memory_stats=lambda device: counts.pop(0)
    )
    monkeypatch.setattr(accelerators, "module_of", lambda device: module)
    device, plan = torch.device("cuda"), SimpleNamespace(peak=5 << 29)
    with ranks_of("cuda"):
        first = memory_figures(device, plan)
    assert [f.text for f in first if f.text] == ["peak 3.0 GiB allocated (2.5 GiB planned)"]
    assert {f.tag: f.value for f in first} == {
        "memory/peak_allocated_bytes": 3 << 30,
        "memory/peak_planned_bytes": 5 << 29,
    }
    (second,) = memory_figures(device, plan)  # all ranks in one process: the plan is of each of them
    assert second.text == "peak 2.0 GiB allocated"


def test_the_resident_memory_is_named_as_such() -> None:
    (figure,) = memory_figures(torch.device("cpu"), None)
    assert figure.tag == "memory/peak_resident_bytes" and re.fullmatch(r"peak [\d.]+ [MG]iB resident", figure.text)
    assert 1 << 24 < figure.value < 1 << 40, "bytes"


# -- computation and exposed communication -----------------------------------------------------------------------------


class Ticks:
    """A clock that ticks once a question."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def lines_of(
    rank: int, world: int, compiled: bool | str = False, clip: float | None = None, scaled: bool = False
) -> tuple[str, float, float]:
    """Lines of four steps on a rank; figures of the last of them, by a clock of ticks.

    Args:
        clip: the order of the norms of `clip_grad_norm_`; None: nothing is clipped.
        scaled: True: a `GradScaler` unscales the gradients.
    """
    model = sw.AutoParallel(net(), nn.CrossEntropyLoss(), cluster=CLUSTER, compile=compiled)
    model.dataset_strategy("full_batch").hsdp(optimizer_level="level2", threshold=0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", enabled=scaled)
    out, values = io.StringIO(), {}
    run = SimpleNamespace(log=values.update, define_metric=lambda tag, step_metric: None)
    with pytest.MonkeyPatch.context() as patch, sw.Monitor(model, every=2, wandb=run, out=out) as monitor:
        patch.setattr("time.perf_counter", Ticks())
        for _ in range(4):
            loss = model(draw(64, 8), labels(64))
            scaler.scale(loss).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step(loss)
        assert len(position.times) == (rank == 0 and world > 1 and not compiled)
    assert position.times == ()
    return out.getvalue(), values.get("time/computation_s", 0.0), values.get("time/exposed_communication_s", 0.0)


def on_ranks(rank: int, world: int) -> list[Any]:
    sw.init()
    return [
        lines_of(rank, world),
        lines_of(rank, world, "eager"),
        lines_of(rank, world, clip=2.0),
        lines_of(rank, world, clip=math.inf),
        lines_of(rank, world, scaled=True),
    ]


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_ranks(on_ranks, 2)


def test_ranks_measure_what_they_wait_for(ranks: list[Any]) -> None:
    (text, computation, exposed), (silent, *_) = (rank[0] for rank in ranks)
    assert silent == ""
    first, second = text.splitlines()
    for line in (first, second):
        assert " exposed communication" in line and " computation" in line and " % of peak" in line
    # Each wait point is a tick from its begin to its end, and one to the next; each step begins and ends with another.
    assert exposed >= 2 and exposed == int(exposed), "the loss and the gradients are summed over the ranks"
    assert computation == exposed + 1


def test_norms_of_gradients_and_the_check_of_a_scaler_are_exposed(ranks: list[Any]) -> None:
    """Each is one all-reduce, and with it one wait point of a step more."""
    plain, _, clipped, extreme, scaled = (exposed for _, _, exposed in ranks[0])
    assert (clipped - plain, extreme - plain, scaled - plain) == (1, 1, 1)


def test_a_compiled_program_is_not_measured(ranks: list[Any]) -> None:
    text = ranks[0][1][0]
    assert len(text.splitlines()) == 2 and "exposed" not in text and "computation" not in text and "% of peak" in text


def test_nothing_is_measured_where_all_ranks_are_in_one_process() -> None:
    sw.init(devices=2)
    text, *_ = lines_of(0, 1)
    assert len(text.splitlines()) == 2 and "exposed" not in text and "computation" not in text
    assert "% of peak" not in text and "MFLOP/s" in text


def test_an_accelerators_events_are_queued_in_the_steps_of_lines_alone(monkeypatch) -> None:
    """A device with a clock of its own: each event takes a millisecond, and each message of three."""
    log: list[str] = []
    device: Any = SimpleNamespace(now=0.0)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self) -> None:
            device.now += 1.0
            self.at = device.now
            log.append("event")

        def query(self) -> bool:
            log.append("asked")
            return True

        def synchronize(self) -> None:
            assert "asked" in log, "the host asks before it waits"

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    monkeypatch.setattr(accelerators, "module_of", lambda device: SimpleNamespace(Event=Event))
    model: Any = nn.Linear(1, 1)
    model.program_settings = SimpleNamespace(compiled=None)
    out = io.StringIO()
    with ranks_of("cuda"), sw.Monitor(model, every=3, out=out) as monitor:
        for _ in range(6):
            with waiting(WaitPoint("a message")):
                device.now += 3.0
                log.append("message")
            monitor.step()
            log.append("step")
    one = ["message", "step"]
    measured = ["event", "event", "message", "event", "event", "asked", "step"]
    assert log == [
        *one,
        *one[:1],
        measured[0],
        "step",
        *measured[1:],
        *one,
        *one[:1],
        measured[0],
        "step",
        *measured[1:],
    ]
    assert [line.split("  ")[-2:] for line in out.getvalue().splitlines()] == [
        ["2 ms computation", "4 ms exposed communication"]
    ] * 2
