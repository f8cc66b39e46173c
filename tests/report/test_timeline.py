"""A simulated step as a trace and as a picture, and the command that writes them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from test_schedule_simulation import Network, planned
from test_schedules import valid
from torch import nn

import shardwright as sw
from shardwright.cli.main import main
from shardwright.pipeline.pipeline_plan import Moment, timeline_of
from shardwright.pipeline.schedule_simulation import Simulation, simulate
from shardwright.pipeline.schedules import Schedule, schedule
from shardwright.report.format import time_text
from shardwright.report.operator_names import OperatorNames
from shardwright.report.timeline import FONT, KINDS, SMALL, WIDE, headline, picture, trace

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [
    ("1f1b", 4, 8),
    ("gpipe", 4, 8),
    ("interleaved", 4, 8),
    ("zero_bubble", 4, 8),
    ("zbv", 4, 8),
    ("1f1b", 16, 64),
    ("zbv", 16, 64),
    ("1f1b", 1, 1),
]


def step(made: Schedule) -> Simulation:
    """Unequal stages that send, hold something and have something to do once."""
    stages = range(made.stages)
    return simulate(
        made,
        [1e-3 + 1e-4 * (s % 3) for s in stages],
        [2e-3] * made.stages,
        transfer=lambda *pair: 1.3e-4,
        begin=[5e-4 * (s == 1) for s in stages],
        end=[7e-4] * made.stages,
        fixed=[3e9] * made.stages,
        saved=[4e8] * made.stages,
        running=[(((0.0, 1e8), (0.5, 6e8)), ((0.0, 5e8),))] * made.stages,
    )


def complete(events: list[dict], group: int, row: int) -> list[dict]:
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (group, row)]


def consistent(events: list[dict], made: Simulation, rows: list[list[int]]) -> None:
    """Every row has its group's spans, at their times, and none that overlaps another."""
    for group, each in enumerate(rows):
        for row in each:
            found = complete(events, group, row)
            assert [e["name"] for e in found] == [str(span.action) for span in made.by_group[group]]
            for event, span in zip(found, made.by_group[group]):
                assert event["ts"] == pytest.approx(span.start * 1e6, abs=1e-3)
                assert event["ts"] + event["dur"] == pytest.approx(span.stop * 1e6, abs=2e-3)
                assert event["dur"] >= 0
            for a, b in zip(found, found[1:]):
                assert a["ts"] + a["dur"] <= b["ts"] + 1e-6


@pytest.mark.parametrize(("name", "groups", "micro_batches"), SIZES)
def test_a_trace_has_the_spans_and_the_bytes(name: str, groups: int, micro_batches: int) -> None:
    made = step(schedule(name, groups, micro_batches))
    held = json.loads(json.dumps(trace(made, [f"ranks {g}" for g in range(groups)])))
    events = held["traceEvents"]
    consistent(events, made, [[0]] * groups)
    assert sum(e["ph"] == "X" for e in events) == len(made.spans)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"ranks {g}" for g in range(groups)}
    assert held["otherData"]["bubble"] == made.bubble
    for group in range(groups):
        counters = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["pid"] == group]
        times = [t for t, _ in counters]
        assert times == sorted(set(times)) and times[0] == 0
        assert times[-1] == pytest.approx(made.total * 1e6, abs=2e-3)
        assert max(nbytes for _, nbytes in counters) == made.peak(group)
        assert counters[-1][1] == made.memory(group)[-1][1]


def test_what_is_held_for_no_time_is_seen_and_passes() -> None:
    made = simulate(
        schedule("1f1b", 2, 2),
        [1.0, 1.0],
        [1.0, 1.0],
        fixed=[1.0, 1.0],
        saved=[1.0, 1.0],
        running=[(((0.0, 1.0), (1.0, 7.0)), ((0.0, 1.0),))] * 2,
    )
    counters = {e["ts"]: e["args"]["bytes"] for e in trace(made)["traceEvents"] if e["ph"] == "C" and e["pid"] == 0}
    # The forwards of group 0 end at 1 s and 2 s with 7 bytes; then it waits with two micro-batches kept until 3 s.
    assert (counters[2e6], counters[2e6 + 1e-3]) == (1 + 1 + 7, 3)
    assert counters[1e6] == 8


