"""Pipelines as they are shown: tables, summaries, differences, dumps; and the commands that show them."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_networks import Chain, setting
from small_networks import D
from test_pipeline_document import NOISY, TWO, Noisy, planned
from torch import nn

import shardwright as sw
from shardwright.cli.main import main
from shardwright.errors import PlanError
from shardwright.operator_explanation import explained
from shardwright.report.explanations import costs, explanation
from shardwright.report.format import cost_text, size_text, time_text
from shardwright.report.ir_dump import write_dumps
from shardwright.report.plan_diff import difference
from shardwright.report.tables import explain, summary


def shown(show: Any, *args: Any, **given: Any) -> str:
    out = io.StringIO()
    show(*args, file=out, **given)
    return out.getvalue()


def cells(text: str, first: str) -> list[str]:
    """The words of the line of a table that begins so."""
    return next(re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip().startswith(first))


# -- tables ------------------------------------------------------------------------------------------------------------


def test_explain_shows_each_stage_and_what_crosses() -> None:
    plan = planned(Chain(tied=True, skip=True))
    text = shown(explain, plan, width=200)
    assert text.startswith(
        f"semi_auto on 8 devices of h100x8: 2 stages, 1f1b, 4 micro-batches, 10 operators, plan {plan.fingerprint}\n"
    )
    first, second = (text.index(f"stage {s} on ranks {4 * s}-{4 * s + 3}, one micro-batch") for s in (0, 1))
    assert first < text.index(" layers.1 (linear) ") < second < text.index("mse_loss")
    assert "send.relu" not in text and "stage 0 on ranks 0-3: layers.0, layers.1\n" in text
    assert re.search(r"layers\.\{0-1\}\.weight +16x16 +16x16", text)
    crossing = [line for line in text.splitlines() if re.search(r"stage 0\s+stage 1", line)]
    assert len(crossing) == len(plan.transfers) == 3
    assert sum("once a step" in line for line in crossing) == 1 and all("comes back" in line for line in crossing)
    assert any(size_text(plan.transfers[1].nbytes) in line for line in crossing)
    for stage in plan.stages:
        sends = sum(c.sent for c in plan.collectives(stage.first))
        assert f"on each of the ranks {stage.first}-{stage.first + 3} (stage {stage.number}): parameters " in text
        assert f"; sends {size_text(sends)} in a step" in text
    assert plan.schedule.grid().splitlines()[1].strip() in text


def test_explain_fits_a_narrow_terminal() -> None:
    text = shown(explain, planned(), width=90)
    assert max(map(len, text.splitlines())) <= 90 and "layouts, local shapes" in text


def test_a_model_explains_itself(capsys: pytest.CaptureFixture) -> None:
    sw.init(devices=4)
    model = sw.AutoParallel(Chain(), nn.MSELoss()).pipeline(**TWO)
    model(torch.ones(16, 16, dtype=D), torch.ones(16, 16, dtype=D)).backward()
    model.explain()
    assert "stage 1 on ranks 2-3, one micro-batch" in capsys.readouterr().out
    model.explain("layers.2")
    assert "that stage 1 takes with one micro-batch" in capsys.readouterr().out


def test_a_summary_has_a_line_a_stage() -> None:
    plan = planned(Chain(), pipeline=setting("zbv", 4), parallel_mode="dynamic_programming", hsdp={"threshold": 0})
    text = shown(summary, plan, width=200)
    assert (
        f"{time_text(plan.cost)} a step, bubble {plan.simulation.bubble:.1%}: zbv, 4 stages on 2 groups of devices, "
        "4 micro-batches" in text
    )
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"\s+\d\s+\d-\d", line)]
    assert [line[:3] for line in lines] == [["0", "0-3", "2"], ["1", "4-7", "2"], ["2", "4-7", "2"], ["3", "0-3", "3"]]
    narrow = [re.split(r"\s{2,}", line.strip()) for line in shown(summary, plan).splitlines()]
    for line, stage in zip(lines, plan.stages):
        halves = [cells for cells in narrow if cells[:2] == line[:2]]
        assert [*halves[0], *halves[1][2:]] == line, "two tables where one is too wide, with the same cells"
        assert line[6] == f"{plan.schedule.most_saved(stage.number)}x"
        assert size_text(plan.memory_of(stage)["activations"]) in line
        assert line[-1] == size_text(plan.simulation.peak(plan.schedule.placement[stage.number]))
    assert "nothing" in next(
        line for line in text.splitlines() if re.search(r"stage 1\s+stage 2", line)
    )  # on one device
    assert "all_gather" in text


def test_communications_of_stages_alike_are_one_line() -> None:
    plan = planned(pipeline=setting("1f1b", 4))
    text = shown(summary, plan, width=160)
    sums = [c for c in plan.stages[1].plan.price.collectives if c.phase == "gradient" and c.bytes == 16 * 16 * 8]
    line = re.split(
        r"\s{2,}", next(row for row in text.splitlines() if "all_reduce" in row and "2.0 KiB" in row).strip()
    )
    assert (
        line[:2] == ["all_reduce", "0-3"] and line[5] == str(len(sums)) == "1" and line[6] == time_text(sums[0].seconds)
    )


def test_costs_name_the_stage() -> None:
    plan = planned(optimizer="sgd")
    text = shown(costs, plan, width=160)
    assert cells(text, "loss_fn")[1] == "1" and cells(text, "layers.1")[1] == "0"
    assert "Seconds are those of one micro-batch" in text


def test_an_operator_is_explained_in_its_stage() -> None:
    plan = planned()
    message = explained(plan, "layers.2")
    assert (message.stage, message.decision.op.name) == (1, "linear_2") and message.plan is plan.stages[1].plan
    assert message.cost == pytest.approx(plan.stages[1].plan.cost) and message.alternatives
    assert "that stage 1 takes with one micro-batch" in shown(explanation, message)
    with pytest.raises(PlanError, match="no operator is called 'layers.9'"):
        explained(plan, "layers.9")


# -- differences -------------------------------------------------------------------------------------------------------


def test_equal_pipelines() -> None:
    assert difference(planned(), planned()).equal
    assert not difference(planned(), planned(pipeline=None)).equal


def test_what_moved_is_said() -> None:
    moved = TWO | {"stage_config": {f"layers.{i}": min(i, 1) for i in range(4)}, "scheduler": "gpipe"}
    found = difference(planned(), planned(pipeline=moved))
    assert found.settings == ("schedule: 1f1b -> gpipe",)
    lines = "\n".join(found.lines)
    assert re.search(r"~ layers\.1 \(linear\): stage 0, \(\(4, 1\), .* -> stage 1, \(\(4, 1\), ", lines)
    assert "layers.2" not in lines and "linear_" not in lines
    assert "- send of relu_1: " in lines and "+ send of relu: " in lines
    assert (
        "~ parameter layers.1.bias: [16] (1,) in stage 0, on ranks 0-3 -> [16] (1,) in stage 1, on ranks 4-7" in lines
    )


def test_other_cuts_and_another_count_of_stages() -> None:
    found = difference(planned(), planned(Chain(), pipeline=setting("1f1b", 4)))
    assert found.settings == (
        "groups of devices: 2 -> 4",
        "groups of the stages: [0, 1] -> [0, 1, 2, 3]",
        "devices of the stages: [4, 4] -> [2, 2, 2, 2]",
    )
    alone = difference(planned(), planned(pipeline=None))
    assert "micro-batches: 4 -> no pipeline" in alone.settings and any(
        "f64[4, 16]" in change.before for change in alone.operators
    )


# -- dumps -------------------------------------------------------------------------------------------------------------


def exchanged(text: str, count: int) -> Counter:
    """The collectives of a step in a dump: (operation, ranks, bytes) -> how often."""
    out: Counter = Counter()
    times = 1
    for line in text.splitlines():
        if line.startswith("# once a step"):
            times = 1
        elif line.startswith("# forward") or re.match(r"%\S+ = recv\(.*   # from stage", line):
            times = count
        found = re.match(r"(?:%\S+ = )?(\w+)\(.*\{ranks: \(([\d, ]+?),?\), bytes: (\d+)", line)
        if found:
            ranks = tuple(map(int, found[2].split(", ")))
            out[found[1], ranks, int(found[3])] += times
    return out


DUMPED = {
    "plain": dict(),
    "tied and skip": dict(net=Chain(tied=True, skip=True), pipeline=setting("1f1b", 4)),
    "zbv": dict(pipeline=setting("zbv", 4), parallel_mode="dynamic_programming", hsdp={"threshold": 0}),
    "level3": dict(hsdp={"threshold": 0, "optimizer_level": "level3"}, dataset_strategy="data_parallel"),
    "recomputed": dict(net=Chain(skip=True), recompute=lambda op: op.kind == "relu"),
    "norms and random": dict(net=Noisy(), pipeline=NOISY),
}


@pytest.mark.parametrize("name", DUMPED)
def test_dumps_send_what_the_plan_says(name: str, tmp_path: Path) -> None:
    plan = planned(**DUMPED[name])
    write_dumps(plan, tmp_path, range(plan.devices))
    pairs: Counter = Counter()
    for rank in range(plan.devices):
        text = (tmp_path / f"rank_{rank}" / "execute.ir").read_text()
        mine = exchanged(text, plan.micro_batches)
        assert mine == Counter((c.op, c.ranks, c.bytes) for c in plan.collectives(rank)), f"rank {rank}"
        assert all(rank in ranks for _, ranks, _ in mine)
        for (op, ranks, size), times in mine.items():
            if op in ("send", "recv"):
                assert ranks[0 if op == "send" else 1] == rank
                pairs[ranks, size] += times if op == "send" else -times
    assert not any(pairs.values())  # each is received that is sent


def test_a_dump_has_the_schedule_at_its_head_and_a_part_for_each_stage(tmp_path: Path) -> None:
    plan = planned(pipeline=setting("zbv", 4))
    write_dumps(plan, tmp_path, [5])
    for name in ("execute.ir", "step_parallel_begin.ir"):
        text = (tmp_path / "rank_5" / name).read_text()
        assert f"plan: {plan.fingerprint}" in text and "# stage 0 " not in text
        head = text.split("\n\n")[0]
        assert f"# group 1, ranks 4 to 7: {' '.join(map(str, plan.schedule.actions[1]))}" in head
        assert all(f"#   {line}" in head for line in plan.schedule.grid().splitlines())
        parts = text.split("\n\n")[1:]
        assert [part.splitlines()[0] for part in parts] == [f"# stage {s} of 4, ranks 4 to 7" for s in (1, 2)]
    execute = (tmp_path / "rank_5" / "execute.ir").read_text()
    assert "%relu = recv()  {ranks: (1, 5), bytes: 128}  f64[1, 16]   # from stage 0" in execute
    assert re.search(r"hand_on\(%\d+\)  f64\[1, 16\]   # to stage 2, which this rank runs too", execute)
    assert "%relu_1 = here()  f64[1, 16]   # from stage 1, which this rank runs too" in execute
    assert "linear(%relu, %layers.1.weight, %layers.1.bias)  f64[1, 16], f64[16, 16], f64[16] -> f64[1, 16]" in execute
    assert not (tmp_path / "rank_0").exists()
    with pytest.raises(PlanError, match="rank 8 is outside"):
        write_dumps(plan, tmp_path, [8])


def test_a_mean_is_said_to_be_one(tmp_path: Path) -> None:
    write_dumps(planned(), tmp_path, [4])
    assert "# of a loss 1/4: its mean over micro-batches" in (tmp_path / "rank_4" / "execute.ir").read_text()


def test_models_write_them(tmp_path: Path) -> None:
    sw.init(devices=4)
    model = sw.AutoParallel(Chain(), nn.MSELoss(), save_graphs=tmp_path).pipeline(**TWO)
    model(torch.ones(16, 16, dtype=D), torch.ones(16, 16, dtype=D))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank_{r}" for r in range(4)]


# -- commands ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, shardwright as sw
from torch import nn
net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
model = sw.AutoParallel(net, nn.MSELoss())
model.pipeline(2, "{name}", 4, {{"0": 0, "1": 0, "2": 1, "3": 1}}{more})
model(torch.randn(32, 16), torch.randn(32, 16))
"""

