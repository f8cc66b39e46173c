"""`sw.Cluster`: which levels a group of ranks crosses, presets, files and what is wrong with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import shardwright as sw
from shardwright.cluster import PRESETS
from shardwright.layout import Digit, digits_size, group_of

TWO = sw.Cluster(
    "two", (sw.Level("inner", 4, 1e9, 1e-6), sw.Level("outer", 3, 1e8, 1e-5)), 1e9, {"float32": 1e12}, 1e11, 1e-6
)


def cluster_of(*sizes: int) -> sw.Cluster:
    return replace(TWO, levels=tuple(sw.Level(f"level {i}", size, 1e9, 1e-6) for i, size in enumerate(sizes)))


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        ([(4, 1)], (4, 1)),
        ([(3, 4)], (1, 3)),
        ([(12, 1)], (4, 3)),
        ([(2, 2), (3, 4)], (2, 3)),
        ([(6, 2)], (2, 3)),
        ([(2, 1)], (2, 1)),
        ([], (1, 1)),
        ([(3, 1)], (1, 3)),  # ranks 3, 4, 5 lie on both sides of the border
        ([(6, 1)], (1, 6)),  # likewise 0 to 5: what cannot be split counts as outside
        ([(2, 6)], (1, 2)),
    ],
)
def test_which_levels_a_group_crosses(digits: list[tuple[int, int]], expected: tuple[int, ...]) -> None:
    digits = [Digit(*d) for d in digits]
    assert TWO.units(digits) == expected
    assert TWO.crossed(digits) == tuple((level, n) for level, n in zip(TWO.levels, expected) if n > 1)


@st.composite
def clusters_and_digits(draw: Any) -> tuple[sw.Cluster, list[Digit]]:
    """A cluster of levels of any sizes, and some of the digits of a mixed radix of its devices."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    digits, stride = [], math.prod(sizes)
    while stride > 1:
        size = draw(st.sampled_from([d for d in range(2, stride + 1) if stride % d == 0]))
        stride //= size
        digits.append(Digit(size, stride))
    return cluster_of(*sizes), draw(st.lists(st.sampled_from(digits), unique=True)) if digits else []