def test_a_row_for_each_rank_and_the_operators_below() -> None:
    made = step(schedule("1f1b", 2, 3))
    within = {
        s: [
            Moment("a", "forward", 1.0),
            Moment("a", "forward", 0.0),
            Moment("b", "forward", 3.0),
            Moment("view", "forward", 0.0),
            Moment("b", "backward", 2.0),
            Moment("a", "backward", 2.0),
        ]
        for s in range(2)
    }
    events = trace(made, ranks=[(0, 1), (2, 3)], operators=within)["traceEvents"]
    consistent(events, made, [[0, 1], [2, 3]])
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (0, 0): "rank 0",
        (0, 1): "rank 1",
        (0, 2): "operators",
        (1, 2): "rank 2",
        (1, 3): "rank 3",
        (1, 4): "operators",
    }
    for group, row in ((0, 2), (1, 4)):
        below = complete(events, group, row)
        actions = [s for s in made.by_group[group] if str(s.action)[1] in "FB"]
        assert [e["name"] for e in below] == [n for s in actions for n in ("ab" if s.action.kind == "F" else "ba")]
        for span, pair in zip(actions, zip(below[::2], below[1::2])):
            part = 0.25 if span.action.kind == "F" else 0.5
            middle = span.start + part * (span.stop - span.start)
            assert [pair[0]["ts"], pair[1]["ts"]] == pytest.approx([span.start * 1e6, middle * 1e6], abs=1e-3)
            assert pair[1]["ts"] + pair[1]["dur"] == pytest.approx(span.stop * 1e6, abs=2e-3)


def read(text: str) -> tuple[ET.Element, list[ET.Element], list[str]]:
    """A picture: its root, the rectangles of its spans, and its texts."""
    root = ET.fromstring(text)
    return (
        root,
        [r for r in root.iter(f"{SVG}rect") if r.get("class") == "span"],
        [t.text or "" for t in root.iter(f"{SVG}text")],
    )


@pytest.mark.parametrize(("name", "groups", "micro_batches"), SIZES)
def test_a_picture_has_a_rectangle_for_each_span(name: str, groups: int, micro_batches: int) -> None:
    made = step(schedule(name, groups, micro_batches))
    root, boxes, texts = read(picture(made))
    assert len(boxes) == len(made.spans) == sum(1 for _ in root.iter(f"{SVG}rect"))
    width, height = float(root.get("width")), float(root.get("height"))
    assert width <= 3000
    tops = sorted({float(box.get("y")) for box in boxes})
    assert len(tops) == groups
    drawn = sorted((box for box in boxes), key=lambda b: (float(b.get("y")), float(b.get("x"))))
    spans = [span for row in made.by_group for span in row]
    scale = (float(drawn[-1].get("x")) - float(drawn[0].get("x"))) / ((spans[-1].start - spans[0].start) or 1)
    left = float(drawn[0].get("x")) - spans[0].start * scale
    for box, span in zip(drawn, spans):
        x, wide = float(box.get("x")), float(box.get("width"))
        assert float(box.get("y")) == tops[span.group]
        assert x == pytest.approx(left + span.start * scale, abs=0.05)
        if groups > 1:
            assert wide == pytest.approx((span.stop - span.start) * scale, abs=0.05)
        assert x > 0 and x + wide < width and float(box.get("y")) + float(box.get("height")) < height
        assert (box.find(f"{SVG}title").text or "").startswith(f"{span.action}, ")
    # Bubble, peaks, the unit of time and the names of the groups are there to read.
    assert headline(made) in texts and (f"bubble {made.bubble:.1%}" in headline(made) or groups == 1)
    assert {f"group {g}" for g in range(groups)} <= set(texts)
    assert sum(text.startswith("peak ") and text.endswith("GiB") for text in texts) == groups
    assert "time in ms" in texts
    assert sum(1 for p in root.iter(f"{SVG}path") if p.get("class") == "memory") == groups
    for kind, (words, _) in KINDS.items():
        there = any(kind == ("once" if len(s.action) == 2 else s.action.kind) for s in spans)
        assert (words in texts) == there


@pytest.mark.parametrize(("name", "groups", "micro_batches"), SIZES)
def test_labels_lie_within_their_spans(name: str, groups: int, micro_batches: int) -> None:
    made = step(schedule(name, groups, micro_batches))
    root, boxes, _texts = read(picture(made))
    labels = [t for t in root.iter(f"{SVG}text") if re.fullmatch(r"\d+[FBIW]\d+", t.text or "")]
    if micro_batches <= 8:  # all of them have room
        assert {t.text for t in labels} == {str(s.action) for s in made.spans if len(s.action) == 3}
    for label in labels:
        size = float(label.get("font-size", FONT))
        x, y, half = float(label.get("x")), float(label.get("y")), WIDE * size * len(label.text) / 2
        assert size in (FONT, SMALL)
        around = [
            b
            for b in boxes
            if float(b.get("x")) <= x - half
            and x + half <= float(b.get("x")) + float(b.get("width"))
            and float(b.get("y")) < y < float(b.get("y")) + float(b.get("height"))
        ]
        assert [b.find(f"{SVG}title").text.split(",")[0] for b in around] == [label.text]


