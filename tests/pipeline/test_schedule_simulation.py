"""A pipeline in time: bubbles by the formulas, memory by what is kept, totals as the longest path; whole plans."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from test_schedules import valid
from torch import nn

import shardwright as sw
from shardwright.cluster import Cluster, Level
from shardwright.cost.cost_model import CostModel
from shardwright.errors import SettingError
from shardwright.pipeline.pipeline_plan import PipelinePlan, moments, timeline_of
from shardwright.pipeline.schedule_simulation import Once, Simulation, simulate
from shardwright.pipeline.schedules import Action, Schedule, forward_only, schedule


def equal(
    name: str,
    groups: int,
    micro_batches: int,
    chunks: int | None = None,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    **given_: object,
) -> Simulation:
    """Equal stages, and nothing that is sent."""
    made = schedule(name, groups, micro_batches, chunks=chunks)
    count = made.stages
    return simulate(
        made, [forward] * count, [backward] * count, **{name: [value] * count for name, value in given_.items()}
    )


def counts(groups: int) -> tuple[int, ...]:
    return groups, 2 * groups, 4 * groups, 8 * groups


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_bubbles_are_those_of_the_formulas(groups: int) -> None:
    p = groups
    for m in counts(p):
        for backward in (1.0, 2.0, 3.5):
            for name in ("gpipe", "1f1b"):
                assert equal(name, p, m, backward=backward).bubble == pytest.approx((p - 1) / (m + p - 1), rel=1e-2)
            for v in (1, 2, 3, 4):
                assert equal("interleaved", p, m, v, backward=backward).bubble == pytest.approx(
                    (p - 1) / (m * v + p - 1), rel=1e-2
                )
        # A third of the work of a micro-batch is the gradients of weights, which fill the bubble.
        assert equal("zero_bubble", p, m).bubble == pytest.approx((p - 1) / (3 * m + p - 1), rel=1e-2)
        if m >= 2 * p - 1:
            assert equal("zbv", p, m).bubble == pytest.approx((p - 1) / (6 * m + p - 1), rel=1e-2, abs=1e-12)
        if p > 1:
            for name in ("zero_bubble", "zbv"):
                assert equal(name, p, m).bubble < equal("1f1b", p, m).bubble
                # As gpipe where the whole backward is the weights' and can be put off, or nothing of it.
                assert equal(name, p, m, weights=0.0).bubble > equal(name, p, m).bubble


@pytest.mark.parametrize(("groups", "micro_batches"), [(1, 1), (2, 2), (4, 8), (8, 32)])
def test_peaks_of_1f1b_and_gpipe(groups: int, micro_batches: int) -> None:
    gpipe, ours = (equal(name, groups, micro_batches, fixed=1000.0, saved=10.0) for name in ("gpipe", "1f1b"))
    for g in range(groups):
        assert gpipe.peak(g) == 1000 + 10 * micro_batches
        assert ours.peak(g) == 1000 + 10 * min(micro_batches, groups - g)
        for each in (gpipe, ours):
            line = each.memory(g)
            assert line[0] == (0.0, 1000.0)
            assert line[-1] == (each.by_group[g][-1].stop, 1000.0)  # everything is given back
            assert [t for t, _ in line] == sorted(t for t, _ in line)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"])
def test_peaks_are_what_the_schedule_keeps(name: str) -> None:
    """A micro-batch counts in each stage of a group, from its forward to the end of its backward."""
    made = equal(name, 4, 8, saved=1.0)
    for g in range(4):
        kept = accumulate({"F": 1, "I": 0}.get(action.kind, -1) for action in made.schedule.actions[g])
        assert made.peak(g) == max(kept)


def test_memory_over_time_by_hand() -> None:
    """Two micro-batches on one device: 3 bytes saved of each, 5 at the end of a forward, 4 in a backward."""
    running = [((((0.0, 1.0), (0.5, 5.0))), ((0.0, 4.0),))]
    made = simulate(schedule("gpipe", 1, 2), [2.0], [4.0], fixed=[100.0], saved=[3.0], running=running)
    assert made.memory(0) == [
        (0, 100),
        (0, 101),
        (1, 105),
        (2, 103),
        (2, 104),
        (3, 108),
        (4, 106),
        (4, 107),
        (8, 103),
        (8, 104),
        (12, 100),
    ]
    assert made.peak(0) == 108
    actions = tuple(Action(0, kind, 0) for kind in "FIW")
    split = simulate(Schedule("mine", (0,), 1, (actions,)), [2.0], [4.0], saved=[3.0], running=running)
    assert split.memory(0) == [(0, 0), (0, 1), (1, 5), (2, 3), (2, 4), (4, 3), (4, 3), (6, 0)]
    alone = simulate(forward_only((0,), 2), [2.0], [0.0], saved=[3.0])
    assert alone.memory(0) == [(0, 0), (0, 3), (2, 0), (2, 3), (4, 0)]


def test_a_bubble_counts_devices_and_what_is_done_once() -> None:
    made = simulate(schedule("1f1b", 2, 2), [1.0, 1.0], [2.0, 2.0], begin=[0.0, 3.0], end=[1.5, 0.0], devices=[3, 1])
    assert [str(span.action) for span in made.by_group[1]] == ["begin 1", "1F0", "1B0", "1F1", "1B1"]
    assert made.by_group[1][0].action == Once(1, "begin") and made.by_group[1][0][2:] == (0.0, 3.0)
    # Group 1: 0-3 begin, 1F0 3-4, 1B0 4-6, 1F1 6-7, 1B1 7-9; then 0B1 9-11 and the end of stage 0 11-12.5.
    assert made.total == 12.5
    assert made.busy(0) == 6 + 1.5 and made.busy(1) == 6 + 3
    assert made.bubble == pytest.approx(1 - (3 * 7.5 + 9) / (4 * 12.5))


def test_what_crosses_takes_its_time_beside_the_work() -> None:
    seconds = {(0, 1): 0.5, (1, 0): 0.25}
    made = simulate(schedule("gpipe", 2, 2), [1.0, 1.0], [2.0, 2.0], transfer=lambda *pair: seconds[pair])
    starts = {str(span.action): span.start for span in made.spans}
    assert starts == {"0F0": 0, "0F1": 1, "1F0": 1.5, "1F1": 2.5, "1B0": 3.5, "1B1": 5.5, "0B0": 5.75, "0B1": 7.75}
    assert (
        simulate(schedule("interleaved", 1, 1, chunks=2), [1.0] * 2, [1.0] * 2, transfer=lambda *pair: math.inf).total
        == 4
    )  # nothing is sent within a group


def test_what_skips_stages_is_waited_for() -> None:
    seconds = {(0, 2): 7.0, (2, 0): 9.0}
    given_ = dict(transfer=lambda *pair: seconds.get(pair, 0.0))
    for skips, first in (((), 2), (((0, 2),), 8)):
        made = simulate(schedule("gpipe", 3, 3), [1.0] * 3, [2.0] * 3, skips=skips, **given_)
        starts = {str(span.action): span.start for span in made.spans}
        assert starts["2F0"] == first
        # 2B0 is done two seconds after the third forward of stage 2; its gradient for stage 0 is nine on the way.
        assert starts["0B0"] == first + 3 + 2 + (9 if skips else 2)
    split = simulate(schedule("zero_bubble", 3, 3), [1.0] * 3, [2.0] * 3, skips=[(0, 2)], **given_)
    starts = {str(span.action): span for span in split.spans}
    assert starts["0I0"].start == starts["2I0"].stop + 9


def longest(
    made: Schedule, seconds: dict[str, list[float]], sending: dict[tuple[int, int], float], skips: list[tuple[int, int]]
) -> float:
    """The length of the longest chain of actions, each of which has to wait for the one before it."""
    before = {b: a for row in made.actions for a, b in zip(row, row[1:])}
    kinds = {(a.stage, a.micro, a.kind) for row in made.actions for a in row}

    def takes(a: Action) -> float:
        whole, part = seconds["backward"][a.stage], seconds["weights"][a.stage]
        return {"F": seconds["forward"][a.stage], "B": whole, "I": whole - part, "W": part}[a.kind]

    def sent(source: int, target: int) -> float:
        return 0.0 if made.placement[source] == made.placement[target] else sending[source, target]

    @lru_cache(None)
    def stops(a: Action) -> float:
        group = made.placement[a.stage]
        waits = [sum(s for s, home in zip(seconds["begin"], made.placement) if home == group)]
        if a in before:
            waits.append(stops(before[a]))
        pairs = {*zip(range(made.stages), range(1, made.stages)), *skips}
        if a.kind == "F":
            waits += [stops(Action(s, "F", a.micro)) + sent(s, a.stage) for s, t in pairs if t == a.stage]
        elif a.kind == "W":
            waits.append(stops(a._replace(kind="I")))
        else:
            waits.append(stops(a._replace(kind="F")))
            waits += [
                stops(Action(t, "I" if (t, a.micro, "I") in kinds else "B", a.micro)) + sent(t, a.stage)
                for s, t in pairs
                if s == a.stage
            ]
        return max(waits) + takes(a)

    ends = [sum(e for e, home in zip(seconds["end"], made.placement) if home == g) for g in range(made.groups)]
    return max(stops(row[-1]) + end for row, end in zip(made.actions, ends))


@given(valid(), st.data())
def test_the_total_is_the_longest_path(made: Schedule, data: st.DataObject) -> None:
    number = st.integers(0, 20).map(float)
    draw = lambda: [data.draw(number) for _ in range(made.stages)]
    seconds = {name: draw() for name in ("forward", "backward", "begin", "end")}
    seconds["weights"] = [data.draw(st.integers(0, int(b))) for b in seconds["backward"]]
    sending = {(s, t): data.draw(number) for s in range(made.stages) for t in range(made.stages) if s != t}
    skips = [(s, t) for s in range(made.stages) for t in range(s + 2, made.stages) if data.draw(st.booleans())]
    found = simulate(made, **seconds, transfer=lambda *pair: sending[pair], skips=skips)
    assert found.total == longest(made, seconds, sending, skips)
    for group, row in enumerate(made.actions):
        spans = found.by_group[group]
        assert [s.action for s in spans if isinstance(s.action, Action)] == list(row)
        assert all(a.stop <= b.start for a, b in zip(spans, spans[1:]))
    assert 0 <= found.bubble <= 1


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        (dict(forward=[1.0]), "forward has 1 entries for 2 stages"),
        (dict(backward=[1.0, -1.0]), "backward=-1.0 of stage 1"),
        (dict(backward=[math.nan, 1.0]), "backward=nan of stage 0"),
        (dict(weights=[1.0, 3.0]), "weights=3.0 of stage 1: that is more than its backward=2.0"),
        (dict(saved=[1.0]), "saved has 1 entries"),
        (dict(fixed=[1.0, math.inf]), "fixed=inf of stage 1"),
        (dict(end=[1.0]), "end has 1 entries"),
        (dict(running=[]), "running has 0 entries for 2 stages"),
        (dict(devices=[1]), "devices has 1 entries for 2 groups"),
    ],
)
def test_what_cannot_be_simulated(given_: dict, text: str) -> None:
    with pytest.raises(SettingError, match=text):
        simulate(schedule("1f1b", 2, 2), **{"forward": [1.0, 1.0], "backward": [2.0, 2.0], **given_})


def test_a_deadlock_is_not_simulated() -> None:
    rows = ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    made = Schedule(
        "mine", (0, 1), 2, tuple(tuple(Action(int(a[0]), a[1], int(a[2])) for a in row.split()) for row in rows)
    )
    with pytest.raises(SettingError, match="0B0 and 1F1 wait for each other"):
        simulate(made, [1.0, 1.0], [1.0, 1.0])


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(784, 512), nn.Linear(512, 512), nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.a(x))
        return self.c(F.relu(self.b(a)) + a)


def planned(**given_: object) -> sw.Plan:
    batch, targets = torch.randn(64, 784), torch.randint(0, 10, (64,))
    return sw.plan(
        Network(),
        (batch,),
        loss_fn=nn.CrossEntropyLoss(),
        targets=targets,
        devices=8,
        **{"parallel_mode": "data_parallel", **given_},
    )


def test_a_plan_without_a_pipeline_is_one_stage() -> None:
    plan = planned(hsdp={"optimizer_level": "level3", "threshold": 0})
    made = timeline_of(plan)
    assert [str(span.action) for span in made.spans] == ["0F0", "0B0"]
    assert (made.devices, made.bubble) == ((8,), 0)
    assert made.total == pytest.approx(plan.cost) and made.peak(0) == plan.peak
    assert made.by_group[0][0].stop == pytest.approx(plan.price.forward)
    # Moment by moment it is the timeline of the plan.
    line = made.memory(0)[1:]
    assert [nbytes for _, nbytes in line[: plan.timeline.forward]] == plan.timeline.totals()[: plan.timeline.forward]
    parts = moments(plan)
    assert tuple(m.operator for m in parts) == plan.timeline.moments
    assert sum(m.seconds for m in parts if m.half == "backward") == pytest.approx(plan.price.backward)
    assert [t for t, _ in line] == sorted(t for t, _ in line)


def test_a_plan_without_a_backward() -> None:
    net = Network().requires_grad_(False)
    plan = sw.plan(net, (torch.randn(64, 784),), devices=8, parallel_mode="data_parallel")
    made = timeline_of(plan)
    assert [str(span.action) for span in made.spans] == ["0F0"]
    assert made.total == pytest.approx(plan.cost) and made.peak(0) == plan.peak


def test_a_pipeline_is_simulated_by_the_prices_of_its_stages() -> None:
    plan = planned(pipeline=dict(stages=2, micro_batches=4, stage_config={"a": 0, "b": 1, "c": 1}))
    made = timeline_of(plan)
    assert made.devices == (4, 4)
    for stage in plan.stages:
        price, costs = stage.plan.price, CostModel(plan.cluster.part(4), 4)
        spans = [s for s in made.by_group[stage.number] if isinstance(s.action, Action)]
        assert {s.action for s in spans} == set(plan.schedule.actions[stage.number])
        # The sums of gradients are once a step, after the last backward, and the rest of the price is for each.
        work = made.busy(stage.number)
        assert work == pytest.approx(costs.plan(stage.plan, 4).total)
        last = made.by_group[stage.number][-1]
        assert last.action == Once(stage.number, "end") and 0 < last.stop - last.start < price.backward
    [crossing] = plan.transfers
    level = plan.cluster.levels[0]
    starts = {str(s.action): s for s in made.spans}
    assert starts["1F0"].start - starts["0F0"].stop == pytest.approx(level.latency + crossing.nbytes / level.bandwidth)
    assert made.total > max(made.busy(0), made.busy(1)) and 0 < made.bubble < 1
    # The first group keeps two micro-batches at most, the second one.
    for group, stage in enumerate(plan.stages):
        line = stage.plan.timeline
        kept = sum(
            h.bytes
            for h in line.allocations
            if h.start < line.forward < h.stop and h.what not in ("parameters", "gradients", "optimizer")
        )
        assert made.saved[group] == kept > 0
        assert made.peak(group) == pytest.approx(stage.plan.peak + (1 - group) * kept)


#: Two devices that are near each other, twice, and slow links between.
FAR = Cluster("far", (Level("near", 2, 1e9, 1e-6), Level("far", 2, 1e6, 1e-4)), 1e9, {"float32": 1e12}, 1e12, 1e-7)


def far(net: nn.Module) -> PipelinePlan:
    return sw.plan(
        net,
        (torch.randn(48, 784),),
        loss_fn=nn.CrossEntropyLoss(),
        targets=torch.randint(0, 10, (48,)),
        devices=3,
        parallel_mode="data_parallel",
        cluster=FAR,
        pipeline=dict(stages=3, micro_batches=3, stage_config={"a": 0, "b": 1, "c": 2}),
    )


def test_what_skips_a_stage_is_sent_past_it() -> None:
    class Joined(nn.Linear):
        def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
            return super().forward(small.repeat(1, 512) + large)

    class Skipping(Network):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.c = nn.Linear(1, 1), Joined(512, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = F.relu(self.a(x))
            return self.c(self.b(a[:, :1]), a)

    plan = far(Skipping())
    assert {(t.source, t.target): t.nbytes for t in plan.transfers} == {
        (0, 1): 16 * 4,
        (0, 2): 16 * 512 * 4,
        (1, 2): 16 * 4,
    }
    starts = {str(s.action): s for s in timeline_of(plan).spans}
    assert starts["1F0"].start - starts["0F0"].stop == pytest.approx(1e-6 + 16 * 4 / 1e9)
    assert starts["2F0"].start - starts["0F0"].stop == pytest.approx(1e-4 + 16 * 512 * 4 / 1e6)
    assert starts["0B0"].start - starts["2B0"].stop == pytest.approx(1e-4 + 16 * 512 * 4 / 1e6)


def test_a_tied_parameter_is_sent_once_a_step_and_its_gradient_back() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(784, 784), nn.Linear(784, 784), nn.Linear(784, 784)
            self.c.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(F.relu(self.b(F.relu(self.a(x)))))

    made = timeline_of(far(Shared()))
    once = {str(s.action): s.stop - s.start for s in made.spans if isinstance(s.action, Once)}
    seconds = 1e-4 + 784 * 784 * 4 / 1e6
    assert once["begin 2"] == pytest.approx(seconds) and once["end 0"] == pytest.approx(seconds)
    assert not {"begin 0", "begin 1", "end 2"} & set(once)
