"""Profiles of two ranks: names of operators, redistributions, buckets and stages, and seconds beside the plans'."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from collective_log import rank_of_eight
from profile_runs import OPERATORS, check_backward, events, on_ranks, profiled, ranges, wrapped, written
from ranks import run_ranks

import shardwright as sw
from shardwright.rehearsal.trace_comparison import compare_trace
from shardwright.runtime.profile_ranges import RangeNames, bucket_text

#: On ranks: what each kind has, beside its operators.
KINDS: dict[str, list[str]] = {
    "plain": [
        "bucket 1: all_reduce of the gradients of head.bias to layers.0.up.weight (10) issue",
        "bucket 1: all_reduce of the gradients of head.bias to layers.0.up.weight (10) wait",
        "redistribute: the result of cross_entropy_loss [-] +sum 2@1 -> [-] by all_reduce(2@1)",
    ],
    "level3 recompute": [
        "redistribute: head.weight [2@1, -] -> [-, -] by all_gather(2@1)",
        "redistribute: head.weight [2@1, -] -> [-, -] by all_gather(2@1) backward",
        "gather: head.weight again",
        "layers.1.up linear recomputed",
    ],
    "pipeline": [
        "stage 1, micro-batch 1, forward",
        "stage 1, micro-batch 0, backward",
        "receive: the value 'add', micro-batch 1, of stage 0 for stage 1",
    ],
    "level3 library": [
        "bucket 1: all_gather of the weights of layers.1.up.weight to layers.1.down.bias (4) issue",
        "bucket 1: all_gather of the weights of layers.1.up.weight to layers.1.down.bias (4) wait",
        "bucket 4: all_gather of the weights of head.weight, again issue",
        "bucket 8: reduce_scatter of the gradients of layers.1.down.bias to layers.1.up.weight (4) issue",
        "bucket 8: reduce_scatter of the gradients of layers.1.down.bias to layers.1.up.weight (4) wait",
    ],
    "towers library": [
        f"redistribute: the result of first linear [2@1, -] -> [-, 2@1] by all_to_all(2@1){part}"
        for part in (" issue", " wait", " backward issue", " backward wait")
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of two ranks."""
    made = tmp_path_factory.mktemp("traces")
    run_ranks(on_ranks, 2, made, tuple(KINDS))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_names_on_ranks(kind: str, folder: Path) -> None:
    path = folder / f"{kind}.1.json"
    found = ranges(path)
    print(kind, *dict.fromkeys(found), sep="\n")
    assert [text for text in KINDS[kind] if text not in found] == []
    mine = [text for text in OPERATORS if kind != "pipeline" or not text.startswith("layers.0")]
    if "towers" in kind:
        mine = ["first linear", "second linear", "tanh", "sin", "join add", "cross_entropy_loss"]
    assert [text for text in mine if text not in found or f"{text} backward" not in found] == []
    plan = sw.Plan.load(folder / f"{kind}.plan.json")
    assert found.count(f"step rank 1 of 2, plan {plan.fingerprint}") == 2
    check_backward(path)


def test_names_are_unique(folder: Path) -> None:
    for kind in KINDS:
        plan = sw.Plan.load(folder / f"{kind}.plan.json")
        names = RangeNames.of(plan)
        texts = [names.operator(name) for name in names.paths]
        assert len(texts) == len(set(texts))


# -- beside the plan


def ours(path: Path) -> float:
    """Seconds of the outermost ranges of operators and messages, counted in another way: those in no other."""
    each = [
        e for e in events(path) if e["name"].startswith("sw::") and not e["name"].startswith(("sw::st", "sw::rank"))
    ]
    inside = lambda e, o: o is not e and o["ts"] <= e["ts"] and e["ts"] + e["dur"] <= o["ts"] + o["dur"]
    return math.fsum(e["dur"] for e in each if not any(inside(e, o) for o in each)) / 1e6