def test_colours_tell_kinds_and_stages_apart() -> None:
    made = step(schedule("interleaved", 2, 4))
    _, boxes, texts = read(picture(made))
    by_name = {b.find(f"{SVG}title").text.split(",")[0]: b.get("fill") for b in boxes}
    assert by_name["0F0"] == KINDS["F"][1] and by_name["0B0"] == KINDS["B"][1]
    assert len({by_name[name] for name in ("0F0", "0F1", "2F0", "0B0", "2B0")}) == 5
    assert by_name["0F0"] == by_name["1F0"] == by_name["0F2"]
    assert "paler: further stages of the group" in texts


def test_names_are_escaped_and_nothing_held_is_not_drawn() -> None:
    made = simulate(schedule("1f1b", 2, 2), [1.0, 1.0], [2.0, 2.0])
    root, _, texts = read(picture(made, names=["<a> & b", 'c "d"'], title="1 < 2"))
    assert {"<a> & b", 'c "d"', "1 < 2"} <= set(texts) and not any(t.startswith("peak") for t in texts)
    assert not [p for p in root.iter(f"{SVG}path") if p.get("class") == "memory"]


@given(valid(), st.lists(st.floats(0, 5), min_size=8, max_size=8))
@settings(max_examples=40)
def test_any_step_can_be_drawn(made: Schedule, seconds: list[float]) -> None:
    count = made.stages
    found = simulate(made, seconds[:count], seconds[4 : 4 + count], saved=seconds[:count])
    _, boxes, _ = read(picture(found))
    assert len(boxes) == len(found.spans)
    consistent(json.loads(json.dumps(trace(found)))["traceEvents"], found, [[0]] * made.groups)


def test_the_time_has_round_ticks_with_a_unit() -> None:
    for seconds, unit in ((3.7, "s"), (3.7e-3, "ms"), (3.7e-6, "us"), (3.7e-9, "ns")):
        _, _, texts = read(picture(simulate(schedule("gpipe", 1, 2), [seconds], [seconds])))
        ticks = [float(t) for t in texts if re.fullmatch(r"[\d.]+", t)]
        assert f"time in {unit}" in texts and ticks[0] == 0 and 5 < len(ticks) < 20
        assert ticks[-1] <= 4 * 3.7 < ticks[-1] + 2 * ticks[1]
        assert ticks == pytest.approx([i * ticks[1] for i in range(len(ticks))])


def test_simulate_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["simulate", str(path), "--trace", str(tmp_path / "t.json"), "--picture", str(tmp_path / "p.svg")]) == 0
    out = capsys.readouterr().out
    assert "a step, without a pipeline" in out and re.search(r"0-7 +0 ", out) and "Step" not in out
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    made = timeline_of(plan)
    consistent(events, made, [[0]])
    below = complete(events, 0, 1)
    assert {e["name"] for e in below} <= set(OperatorNames(plan).paths.values()) and len(
        {e["name"] for e in below}
    ) >= 5
    assert sum(e["dur"] for e in below) == pytest.approx(plan.cost * 1e6, rel=1e-3)
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == plan.peak
    _, boxes, texts = read((tmp_path / "p.svg").read_text())
    assert len(boxes) == 2 and "ranks 0-7" in texts


def test_simulate_reads_the_plan_of_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(pipeline=dict(stages=2, micro_batches=4, stage_config={"a": 0, "b": 1, "c": 1}))
    path, written, drawn = (tmp_path / name for name in ("plan.json", "t.json", "p.svg"))
    plan.save(path)
    command = ["simulate", str(path), "--trace", str(written), "--picture", str(drawn)]
    assert main(command) == 0
    made, out = timeline_of(plan), capsys.readouterr().out
    assert headline(made) in out and made.schedule.grid().strip() in out
    events = json.loads(written.read_text())["traceEvents"]
    consistent(events, made, [[0], [0]])
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named[:2] == ["ranks 0-3", "ranks 4-7"]
    for stage in plan.stages:
        assert {e["name"] for e in complete(events, stage.number, 1)} & set(stage.plan.decisions)
    _, boxes, texts = read(drawn.read_text())
    assert len(boxes) == len(made.spans) and {"ranks 0-3", "ranks 4-7"} <= set(texts)
    monkeypatch.setattr("shardwright.cli.plan_command.OPERATORS", 10)
    assert main(command) == 0
    assert "the trace is without operators" in capsys.readouterr().err
    assert not complete(json.loads(written.read_text())["traceEvents"], 0, 1)