FUNCTION = """
import torch, shardwright as sw
from torch import nn
def made():
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for i, layer in enumerate(net):
        sw.set_stage(layer, i // 2)
    return dict(net=net, inputs=(torch.empty(32, 16),), targets=torch.empty(32, 16), loss_fn=nn.MSELoss())
"""


def run(*words: Any) -> int:
    return main([str(word) for word in words])


def test_plan_explain_simulate_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script, first, second = tmp_path / "train.py", tmp_path / "first.json", tmp_path / "second.json"
    script.write_text(SCRIPT.format(name="1f1b", more=""))
    assert run("plan", "--devices", 8, "--output", first, script) == 0
    assert "1f1b, 2 stages on 2 groups of devices, 4 micro-batches" in capsys.readouterr().out
    assert run("plan", "--devices", 8, "--pipeline", "2:8:gpipe", "--output", second, script) == 0
    assert "gpipe, 2 stages on 2 groups of devices, 8 micro-batches" in capsys.readouterr().out
    assert run("plan", "diff", first, second) == 1
    out = capsys.readouterr().out
    assert "schedule: 1f1b -> gpipe" in out and "micro-batches: 4 -> 8" in out
    assert run("plan", "diff", first, first) == 0
    assert run("explain", first) == 0 and run("explain", first, "linear_2") == 0
    assert "that stage 1 takes with one micro-batch" in capsys.readouterr().out
    assert run("explain", first, "nothing") == 2
    assert run("simulate", first) == 0
    assert "Step 1  0F1      1F0" in capsys.readouterr().out