@pytest.mark.parametrize("kind", KINDS)
def test_traces_of_ranks(kind: str, folder: Path) -> None:
    path = folder / f"{kind}.1.json"
    plan = sw.Plan.load(folder / f"{kind}.plan.json")
    made = compare_trace(plan, path)
    assert (made.rank, made.devices, made.steps, made.device) == (1, 2, 2, None)
    assert [o.operator for o in made.operators if not o.forward] == []
    worked = [o for o in made.operators if o.promised_backward > o.promised_forward > 0]
    assert worked and all(o.backward > 0 for o in worked)
    # The two steps together are all ranges: a median of two is their mean. No moment counts twice.
    totals = made.totals()
    counted = totals["computing"].seconds + totals["communication"].seconds + (made.waiting or 0.0)
    if kind != "pipeline":  # where the counts of targets are no operators of the plan
        assert 2 * counted == pytest.approx(ours(path), rel=1e-6, abs=1e-7)  # a trace has whole nanoseconds
        assert totals["computing"].promised == pytest.approx(plan.price.compute, rel=1e-6)
        assert totals["communication"].promised == pytest.approx(plan.price.communication, rel=1e-6)
        assert made.promised_step == plan.cost
    else:
        assert made.stages == (1,) and made.waiting > 0 and made.promised_waiting > 0
        assert not any(plan.stages[0].plan.decisions.get(o.operator) for o in made.operators)
    assert 0 < counted <= made.step


def test_a_bucket_has_what_its_members_are_promised(folder: Path) -> None:
    plan = sw.Plan.load(folder / "plain.plan.json")
    made = compare_trace(plan, folder / "plain.0.json")
    (bucket,) = [o for o in made.communication if o.operator.startswith("bucket")]
    gradients = sum(c.seconds for c in plan.price.collectives if c.phase == "gradient")
    assert bucket.promised_backward == pytest.approx(gradients) and bucket.backward > 0 == bucket.forward
    made = compare_trace(folder / "level3 library.plan.json", folder / "level3 library.1.json")
    rows = {o.operator: o for o in made.communication}
    gather = rows["bucket 1: all_gather of the weights of layers.1.up.weight to layers.1.down.bias (4)"]
    assert gather.forward > 0 == gather.backward and gather.promised_forward > 0 == gather.promised_backward
    assert rows["bucket 4: all_gather of the weights of head.weight, again"].promised_backward > 0


def test_weights_that_a_pipeline_gathers(tmp_path: Path) -> None:
    """Once a step, in the first micro-batch; their gradients are scattered in the last."""
    with rank_of_eight(rank=3, world=4):
        model = wrapped("pipeline level1")
        path = profiled(model, tmp_path / "trace.json", steps=1)
        found = ranges(path)
        made = compare_trace(model.plan, path)
    schedule = model.plan.of_rank(3)[0].plan.stage_schedule
    rows = {o.operator: o for o in made.communication}
    assert made.rank == 3
    for role in ("gather", "scatter"):
        number, message = next((n, m) for n, m in schedule.of(role) if "head.weight" in [x.name for x in m.members])
        text = bucket_text(number, message)
        assert found.count(f"{text} issue") == found.count(f"{text} wait") == 1
        row = rows[text]
        assert (row.forward > 0, row.promised_forward > 0) == (role == "gather",) * 2
        assert (row.backward > 0, row.promised_backward > 0) == (role == "scatter",) * 2


def test_another_rank_is_an_error(folder: Path, tmp_path: Path) -> None:
    ranks = folder / "plain.plan.json", folder / "plain.1.json"
    with pytest.raises(sw.PlanError, match=r"plain.1.json is of rank 1, not of rank 0"):
        compare_trace(*ranks, rank=0)
    with pytest.raises(sw.PlanError, match="rank 2 is outside the 2 devices"):
        compare_trace(*ranks, rank=2)
    more = [dict(e, name=e["name"].replace("rank 1 of 2", "rank 1 of 4")) for e in events(ranks[1])]
    with pytest.raises(sw.PlanError, match=r"is of 4 ranks, and the plan of 2"):
        compare_trace(ranks[0], written(tmp_path / "more.json", more))