def test_messages_beside_computation_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(hsdp={"optimizer_level": "level3", "threshold": 0})
    path, written, drawn = (tmp_path / name for name in ("plan.json", "t.json", "p.svg"))
    plan.save(path)
    assert main(["simulate", str(path), "--trace", str(written), "--picture", str(drawn)]) == 0
    out = capsys.readouterr().out
    assert f"a step takes {time_text(plan.price.elapsed)}: computing {time_text(plan.price.compute)}" in out
    assert f"waiting for messages {time_text(plan.price.exposed)} of" in out and "waited for longest: " in out
    events = json.loads(written.read_text())["traceEvents"]
    named = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert list(named) == ["computation", "NVLink 4"]
    for stream, row in named.items():
        spans = [span for span in OperatorNames(plan).in_time(plan.in_time).spans if span.stream == stream]
        found = complete(events, *row)
        assert [e["name"] for e in found] == [span.what for span in spans] and spans
        assert [e["ts"] for e in found] == pytest.approx([span.start * 1e6 for span in spans], abs=1e-3)
    # The gather of the second layer's weight stands beside the computation of the first layer.
    gathers = [span for span in plan.in_time.spans if span.stream == "NVLink 4" and span.what.startswith("all_gather")]
    first = next(span for span in plan.in_time.spans if span.stream == "computation")
    assert any(span.start < first.stop for span in gathers)
    streams = [r for r in ET.fromstring(drawn.read_text()).iter(f"{SVG}rect") if r.get("class") == "stream"]
    assert len(streams) == len(plan.in_time.spans)
    assert {"computation", "NVLink 4"} <= {t.text for t in ET.fromstring(drawn.read_text()).iter(f"{SVG}text")}


def test_messages_of_stages_beside_computation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(
        pipeline=dict(stages=2, micro_batches=4, stage_config={"a": 0, "b": 1, "c": 1}),
        hsdp={"optimizer_level": "level3", "threshold": 0},
    )
    path, written = tmp_path / "plan.json", tmp_path / "t.json"
    plan.save(path)
    assert main(["simulate", str(path), "--trace", str(written)]) == 0
    alone, beside = timeline_of(plan), timeline_of(plan, beside=True)
    assert beside.total < alone.total and plan.cost == alone.total
    assert f"with messages beside computation, as on a library: {headline(beside)}" in capsys.readouterr().out
    names = [e["args"]["name"] for e in json.loads(written.read_text())["traceEvents"] if e["name"] == "process_name"]
    assert names[2:] == [
        f"messages beside computation, stage {s}, one micro-batch and what is sent once a step" for s in range(2)
    ]
    for stage in plan.stages:
        spans = [s for s in beside.spans if s.group == stage.number and str(s.action).endswith("F0")]
        assert spans[0].stop - spans[0].start == pytest.approx(stage.plan.stage_in_time.forward)


def test_simulate_says_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    planned().save(path)
    assert main(["simulate", str(tmp_path / "none.json")]) == 2
    assert main(["simulate", str(path), "--trace", str(tmp_path / "none" / "t.json")]) == 2
    assert capsys.readouterr().err.count("shardwright simulate: error: ") == 2
    with pytest.raises(SystemExit) as stop:
        main(["simulate", str(path), "--picture", "p.png"])
    assert stop.value.code == 2 and "its name ends with .svg" in capsys.readouterr().err


def test_what_is_printed_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.report.timeline import simulated

    plan = planned(pipeline=dict(stages=2, micro_batches=4, stage_config={"a": 0, "b": 1, "c": 1}))
    made = timeline_of(plan)
    simulated(made, [range(0, 4), range(4, 8)], 1e6)
    out = capsys.readouterr().out
    assert out.startswith(headline(made)) and f"bubble {made.bubble:.1%}" in out
    for group, ranks in enumerate(("0-3", "4-7")):
        waits = 1 - made.busy(group) / made.total
        assert re.search(rf"{ranks} +{group} .* {waits:.1%} ", out)
    assert made.schedule.grid().strip() in out and "more than a device has, which is 977 KiB" in out
    simulated(step(schedule("1f1b", 4, 64)), [range(g, g + 1) for g in range(4)], 1e12)
    out = capsys.readouterr().out
    assert "Step" not in out and "more than" not in out  # too long a grid


@pytest.mark.parametrize(
    "given_",
    [
        dict(parallel_mode="stand_alone", devices=1),
        dict(parallel_mode="recursive_programming"),
        dict(hsdp={"optimizer_level": "level3", "threshold": 0}),
        dict(parallel_mode="recursive_programming", devices=3, uneven=True),
    ],
    ids=str,
)
def test_every_plan_can_be_simulated(given_: dict, tmp_path: Path) -> None:
    batch, targets = torch.randn(64, 784), torch.randint(0, 10, (64,))
    plan = sw.plan(
        Network(),
        (batch,),
        loss_fn=nn.CrossEntropyLoss(),
        targets=targets,
        **{"parallel_mode": "data_parallel", "devices": 8, **given_},
    )
    plan.save(tmp_path / "plan.json")
    made = timeline_of(sw.Plan.load(tmp_path / "plan.json"))
    assert made.total == pytest.approx(plan.cost) and made.peak(0) == plan.peak