def test_verify_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(name="interleaved", more=", chunks=1"))
    assert run("verify", "--devices", 4, script) == 0
    assert "ok: semi_auto on 4 devices in 2 stages, interleaved, 4 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "name", "micro_batches"), [("2", "1f1b", 2), ("2:8", "1f1b", 8), ("2:4:zero_bubble", "zero_bubble", 4)]
)
def test_a_function_s_pipeline_is_asked_for(asked: str, name: str, micro_batches: int, tmp_path: Path) -> None:
    source, output = tmp_path / "models.py", tmp_path / "plan.json"
    source.write_text(FUNCTION)
    assert run("plan", "--devices", 4, "--pipeline", asked, "--output", output, f"{source}:made") == 0
    plan = sw.Plan.load(output)
    assert (plan.schedule.name, plan.micro_batches, len(plan.stages)) == (name, micro_batches, 2)


def test_another_schedule_has_its_own_chunks(tmp_path: Path) -> None:
    script, output = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(
        SCRIPT.format(name="interleaved", more=", chunks=2").replace(
            '{"0": 0, "1": 0, "2": 1, "3": 1}', '{"0": 0, "1": 1, "2": 2, "3": 3}'
        )
    )
    assert run("plan", "--devices", 4, "--pipeline", "2:4", "--output", output, script) == 0
    assert sw.Plan.load(output).schedule.placement == (0, 1, 0, 1)
    assert run("plan", "--devices", 4, "--pipeline", "4:4:gpipe", "--output", output, script) == 0
    assert sw.Plan.load(output).schedule.placement == (0, 1, 2, 3)