@given(clusters_and_digits())
def test_the_units_crossed_multiply_to_the_group(drawn: tuple[sw.Cluster, list[Digit]]) -> None:
    cluster, digits = drawn
    units = cluster.units(digits)
    assert math.prod(units) == digits_size(digits)
    # Where the sizes divide, they are what one finds by looking at the ranks; else the outer level is counted.
    for level in range(len(units)):
        inside = math.prod(units[: level + 1])
        seen = {
            len({r for r in group_of(rank, digits) if r // cluster.below(level) == rank // cluster.below(level)})
            for rank in range(cluster.devices)
        }
        assert inside <= min(seen)
        if len(seen) == 1 and all(_divides(cluster, d) for d in digits):
            assert seen == {inside}


def _divides(cluster: sw.Cluster, digit: Digit) -> bool:
    borders = [cluster.below(i) for i in range(len(cluster.levels))]
    return all(b % digit.span == 0 or digit.stride % b == 0 or b % digit.stride == digit.span % b == 0 for b in borders)


def test_part_of_a_cluster_is_the_innermost() -> None:
    big = cluster_of(8, 4, 16)
    for devices, sizes in (
        (1, [1]),
        (6, [6]),
        (8, [8]),
        (12, [8, 2]),
        (32, [8, 4]),
        (33, [8, 4, 2]),
        (512, [8, 4, 16]),
    ):
        part = sw.Cluster.of(big, devices)
        assert [level.size for level in part.levels] == sizes
        assert part.devices >= devices and part.memory == big.memory
    with pytest.raises(sw.SettingError, match="512 devices, not 513"):
        sw.Cluster.of(big, 513)


# -- presets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_one_and_of_several_nodes(name: str) -> None:
    node, many = sw.Cluster.of(name), sw.Cluster.of(f"{name}x128", 1024)
    assert node.devices == 8 and many.devices == 1024
    assert many.levels[:1] == node.levels
    assert many.levels[1].bandwidth < many.levels[0].bandwidth
    assert many.crossed((Digit(16, 4),)) == ((many.levels[0], 2), (many.levels[1], 8))
    with pytest.raises(sw.SettingError, match="has 8 devices, not 9") as error:
        sw.Cluster.of(name, 9)
    assert "h100x8x2" in str(error.value)


def test_none_is_as_many_nodes_as_the_devices_need() -> None:
    assert sw.Cluster.of(None) == sw.Cluster.of("h100x8")
    assert sw.Cluster.of(None, 4) == sw.Cluster.of("h100x8", 4)
    assert sw.Cluster.of(None, 1024) == sw.Cluster.of("h100x8x128")
    assert [level.size for level in sw.Cluster.of(None, 12).levels] == [8, 2]


@pytest.mark.parametrize("devices", [1, 3, 8, 64])
def test_a_laptop_is_shared_by_its_devices(devices: int) -> None:
    cpu, one = sw.Cluster.of("cpu", devices), sw.Cluster.of("cpu", 1)
    (level,) = cpu.levels
    assert cpu.devices == level.size == devices and level.shared
    for whole, part in (
        (one.memory, cpu.memory),
        (one.rate("float32"), cpu.rate("float32")),
        (one.memory_bandwidth, cpu.memory_bandwidth),
    ):
        assert part * devices == pytest.approx(whole)


@pytest.mark.parametrize("name", ["h100x8", "h100x8x4", "cpu"])
def test_free_links_cost_less_than_what_a_cut_saves(name: str) -> None:
    plain = sw.Cluster.of(name)
    free = plain.with_free_links()
    assert [level.size for level in free.levels] == [level.size for level in plain.levels]
    assert (free.peak, free.memory, free.memory_bandwidth) == (plain.peak, plain.memory, plain.memory_bandwidth)
    assert sw.Cluster.of(free.to_dict()) == free
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    given = dict(parallel_mode="dynamic_programming", devices=4)
    plans = [sw.plan(net, (torch.empty(4, 8),), cluster=cluster, **given) for cluster in (plain, free)]
    whole, cut = ([bool(d.assignment.used) for d in plan.decisions.values()] for plan in plans)
    assert all(cut) and not all(whole)


@pytest.mark.parametrize("name", ["h100", "h100x8x0", "h100x8x2x2", "h100x16", "nothing", ""])
def test_an_unknown_name_is_told_the_known_ones(name: str) -> None:
    with pytest.raises(sw.SettingError, match=f"no cluster is called {name!r}") as error:
        sw.Cluster.of(name)
    assert all(known in str(error.value) for known in PRESETS)


def test_a_type_without_a_rate_has_that_of_the_nearest() -> None:
    peak = {"float32": 8.0, "bfloat16": 64.0}
    cluster = replace(TWO, peak=peak)
    expected = {"float32": 8.0, "bfloat16": 64.0, "float16": 64.0, "float64": 4.0, "int64": 8.0, "complex64": 8.0}
    assert {name: cluster.rate(name) for name in expected} == expected
    assert replace(TWO, peak={"float16": 5.0}).rate("int64") == 5.0


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cluster", [TWO, *(sw.Cluster.of(f"{name}x3") for name in PRESETS), sw.Cluster.of("cpu", 4)], ids=lambda c: c.name
)
def test_a_cluster_comes_back_from_its_file(cluster: sw.Cluster, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    cluster.save(path)
    assert sw.Cluster.of(path) == sw.Cluster.of(str(path)) == sw.Cluster.load(path) == cluster
    assert sw.Cluster.of(json.loads(path.read_text())) == cluster
    assert json.loads(path.read_text())["schema"] == 1
    assert hash(sw.Cluster.load(path)) == hash(cluster)


def _changed(change: Any) -> dict[str, Any]:
    held = TWO.to_dict()
    change(held)
    return held


FIELDS = ["name", "levels", "memory", "peak", "memory_bandwidth", "overhead"]
WRONG: dict[str, tuple[Any, str]] = {
    **{f"without {name}": (lambda h, name=name: h.pop(name), f"the field '{name}' is missing") for name in FIELDS},
    **{
        f"a level without {name}": (
            lambda h, name=name: h["levels"][1].pop(name),
            rf"'levels'\[1\]: the field '{name}' is missing",
        )
        for name in ("name", "size", "bandwidth", "latency")
    },
    **{
        f"{name} of {value}": (lambda h, name=name, value=value: h.update({name: value}), f"'{name}' is")
        for name in ("memory", "memory_bandwidth", "overhead")
        for value in (0, -1, "8", None, True, math.nan, math.inf)
    },
    **{
        f"a level's {name} of {value}": (
            lambda h, name=name, value=value: h["levels"][0].update({name: value}),
            rf"'levels'\[0\].*'{name}' is",
        )
        for name in ("size", "bandwidth", "latency")
        for value in (0, -2, "fast", math.nan)
    },
    "half a device": (lambda h: h["levels"][0].update(size=1.5), "'size' is 1.5"),
    "shared, perhaps": (lambda h: h["levels"][0].update(shared=1), "'shared' is 1"),
    "no level": (lambda h: h.update(levels=[]), "'levels' is"),
    "a level that is none": (lambda h: h["levels"].append(8), r"'levels'\[2\]: 8 is no description"),
    "too many devices": (lambda h: h["levels"][0].update(size=1 << 21), "'levels' has too many devices"),
    "no rate": (lambda h: h.update(peak={}), "'peak' is {}"),
    "a rate for all": (lambda h: h.update(peak=1e12), "'peak' is 1"),
    "a rate of nothing": (lambda h: h["peak"].update(float32=0), "'float32' is 0"),
    "a type that is none": (lambda h: h["peak"].update(floaty=1e12), "unknown type 'floaty'"),
    "an unknown field": (lambda h: h.update(bandwith=1), "unknown field 'bandwith'"),
    "an unknown field of a level": (lambda h: h["levels"][1].update(bandwith=1), "unknown field 'bandwith'"),
    "no name": (lambda h: h.update(name=""), "'name' is ''"),
    "another schema": (lambda h: h.update(schema=2), "'schema' is 2"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_told_which_field(wrong: str, tmp_path: Path) -> None:
    change, message = WRONG[wrong]
    held, path = _changed(change), tmp_path / "mine.json"
    path.write_text(json.dumps(held))
    with pytest.raises(sw.SettingError, match="NaN|Infinity" if wrong.endswith(("nan", "inf")) else message) as error:
        sw.Cluster.of(path)
    assert "mine.json" in str(error.value) and error.value.legal
    with pytest.raises(sw.SettingError, match=message):
        sw.Cluster.of(held)


def test_a_file_that_is_cut_short_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(sw.SettingError, match="mine.json: the cluster file cannot be read: No such file"):
        sw.Cluster.of(path)
    TWO.save(path)
    text = path.read_text()
    for length in (0, 1, len(text) // 2, len(text) - 2):
        path.write_text(text[:length])
        with pytest.raises(sw.SettingError, match=r"mine.json:\d+: the cluster file is no JSON, or cut short"):
            sw.Cluster.of(path)
    path.write_text("[1]")
    with pytest.raises(sw.SettingError, match="the cluster file is a list, and no object"):
        sw.Cluster.of(path)


@pytest.mark.parametrize("given", [8, ["h100x8"], object()])
def test_what_no_cluster_can_be_made_of(given: Any) -> None:
    with pytest.raises(sw.SettingError, match="a cluster cannot be"):
        sw.Cluster.of(given)


@pytest.mark.parametrize("devices", [0, -1, 1.5, True])
def test_devices_that_are_no_number(devices: Any) -> None:
    with pytest.raises(sw.SettingError, match="'devices' is"):
        sw.Cluster.of("h100x8", devices)
