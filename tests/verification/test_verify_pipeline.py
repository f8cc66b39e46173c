"""A pipeline against one device: what agrees, and the first operator that differs, whatever stage it is in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_networks import Chain, setting
from small_networks import D, draw, labels
from test_verify import Net, centred, line_of, normed, sixteen
from torch import nn

import shardwright as sw
from shardwright.errors import SettingError
from shardwright.runtime.pipeline_step import LocalStageLink
from shardwright.verification.verify import verify_call
from shardwright.verification.verify_report import Differences

#: Modules of `Between`: the operator in the middle lies in the second stage.
SECOND = dict(stages=2, micro_batches=4, stage_config={"first": 0, "middle": 1, "second": 1})


class Between(Net):
    """A `Net` with the operator in a module of its own."""

    def __init__(self, operator: Any, strategy: Any) -> None:
        super().__init__(operator, strategy)
        self.middle = Middle(operator, strategy)


class Middle(nn.Module):
    def __init__(self, operator: Any, strategy: Any) -> None:
        super().__init__()
        self.op = sw.shard(operator, strategy)
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x) + self.bias


def verified(net: nn.Module, **given: Any) -> sw.VerifyReport:
    given = {"pipeline": SECOND, "devices": 4} | given
    return sw.verify(net, (torch.randn(16, 16),), torch.randn(16, 16), loss_fn=nn.MSELoss(), **given)


# -- what agrees -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zbv", "csv"])
def test_a_pipeline_agrees(name: str, tmp_path: Path) -> None:
    given = setting(name, 4, tmp_path)
    report = sw.verify(
        Chain(tied=True, skip=True),
        (draw(16, 16),),
        draw(16, 16, seed=1),
        loss_fn=nn.MSELoss(),
        devices=8,
        pipeline=given,
        steps=2,
    )
    assert report.ok and report.first_difference is None and report.max_gradient_difference < 1e-12
    assert f"in 4 stages, {given['scheduler']}, 4 micro-batches, against one device, 2 steps" in report.summary()
    assert len(report.plan.stages) == 4


KINDS: dict[str, tuple] = {
    "tied and skip": (lambda: Chain(tied=True, skip=True), draw(16, 16, seed=1), nn.MSELoss(), setting("1f1b", 4)),
    "zbv": (Chain, draw(16, 16, seed=1), nn.MSELoss(reduction="sum"), setting("zbv", 4)),
    "unequal and random": (
        lambda: nn.Sequential(nn.Linear(16, 16, dtype=D), nn.Dropout(0.3), nn.Linear(16, 16, dtype=D)),
        labels(16, 16, seed=2),
        nn.CrossEntropyLoss(ignore_index=3),
        dict(stages=2, micro_batches=4, stage_config={"0": 0, "2": 1}),
    ),
    "one device a stage": (Chain, draw(16, 16, seed=1), nn.MSELoss(), setting("gpipe", 4)),
}


@pytest.mark.parametrize("name", KINDS)
def test_where_all_agrees_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Differences, "ok", property(lambda self: False))  # so that it is searched for
    net, target, loss, given = KINDS[name]
    report = sw.verify(
        net(), (draw(16, 16),), target, loss_fn=loss, devices=4, pipeline=given, steps=1, dtypes=(torch.float64,)
    )
    assert report.max_gradient_difference < 1e-12 and report.first_difference is None, report.summary()


def test_unequal_micro_batches_and_random_numbers_agree() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16))
    target = labels(16, 16, seed=2)
    target[:3] = 5
    report = sw.verify(
        net,
        (torch.randn(16, 16),),
        target,
        loss_fn=nn.CrossEntropyLoss(ignore_index=5),
        devices=4,
        pipeline=dict(stages=2, micro_batches=4, stage_config={"0": 0, "2": 1}),
    )
    assert report.ok, report.summary()


class WithMore(nn.Module):
    """Its loss is not the first of its results."""

    def __init__(self, operator: Any = torch.tanh) -> None:
        super().__init__()
        self.chain, self.middle = Chain(), Between(operator, ((2, 1),))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.middle(self.chain(x))
        return out, (out - y).square().mean()


def test_a_loss_among_other_results() -> None:
    given = dict(devices=4, pipeline=dict(stages=2, micro_batches=4, stage_config={"chain": 0, "middle": 1}))
    inputs = draw(16, 16), draw(16, 16, seed=1)
    report = sw.verify(WithMore(), inputs, **given)
    assert report.ok and 0 < report.max_gradient_difference < 1e-12
    first = first_of(sw.verify(WithMore(centred), inputs, **given))
    assert (first.operator, first.phase) == ("middle.middle.op", "gradient")


def test_a_call_is_verified_with_its_pipeline() -> None:
    sw.init(devices=4)
    model = sw.AutoParallel(Chain(), nn.MSELoss()).pipeline(**setting("gpipe", 2))
    report = verify_call(model, (draw(16, 16), draw(16, 16, seed=1)))
    assert report.ok and report.plan.schedule.name == "gpipe" and report.plan.micro_batches == 2


def test_batch_norm_in_micro_batches_is_said() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    report = verified(net, pipeline=dict(stages=2, micro_batches=2, stage_config={"0": 0, "2": 1}))
    assert not report.ok and any("batch norm" in note for note in report.notes)
    assert report.first_difference.part == "capture" and "micro-batches" in str(report.first_difference)


# -- what differs ------------------------------------------------------------------------------------------------------


def first_of(report: sw.VerifyReport) -> Any:
    assert not report.ok and report.first_difference is not None, report.summary()
    return report.first_difference


def test_a_wrong_rule_is_found_in_its_stage() -> None:
    report = verified(Between(normed, ((1, 2),)))
    first = first_of(report)
    assert (first.operator, first.op, first.phase, first.part) == ("middle.op", "normed", "forward", "operator")
    assert first.source == line_of(Middle, "self.op(x)") and report.max_loss_difference > 1e-3
    assert report.plan.stage_of(first.operator).number == 1
    assert verified(Between(normed, ((2, 1),))).ok  # the same rule where it does no harm


def test_a_wrong_gradient_is_found_before_the_stages_that_it_reaches() -> None:
    net = Between(centred, ((2, 1),))
    given = dict(stages=2, micro_batches=2, stage_config={"first": 0, "middle": 0, "second": 1})
    first = first_of(verified(net, pipeline=given))
    assert (first.operator, first.op, first.phase, first.part) == ("middle.op", "centred", "gradient", "operator")


def test_a_wrong_gradient_is_found_where_backwards_are_in_two() -> None:
    first = first_of(verified(Between(centred, ((2, 1),)), pipeline=SECOND | {"scheduler": "zero_bubble"}))
    assert (first.operator, first.phase) == ("middle.op", "gradient")


def test_an_operator_that_cannot_run_on_its_slices() -> None:
    first = first_of(verified(Between(sixteen, ((1, 2),))))
    assert first.operator == "middle.op" and "sixteen columns, not 8" in first.message


def test_what_goes_wrong_between_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LocalStageLink.receive

    def wrong(self: LocalStageLink, transfer: Any, micro: int, back: bool) -> torch.Tensor:
        got = right(self, transfer, micro, back)
        return 2 * got if micro == 2 and not back else got

    monkeypatch.setattr(LocalStageLink, "receive", wrong)
    first = first_of(verified(Chain(width=16), pipeline=setting("1f1b", 2) | {"micro_batches": 4}))
    assert (first.operator, first.part, first.phase) == ("linear_2", "conversion", "forward")
    assert first.message == "as it came from stage 0"


def test_a_pipeline_without_a_loss_is_refused() -> None:
    with pytest.raises(SettingError, match="it returns no loss"):
        sw.verify(Chain(), (draw(16, 16),), devices=4, pipeline=setting("1f1b", 2))


def test_a_wrong_sum_of_a_shared_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import pipeline_step

    monkeypatch.setattr(pipeline_step.WholeWeights, "with_part", lambda self, name, gradient, part, summed: gradient)
    first = first_of(verified(Chain(tied=True), pipeline=setting("1f1b", 2)))
    assert first.phase == "gradient" and first.tensor == "layers.1.weight"
    assert first.dtype == D