@pytest.mark.parametrize("asked", ["0", "x", "2:x", "2:0", "2:4:", ":4", "-1", "2.5"])
def test_a_pipeline_that_is_none(asked: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        run("plan", "--devices", 4, f"--pipeline={asked}", tmp_path / "train.py")
    assert caught.value.code == 2 and "is not STAGES[:MICRO[:SCHEDULER]]" in capsys.readouterr().err


def test_stages_that_there_are_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(name="1f1b", more=""))
    assert run("plan", "--devices", 8, "--pipeline", "4", "--output", tmp_path / "p.json", script) == 1
    assert "no operator is in stage 2 of 4" in capsys.readouterr().err


def test_seconds_have_the_unit_in_which_they_are_read() -> None:
    """Three digits in s, ms, us or ns, and never a power of ten."""
    shown = {
        0.0: "0 us",
        1e-21: "0 us",
        0.17e-9: "0.17 ns",
        0.685e-9: "0.685 ns",
        6.85e-9: "6.85 ns",
        999.9e-9: "1 us",
        1.5e-6: "1.5 us",
        999.6e-6: "1 ms",
        0.00123: "1.23 ms",
        0.9999: "1 s",
        -2e-6: "-2 us",
        999.4: "999 s",
        1234.5: "1234 s",
    }
    assert {seconds: time_text(seconds) for seconds in shown} == shown
    assert cost_text(5.534e-5) == "cost 55.34 us"
    cost, bound = 0.450296, 0.449653
    assert cost_text(cost, bound, (cost - bound) / cost) == "cost 450.296 ms, lower bound 449.653 ms, gap 0.143%"
    priced = "cost 448.278 ms, priced 449.666 ms by the search, lower bound 449.666 ms, gap 0.000%"
    assert cost_text(0.448278, 0.449666, 0.0) == priced
