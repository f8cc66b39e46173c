"""The user's loop around a pipeline: evaluation, accumulated gradients, other batches, losses and statistics of
parts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from one_device import close, parallel
from pipeline_networks import Chain, assert_pipeline_as_one_device, batches, setting, staged
from small_networks import D, draw, labels
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import SettingError
from shardwright.parallel.auto_parallel import RecaptureWarning

TWO = dict(stages=2, micro_batches=4, stage_config=staged(2))
FOUR = dict(stages=4, micro_batches=4, stage_config=staged(4))
SCHEDULERS = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]


def gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def piped(
    net: nn.Module, loss_fn: object = None, pipeline: dict | None = None, **options: object
) -> tuple[sw.AutoParallel, nn.Module]:
    """A model as a pipeline, and a copy of it."""
    one = copy.deepcopy(net)
    return parallel(net, loss_fn, **options).pipeline(**(pipeline or TWO)), one


# -- forward only ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outputs_without_gradients(scheduler: str, context: Callable) -> None:
    model, one = piped(Chain(skip=True, tied=True), None, setting(scheduler, 4))
    ((x, _),) = batches(1)
    with context():
        close(model(x), one(x))
    assert all(p.grad is None for p in model.parameters())


class Heads(nn.Module):
    """A model whose results are in several stages, and of several shapes and types."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.drop = nn.Linear(8, 8, dtype=D), nn.Linear(8, 3, dtype=D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict:
        hidden = torch.tanh(self.body(x))
        logits = self.head(self.drop(hidden))
        return {
            "hidden": hidden,
            "scores": [logits, logits.argmax(-1)],
            "mean": hidden.mean(),
            "count": 3,
            "turned": logits.T,
        }


def test_outputs_of_several_stages() -> None:
    model, one = piped(Heads(), None, dict(stages=2, micro_batches=4, stage_config={"body": 0, "head": 1}))
    model.eval(), one.eval()
    with torch.no_grad():
        close(model(draw(16, 8)), one(draw(16, 8)))


def test_evaluation_between_steps() -> None:
    loss_fn = nn.MSELoss()
    model, one = piped(
        nn.Sequential(nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D), nn.Dropout(0.0), nn.Linear(8, 8, dtype=D)),
        loss_fn,
        dict(stages=2, micro_batches=2, stage_config={"0": 0, "1": 0, "3": 1}),
    )
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model.net, one)]
    for step, (x, y) in enumerate(batches(3, width=8)):
        model.train(), one.train()
        loss = model(x, y)
        expected = sum(loss_fn(one(a), b) for a, b in zip(x.chunk(2), y.chunk(2))) / 2
        close(loss, expected, f"step {step}")
        loss.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        model.eval(), one.eval()
        with torch.no_grad():
            close(model(x, y), loss_fn(one(x), y), f"evaluation {step}")
        evaluated, wanted = model(x, y), loss_fn(one(x), y)  # with gradients, by running statistics
        close(evaluated, wanted)
        evaluated.backward(), wanted.backward()
        close(gradients(model.net), gradients(one), f"gradients of evaluation {step}")
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert model.training is False and model.net[1].training is False
    close(dict(model.state_dict()), dict(one.state_dict()))


# -- backward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_gradients_of_two_calls_add_up(scheduler: str) -> None:
    model, one = piped(Chain(tied=True, skip=True), nn.MSELoss(), setting(scheduler, 4))
    for x, y in batches(2):
        (model(x, y) / 4).backward()
        (nn.MSELoss()(one(x), y) / 4).backward()
        close(gradients(model.net), gradients(one))


def test_backwards_in_another_order_than_the_calls() -> None:
    model, one = piped(Chain(), nn.MSELoss())
    mine, yours = ([call(x, y) for x, y in batches(2)] for call in (model, lambda x, y: nn.MSELoss()(one(x), y)))
    for first, second in (mine, yours):
        (second * 3).backward()
        first.backward()
    close(gradients(model.net), gradients(one))


def test_a_sum_of_losses() -> None:
    model, one = piped(Chain(tied=True), nn.MSELoss())
    (sum(model(x, y) for x, y in batches(2)) + 0.1 * model.net.layers[0].weight.square().sum()).backward()
    (sum(nn.MSELoss()(one(x), y) for x, y in batches(2)) + 0.1 * one.layers[0].weight.square().sum()).backward()
    close(gradients(model.net), gradients(one))


def test_under_no_sync() -> None:
    model, one = piped(Chain(), nn.MSELoss())
    (x, y), (x2, y2) = batches(2)
    with model.no_sync():
        model(x, y).backward()
    model(x2, y2).backward()
    nn.MSELoss()(one(x), y).backward(), nn.MSELoss()(one(x2), y2).backward()
    close(gradients(model.net), gradients(one))


def test_a_call_without_a_backward_leaves_nothing() -> None:
    model, one = piped(Chain(tied=True), nn.MSELoss())
    (x, y), (x2, y2) = batches(2)
    model(x2, y2)
    assert all(p.grad is None for p in model.parameters())
    model(x, y).backward(), nn.MSELoss()(one(x), y).backward()
    close(gradients(model.net), gradients(one))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_inputs_that_want_gradients(scheduler: str) -> None:
    class Scaled(Chain):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale + x * scale  # the input is read in the first stage and in the last

    model, one = piped(Scaled(), nn.MSELoss(), setting(scheduler, 4))
    ((x, y),) = batches(1, rows=32)
    feeding = [(x.clone().requires_grad_(), draw(16, seed=9).requires_grad_()) for _ in range(2)]
    model(*feeding[0], y).backward()
    nn.MSELoss()(one(*feeding[1]), y).backward()
    close([t.grad for t in feeding[0]], [t.grad for t in feeding[1]], "gradients of inputs")
    close(gradients(model.net), gradients(one))


