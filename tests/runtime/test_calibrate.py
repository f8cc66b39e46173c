"""``shardwright calibrate``: the fit, the levels, and real ranks that measure themselves."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import forked_python
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from ranks import PATIENCE, run_ranks
from torch import nn

import shardwright as sw
from shardwright.cli.main import main
from shardwright.cluster import Cluster, Level
from shardwright.cost.communication_schedule import AUTO, PIECE
from shardwright.cost.cost_model import CostModel
from shardwright.errors import SettingError
from shardwright.layout import Digit
from shardwright.redistribution import CollectiveKind
from shardwright.runtime import calibrate
from shardwright.runtime.calibrate import KINDS, VISIBLE, Timing, fit, levels_of

DEVICES = 8
SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20)


# -- the fit -----------------------------------------------------------------------------------------------------------


def cluster_of(latency: float, bandwidth: float) -> Cluster:
    return Cluster("made up", (Level("host", DEVICES, bandwidth, latency),), 1e9, {"float32": 1e12}, 1e11, 1e-6)


def costs_of(latency: float, bandwidth: float) -> CostModel:
    return CostModel(cluster_of(latency, bandwidth), DEVICES)


def made_up(latency: float, bandwidth: float, noise: float = 0.0) -> list[Timing]:
    """The seconds of the cost model, each off by a factor of about 1 + noise."""
    factors = np.exp(noise * np.random.default_rng(0).standard_normal(1000)).tolist()
    shapes = [
        (calibrate._redistribution(kind, DEVICES, Digit(n, 1)), nbytes)
        for n in (2, 4, 8)
        for kind in KINDS
        for nbytes in SIZES
    ]
    costs = costs_of(latency, bandwidth)
    return [Timing(*shape, factor * costs.redistribution(*shape)) for shape, factor in zip(shapes, factors)]


@settings(max_examples=25)
@example(-5.5, 10.0)
@given(st.floats(-7, -2), st.floats(7, 11.5))
def test_latency_and_bandwidth_are_found_again(latency: float, bandwidth: float) -> None:
    latency, bandwidth = 10**latency, 10**bandwidth
    found = fit(made_up(latency, bandwidth), costs_of)
    costs = costs_of(*found)
    # Where all messages together hardly depend on one of the two, it cannot be known: what counts are the seconds.
    for timing in made_up(latency, bandwidth):
        assert costs.redistribution(timing.redistribution, timing.nbytes) == pytest.approx(
            timing.seconds, rel=1.5 * VISIBLE
        )
    if SIZES[0] / 4 < latency * bandwidth < SIZES[-1]:
        assert found == (pytest.approx(latency, rel=1e-2), pytest.approx(bandwidth, rel=1e-2))


def test_noise_does_not_mislead_the_fit() -> None:
    latency, bandwidth = fit(made_up(1e-3, 3e8, noise=0.2), costs_of)
    assert latency == pytest.approx(1e-3, rel=0.15) and bandwidth == pytest.approx(3e8, rel=0.15)


def test_what_noise_hides_stays_above_zero() -> None:
    shapes = made_up(1e-5, 1e9)
    same = [Timing(t.redistribution, t.nbytes, 1e-3) for t in shapes]  # no bandwidth explains this
    shrinking = [Timing(t.redistribution, t.nbytes, 1 / t.nbytes) for t in shapes]
    for timings in (same, shrinking):
        latency, bandwidth = fit(timings, costs_of)
        assert 0 < latency < 1 and 0 < bandwidth < float("inf")


@settings(max_examples=25)
@given(st.integers(0, 1000), st.floats(1e-5, 1e-1), st.floats(0, 1))
def test_a_bandwidth_that_noise_hides_is_one_that_was_nearly_seen(seed: int, seconds: float, noise: float) -> None:
    """All messages take about one time, as on a busy machine: the link is no thousand times faster than the best."""
    draws = np.random.default_rng(seed).standard_normal(1000).tolist()
    timings = [
        Timing(t.redistribution, t.nbytes, seconds * math.exp(noise * draw))
        for t, draw in zip(made_up(1e-5, 1e9), draws)
    ]
    _, bandwidth = fit(timings, costs_of)
    assert bandwidth < max(t.nbytes / t.seconds for t in timings) * DEVICES / VISIBLE


# -- levels ------------------------------------------------------------------------------------------------------------


def test_levels_are_hosts() -> None:
    assert levels_of(["a"] * 8) == (8, 1)
    assert levels_of(["a", "a", "b", "b", "c", "c"]) == (2, 3)
    assert levels_of(["a", "b"]) == (1, 2)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"], ["a", "a", "b", "b", "a", "a"]])
def test_ranks_that_make_no_levels_are_named(hosts: list[str]) -> None:
    with pytest.raises(SettingError, match=r"the ranks do not make levels.*: a: ranks \[0, .*b: ranks \[") as caught:
        levels_of(hosts)
    assert "as many ranks on every host" in str(caught.value)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_that_are_summed_travel_in_the_runtimes_buckets() -> None:
    """Measured steps show it: 32 sums of small gradients do not take 32 latencies."""
    full = min(AUTO, DEVICES * PIECE)
    costs = costs_of(1e-3, 3e8)
    over = Digit(DEVICES, 1)
    for nbytes in (4, 4096, full):
        summed = calibrate._redistribution(CollectiveKind.ALL_REDUCE, DEVICES, over)
        assert costs.stored(summed, nbytes) == pytest.approx(nbytes / full * costs.redistribution(summed, full))
    assert costs.stored(summed, 4 * full) == pytest.approx(costs.redistribution(summed, 4 * full))
    few = calibrate._redistribution(
        CollectiveKind.ALL_REDUCE, DEVICES, Digit(2, 1)
    )  # a large one of few ranks does so by itself
    assert costs.stored(few, 2 * PIECE) == pytest.approx(costs.redistribution(few, 2 * PIECE))
    assert costs.stored(few, PIECE) == pytest.approx(costs.redistribution(few, 2 * PIECE) / 2)
    scattered = calibrate._redistribution(
        CollectiveKind.REDUCE_SCATTER, DEVICES, over
    )  # as optimizer parallel does: each by itself
    assert costs.stored(scattered, 4096) == costs.redistribution(scattered, 4096) > 1e-3


# -- real ranks --------------------------------------------------------------------------------------------------------


def on_ranks(rank: int, world: int, folder: str) -> dict:
    """All that two ranks are asked for, one after the other, with short tasks; the command below has the usual ones."""
    torch.set_num_threads(1)
    runtime = sw.init()
    calibrate.MESSAGES, calibrate.LONG_ENOUGH = (4 << 10, 64 << 10), 0.005
    out: dict = {"cluster": calibrate.calibrate(runtime, "two", rounds=1).to_dict()}
    calibrate.DTYPES = ("float32", "float64")
    path = os.path.join(folder, "written.json")
    out["code"] = main(["calibrate", "--rounds", "1", "--output", path, "--name", "through the command"])
    out["there"] = os.path.exists(path)  # for every rank once the command has returned
    out["no folder"] = main(["calibrate", "--output", os.path.join(folder, "nowhere", "x.json")])
    out["other number"] = main(["calibrate", "--devices", "3", "--output", path])
    with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
        out["full disk"] = main(["calibrate", "--rounds", "1", "--output", path])
    return out


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("calibrate")
    return run_ranks(on_ranks, 2, str(folder)), folder


def check_sane(cluster: Cluster, devices: int) -> None:
    """No measure of this machine: no sane one is outside of these."""
    assert cluster.devices == devices
    for level in cluster.levels:
        assert 1e-9 < level.latency < 1 and 1e5 < level.bandwidth < 1e13
    assert {"float32", "float64"} <= set(cluster.peak)
    assert all(1e5 < rate < 1e16 for rate in cluster.peak.values())
    assert cluster.peak["float32"] > cluster.peak["float64"] / 4
    assert 1e6 < cluster.memory_bandwidth < 1e14 and 1e-8 < cluster.overhead < 0.1
    assert 2**24 < cluster.memory < 2**50


def test_two_ranks_measure_themselves(measured: tuple[list[dict], Path]) -> None:
    (first, second), _ = measured
    assert first["cluster"] == second["cluster"]
    cluster = Cluster.of(first["cluster"], 2)
    assert cluster.name == "two" and [(level.name, level.size) for level in cluster.levels] == [("host", 2)]
    check_sane(cluster, 2)


def on_two_hosts(rank: int, world: int) -> tuple[dict, list]:
    """Two hosts as far as names go; and the groups over which conversions are measured."""
    torch.set_num_threads(1)
    calibrate.socket.gethostname = lambda: f"host{rank // 2}"
    calibrate.DTYPES, calibrate.MESSAGES, calibrate.LONG_ENOUGH = ("float32",), (4 << 10, 64 << 10), 0.002
    before, asked = calibrate._redistributions, []

    def conversions(watch, groups, size, stride):
        timings = before(watch, groups, size, stride)
        asked.append({timing.redistribution.steps[0].digits for timing in timings})
        return timings

    calibrate._redistributions = conversions
    return calibrate.calibrate(sw.init(), rounds=1).to_dict(), asked


def test_hosts_are_a_level_of_their_own() -> None:
    everyone = run_ranks(on_two_hosts, 4)
    assert all(cluster == everyone[0][0] for cluster, _ in everyone)
    cluster, asked = Cluster.of(everyone[0][0], 4), everyone[0][1]
    assert cluster.name == "host0"
    assert [(level.name, level.size) for level in cluster.levels] == [("host", 2), ("network", 2)]
    for level in cluster.levels:
        assert 1e-9 < level.latency < 1 and 1e5 < level.bandwidth < 1e13
    assert asked == [{(Digit(2, 1),)}, {(Digit(2, 2),)}]  # each level by groups that cross it alone


def alone(rank: int, world: int) -> str:
    with pytest.raises(SettingError) as caught:
        calibrate.calibrate(sw.init())
    return str(caught.value)


def test_one_rank_alone() -> None:
    assert "one rank alone has no links to measure" in run_ranks(alone, 1)[0]


def test_the_command_on_ranks_that_are_there(measured: tuple[list[dict], Path]) -> None:
    results, folder = measured
    assert [r["code"] for r in results] == [0, 0] and all(r["there"] for r in results)
    cluster = Cluster.of(folder / "written.json", 2)
    assert cluster.name == "through the command"
    check_sane(cluster, 2)
    assert json.loads((folder / "written.json").read_text()) == cluster.to_dict()


def test_a_plan_is_priced_by_the_file_that_was_written(measured: tuple[list[dict], Path]) -> None:
    path = measured[1] / "written.json"
    net, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.empty(32, 64)

    def planned(cluster: object) -> sw.Plan:
        return sw.plan(net, (x,), nn.MSELoss(), x, parallel_mode="dynamic_programming", devices=2, cluster=cluster)

    plan = planned(str(path))
    assert plan.cluster == Cluster.of(path, 2) and plan.cluster.name == "through the command"
    assert plan.cost == CostModel(Cluster.load(path), 2).plan(plan).total > 0 and plan.bound <= plan.cost
    held = json.loads(path.read_text())
    slower = held | {
        "peak": {name: rate / 10 for name, rate in held["peak"].items()},
        "overhead": held["overhead"] * 10,
        "memory_bandwidth": held["memory_bandwidth"] / 10,
        "levels": [
            level | {"latency": level["latency"] * 10, "bandwidth": level["bandwidth"] / 10} for level in held["levels"]
        ],
    }
    assert planned(slower).cost == pytest.approx(10 * plan.cost), "every figure of the file is heeded"


def test_every_rank_hears_of_what_cannot_be(measured: tuple[list[dict], Path]) -> None:
    results, _ = measured
    assert [(r["no folder"], r["other number"], r["full disk"]) for r in results] == [(1, 1, 1), (1, 1, 1)]


# -- the command -------------------------------------------------------------------------------------------------------


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return forked_python.run(
        [sys.executable, "-m", "shardwright", "calibrate", *map(str, arguments)],
        forks=True,
        cwd=cwd,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.long
def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    ended = command("--devices", 2, "--rounds", 1, "--output", "here.json", "--name", "a b", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cluster = Cluster.of(tmp_path / "here.json", 2)
    assert cluster.name == "a b"
    check_sane(cluster, 2)
    assert ended.stdout.rstrip().endswith("written to here.json") and "a b: 2 devices" in ended.stdout
    assert "worker 1 finished" in ended.stdout and not ended.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices", "1"], "'1' is not a number from 2"),
        (["--devices", "x"], "'x' is not a number from 2"),
        (["--rounds", "0"], "'0' is not a number from 1"),
        (["--output", "nowhere/x.json"], "there is no folder nowhere"),
        (["--output", "."], "is a folder"),
        (["--output", "x.json", "more"], "unrecognized arguments: more"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("shardwright calibrate: error: ") and message in error and error.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_what_the_launcher_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process an accelerator or core, at least two; and the launcher's exit code is the command's."""
    from shardwright.launch import run

    asked: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "run", lambda arguments: asked.append(arguments) or 7)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for cores, devices in ((1, 2), (6, 6)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert main(["calibrate", "--output", str(tmp_path / "x.json")]) == 7
        assert asked[-1].worker_num == devices
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert main(["calibrate", "--output", str(tmp_path / "x.json")]) == 7 and asked[-1].worker_num == 4
    assert f"--output={tmp_path / 'x.json'}" in asked[-1].script_args