def test_a_second_backward_is_refused() -> None:
    model, _ = piped(Chain(), nn.MSELoss())
    loss = model(*batches(1)[0])
    loss.backward(retain_graph=True)
    before = copy.deepcopy(gradients(model.net))
    with pytest.raises(SettingError, match="second time.*\n.*one backward for each call"):
        loss.backward()
    close(gradients(model.net), before)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [(lambda x: x, "it returns no loss"), (lambda x: (x.mean(), x.square().mean()), "it returns 2 losses")],
)
def test_a_loss_outside_is_refused(outputs: Callable, why: str) -> None:
    class Outside(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return outputs(super().forward(x))

    model, one = piped(Outside())
    x = batches(1)[0][0]
    with pytest.raises(SettingError, match=rf"runs the backward with the forward: {why}\n.*loss_fn.*torch.no_grad\(\)"):
        model(x)
    with torch.no_grad():
        close(model(x), one(x))


def test_parameters_that_are_frozen_on_the_way() -> None:
    model, one = piped(Chain(), nn.MSELoss())
    for trained in (True, False, True):
        for net in (model.net, one):
            net.layers[3].requires_grad_(trained)
            net.zero_grad()
        for x, y in batches(1):
            model(x, y).backward(), nn.MSELoss()(one(x), y).backward()
        if trained:
            close(gradients(model.net), gradients(one))


# -- batches and losses ------------------------------------------------------------------------------------------------


def test_a_second_batch_size() -> None:
    model, one = piped(Chain(), nn.MSELoss())
    optimizers = [torch.optim.Adam(net.parameters(), 0.01) for net in (model.net, one)]
    for rows in (16, 32, 16):
        ((x, y),) = batches(1, rows)
        if rows == 32:
            with pytest.warns(RecaptureWarning, match="32"):
                loss = model(x, y)
        else:
            loss = model(x, y)
        expected = nn.MSELoss()(one(x), y)
        close(loss, expected)
        loss.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    close(dict(model.state_dict()), dict(one.state_dict()))


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=draw(16, seed=3).abs()),
        lambda logits, target: (
            (F.cross_entropy(logits, target, reduction="none") * (target > 2)).sum() / (target > 2).sum()
        ),
    ],
    ids=["mean", "smoothed", "sum", "weighed", "masked"],
)
@pytest.mark.parametrize("scheduler", ["1f1b", "zbv"])
def test_targets_that_micro_batches_count_unlike(loss_fn: Callable, scheduler: str) -> None:
    target = labels(16, 16)
    target[:5] = -100 if isinstance(loss_fn, nn.Module) else 0  # the first micro-batch has nothing that counts
    model = assert_pipeline_as_one_device(
        Chain(), [(batches(1)[0][0], target)] * 2, setting(scheduler, 4), loss_fn=loss_fn
    )
    unlike = not (isinstance(loss_fn, nn.Module) and loss_fn.reduction == "sum")
    assert bool(model.plan.micro.totals) == unlike


def in_parts(loss_fn: Callable, count: int) -> Callable:
    """One device that runs micro-batches one after the other."""

    def run(one: nn.Module, *batch: Tensor) -> Tensor:
        return sum(loss_fn(one(*part[:-1]), part[-1]) for part in zip(*(x.chunk(count) for x in batch))) / count

    return run


class Normed(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.a, self.n1 = nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, momentum=momentum, dtype=D)
        self.b, self.n2 = nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, momentum=momentum, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.n2(self.b(torch.relu(self.n1(self.a(x)))))


@pytest.mark.parametrize("scheduler", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("again", [False, True])
def test_batch_norms_have_the_statistics_of_each_micro_batch(
    scheduler: str, momentum: float | None, again: bool
) -> None:
    net = Normed(momentum)
    if again:
        sw.recompute(net.n1)
    given = dict(stages=2, micro_batches=4, scheduler=scheduler, stage_config={"a": 0, "n1": 0, "b": 1, "n2": 1})
    assert_pipeline_as_one_device(
        net, batches(3, width=8), given, loss_fn=nn.MSELoss(), reference=in_parts(nn.MSELoss(), 4)
    )
    assert net.n1.num_batches_tracked == 12


class Dropped(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = F.dropout(torch.relu(layer(x)), 0.3, self.training)
        return self.layers[3](x)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("again", "feed"), [(False, "full_batch"), (False, "data_parallel"), (True, "full_batch")])
def test_dropout_is_that_of_the_whole_batch(scheduler: str, again: bool, feed: str) -> None:
    def losses(pipeline: dict | None) -> list[Tensor]:
        net, out = Dropped(), []
        if again:
            sw.recompute(net.layers[1])
        model = parallel(
            net,
            nn.MSELoss(),
            devices=4 if pipeline else 1,
            mode="semi_auto" if pipeline else "stand_alone",
            dataset=feed,
        )
        if pipeline:
            model.pipeline(**pipeline)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        torch.manual_seed(5)
        for x, y in batches(3):
            loss = model(x, y)
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            out.append(loss.detach())
        return out

    one = losses(None)
    close(losses(setting(scheduler, 4)), one)
    plain = nn.MSELoss()(Chain()(batches(1)[0][0]), batches(1)[0][1])
    assert abs(one[0] - plain) > 1e-3  # something is dropped
