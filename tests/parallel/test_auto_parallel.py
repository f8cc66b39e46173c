"""`AutoParallel` in the local runtime: whatever a user does with a model, eight devices do as one."""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from one_device import assert_as_one_device, close, parallel, squares
from small_networks import Apply, D, Marked, draw, labels
from torch import nn

import shardwright as sw

X, T = draw(16, 8), labels(16)
BATCHES = [(draw(16, 8, seed=s), labels(16, seed=s)) for s in range(3)]
CROSS_ENTROPY = nn.CrossEntropyLoss()


# -- modes, batches, losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [CROSS_ENTROPY, F.cross_entropy, None], ids=["module", "function", "outside"])
@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto"])
def test_modes(mode, loss_fn) -> None:
    model = assert_as_one_device(Marked(), *(b if loss_fn else b[:1] for b in BATCHES), loss_fn=loss_fn, mode=mode)
    assert model.plan.mode == mode and model.plan.devices == (1 if mode == "stand_alone" else 8)
    cuts = {"stand_alone": (1, 1), "data_parallel": (1, 1), "semi_auto": (4, 1)}
    assert model.plan.parameters["w1"].layout.cuts == cuts[mode]


L = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))


@pytest.mark.parametrize(
    "dataset",
    [
        None,
        "data_parallel",
        "full_batch",
        ((8, 1), (8,)),
        ((4, 1), (1,)),
        ((2, 4), (2,)),
        (L("dp", "None"), L("None")),
        (L(("mp", "dp"), "sp"), (4,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_dataset_strategies(mode, dataset) -> None:
    for loss_fn, batches in ((CROSS_ENTROPY, BATCHES), (None, [b[:1] for b in BATCHES])):
        feeding = dataset[: len(batches[0])] if isinstance(dataset, tuple) else dataset
        assert_as_one_device(Marked(), *batches[:2], loss_fn=loss_fn, mode=mode, dataset=feeding)


@pytest.mark.parametrize("mean", [True, False])
def test_gradients_mean_is_for_ranks_that_feed_their_own_part(mean) -> None:
    # Here one process feeds the whole batch, and takes its loss once.
    net, one = Marked(), Marked()
    parallel(net, dataset="data_parallel").enable_gradients_mean(mean)(X).square().mean().backward()
    one(X).square().mean().backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 12])
def test_any_device_count(devices) -> None:
    assert_as_one_device(Apply(lambda m, x: torch.relu(x @ m.w).softmax(-1).sum(0)), (draw(12, 8),), devices=devices)


@pytest.mark.parametrize("batch", [0, 1, 3, 12])
def test_any_batch(batch) -> None:
    assert_as_one_device(Apply(lambda m, x: (x @ m.w, x.sum(0))), (draw(batch, 8),))


def test_devices_are_implied_by_the_marks() -> None:
    sw.init()
    net = Marked()
    close(sw.AutoParallel(net).dataset_strategy("full_batch")(X), net(X))
    for in_strategy, out_strategy, devices in [
        (None, ((4, 1),), 4),
        (((2, 2), (2, 1)), None, 4),
        (((2, 4), (4, 2)), None, 16),
        ((L("dp", "None"), L("None", "mp")), None, 8),
        (((3, 1), (1, 1)), ((2, 1),), 6),
    ]:
        model = sw.AutoParallel(Apply(lambda m, x: m.op(x, m.w), op=sw.shard(torch.matmul, in_strategy, out_strategy)))
        model.dataset_strategy("full_batch")(draw(48, 8))
        assert model.plan.devices == devices, (in_strategy, out_strategy)


class Temperature(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=D))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(scores / self.scale, target) * (1 if self.training else 100)


def test_loss_with_parameters_and_buffers() -> None:
    net, loss = Marked(), Temperature()
    one, one_loss = copy.deepcopy(net), copy.deepcopy(loss)
    model = parallel(net, loss)
    for _ in range(2):
        got, expected = model(X, T), one_loss(one(X), T)
        close(got, expected)
        got.backward(), expected.backward()
    close(loss.scale.grad, one_loss.scale.grad)
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])
    assert loss.calls == 2
    model.eval(), one_loss.eval()
    close(model(X, T), one_loss(one(X), T))


def test_targets_that_are_not_classes() -> None:
    assert_as_one_device(Marked(), (X, X), loss_fn=nn.MSELoss())
    assert_as_one_device(Marked(), (X, draw(16, 8).softmax(-1)), loss_fn=CROSS_ENTROPY)


# -- what goes in and comes out ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")


def test_outputs_of_any_kind() -> None:
    def f(m, x, t):
        y = x @ m.w
        return {
            "y": y,
            "none": None,
            "nested": (x, [y.sum(), 3, "text"], Pair(y.mean(0), m.w)),
            "again": y,
            "size": x.shape[0],
            "own": m.w,
            "label": t,
        }

    assert_as_one_device(Apply(f), (X, T))
    assert_as_one_device(Apply(lambda m, x: torch.ones(3, dtype=D)), (X,))
    assert_as_one_device(Apply(lambda m, x: None), (X,))


def test_inputs_of_any_kind() -> None:
    def f(m, pair, table, scale=1.0, *, flag=True, shift=None, none=None):
        x = pair[0] @ m.w * scale + table["deep"][0]
        return x if shift is None else x + shift if flag else x - shift

    pair, table = (X, draw(16)), {"deep": [draw(16, 8, seed=3)]}
    assert_as_one_device(Apply(f), (pair, table), (pair, table, 2.0))
    assert_as_one_device(Apply(f), (pair, table), kwargs={"shift": draw(8), "flag": False})
    assert_as_one_device(Apply(f), (pair, table), kwargs={"flag": True, "shift": torch.tensor(2.0, dtype=D)})


def test_named_inputs_in_any_order() -> None:
    class Named(nn.Module):
        def forward(self, x, first=None, second=None):
            return x * first - second

    a, b = draw(16, 8, seed=1), draw(8, seed=2)
    assert_as_one_device(Named(), (X,), kwargs={"second": b, "first": a})
    assert_as_one_device(Named(), (X,), kwargs={"first": a, "second": b})
    close(parallel(Named(), lambda y, t: (y - t).mean())(X, X, second=b, first=a), (X * a - b - X).mean())


def test_plain_inputs_are_told_apart_by_type_too() -> None:
    net = Apply(lambda m, x, k: x // 2 * k if isinstance(k, bool) else x * k if isinstance(k, int) else x / k)
    model, whole = parallel(net), torch.arange(16)
    for k in (1, 1.0, True, 2):
        close(model(whole, k), net(whole, k), repr(k))


def test_input_that_requires_a_gradient() -> None:
    for mode in ("data_parallel", "semi_auto"):
        net, x, y = Marked(), X.clone().requires_grad_(), X.clone().requires_grad_()
        parallel(net, mode=mode)(x).square().sum().backward()
        Marked()(y).square().sum().backward()
        close(x.grad, y.grad)


def test_two_models_in_a_row() -> None:
    # As a generator and its discriminator: a gradient goes through the second into the first.
    first, second = Marked(), Marked(((1, 8), (8, 1)), ((2, 2),), ((4, 1), (1, 2)))
    ones = copy.deepcopy((first, second))
    for parameter in [*second.parameters(), *ones[1].parameters()]:
        parameter.requires_grad_(False)
    close(got := parallel(second)(parallel(first)(X)), expected := ones[1](ones[0](X)))
    got.square().mean().backward(), expected.square().mean().backward()
    close([p.grad for p in first.parameters()], [p.grad for p in ones[0].parameters()])
    assert all(p.grad is None for p in second.parameters())


def test_training_and_evaluation_wrappers_of_one_model() -> None:
    net = Marked()
    train, evaluate = parallel(net, CROSS_ENTROPY), parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, t in BATCHES:
        train(x, t).backward()
        optimizer.step(), optimizer.zero_grad()
    with torch.no_grad():
        close(evaluate(X), net(X))


# -- parameters and buffers --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(draw(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto"])
def test_tied_and_unused_parameters(mode) -> None:
    net = Tied()
    model = assert_as_one_device(net, *([(X, X)] * 3), loss_fn=F.mse_loss, mode=mode)
    assert net.unused.grad is None and net.second.weight is net.first.weight
    assert model.plan.parameters["second.weight"] is model.plan.parameters["first.weight"]


def test_tied_parameter_with_marks() -> None:
    net = Tied()
    sw.shard(net.first, ((2, 1), (4, 1), (4,))), sw.shard(net.second, ((2, 1), (4, 1), (4,)))
    assert_as_one_device(net, (X,), (X,))


def test_frozen_parameters_that_thaw() -> None:
    net = Marked()
    net.w1.requires_grad_(False), net.head.bias.requires_grad_(False)
    model, one = parallel(net, CROSS_ENTROPY), copy.deepcopy(net)

    def both_step() -> None:
        model(X, T).backward(), CROSS_ENTROPY(one(X), T).backward()
        close({n: p.grad for n, p in net.named_parameters()}, {n: p.grad for n, p in one.named_parameters()})

    both_step()
    assert net.w1.grad is None
    for n in (net, one):
        n.w1.requires_grad_(True), n.w2.requires_grad_(False), n.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both_step()
    assert net.w1.grad is not None and net.w2.grad is None


def test_parameters_that_are_replaced() -> None:
    net = Marked()
    model = parallel(net)
    close(model(X), net(X))
    net.w1 = nn.Parameter(draw(8, 16, seed=9))
    net.load_state_dict({name: 2 * value for name, value in net.state_dict().items()}, assign=True)
    close(model(X), net(X))
    net.w2.data = net.w2.data + 1
    close(model(X), net(X))


def test_names_that_look_alike() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.fc_weight = nn.Linear(8, 8, dtype=D), nn.Parameter(draw(8, 8))
            self.net, self.loss_fn = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, bias=False, dtype=D)

        def forward(self, fc_bias):
            return self.loss_fn(self.net(self.fc(fc_bias) @ self.fc_weight))

    assert_as_one_device(Alike(), (X,))
    assert_as_one_device(Alike(), (X, T), loss_fn=CROSS_ENTROPY)
    assert_as_one_device(nn.Sequential(nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)), (X,))


class Running(nn.Module):
    """Buffers that a forward updates: in place, under no_grad, by assignment; one of them is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(8, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8, dtype=D))
        self.register_buffer("largest", torch.full((8,), -9.0, dtype=D), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.largest = torch.maximum(self.largest, y.detach().amax(0))
        return (y - self.mean) * self.count - self.largest


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto"])
def test_buffers_that_change(mode) -> None:
    net, one = Running(), Running()
    model = parallel(net, mode=mode)
    for training in (True, True, False, True):
        model.train(training), one.train(training)
        for x, _ in BATCHES[:2]:
            close(model(x), one(x))
            close(dict(net.named_buffers()), dict(one.named_buffers()))
    assert net.count == 6


def test_statistics_on_one_device() -> None:
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D))
    one = copy.deepcopy(net)
    model = parallel(net, mode="stand_alone")
    for training in (True, True, False):
        model.train(training), one.train(training)
        assert torch.equal(model(X), one(X))
    close(net.state_dict(), one.state_dict())


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: F.relu(x @ m.w, inplace=True),
        lambda m, x: (x @ m.w).add_(1).mul_(0.5).sub_(x, alpha=2).relu_(),
        lambda m, x: (lambda y: [y.tanh_(), y.sum(), y])(x @ m.w),
        lambda m, x: (x @ m.w).flatten().sigmoid_(),
        lambda m, x: (lambda y: [y.zero_(), y + x @ m.w])(x @ m.w),
        lambda m, x: (lambda y: [y.copy_(x @ m.w), y])(torch.zeros_like(x)),
        lambda m, x: (lambda y: [y.masked_fill_(x > 0, 0.5), y])(x @ m.w),
        lambda m, x: nn.ReLU(inplace=True)(x @ m.w),
    ],
    ids=range(8),
)
def test_in_place_forms(f) -> None:
    assert_as_one_device(Apply(f), (X,), (X,))


def test_augmented_assignment() -> None:
    def f(m, x):
        y = x @ m.w
        y += 1
        y *= 2
        y -= x
        x = x.clone()
        x += y
        return x, y

    assert_as_one_device(Apply(f), (X,), (X,))


# -- the user's own loop -----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "groups": lambda p: torch.optim.Adagrad([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name) -> None:
    assert_as_one_device(Marked(), *BATCHES, loss_fn=CROSS_ENTROPY, optimizer=OPTIMIZERS[name])


def test_accumulation_clipping_and_schedules() -> None:
    net, one = Marked(), Marked()
    model = parallel(net, CROSS_ENTROPY)
    optimizers = [torch.optim.SGD(n.parameters(), 0.5) for n in (net, one)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    for _ in range(2):
        for x, t in BATCHES:
            (model(x, t) / 3).backward(), (CROSS_ENTROPY(one(x), t) / 3).backward()
        norms = [nn.utils.clip_grad_norm_(n.parameters(), 0.1) for n in (net, one)]
        close(*norms)
        for o, s in zip(optimizers, schedules):
            o.step(), s.step(), o.zero_grad()
    close(net.state_dict(), one.state_dict())


def test_several_backwards_through_one_call() -> None:
    net, one = Marked(), Marked()
    for _n, output in ((net, parallel(net)(X)), (one, one(X))):
        squares(output).backward(retain_graph=True)
        output[:3].abs().sum().backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])


def test_calls_without_gradients() -> None:
    net = Marked()
    model = parallel(net)
    with torch.no_grad():
        got = model(X)  # the first call of all
        assert not got.requires_grad
        close(got, net(X))
    model(X).square().mean().backward()
    one = Marked()
    one(X).square().mean().backward()
    close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()])
    with torch.inference_mode():
        close(model(X).clone(), net(X))
    with torch.inference_mode():
        close(parallel(Marked())(X).clone(), net(X))


def test_no_grad_inside_of_the_model() -> None:
    def f(m, x):
        with torch.no_grad():
            frozen = x @ m.w
            with torch.enable_grad():
                free = torch.tanh(x @ m.w)
        return frozen * (x @ m.w), free, (x @ m.w).detach() + 1

    assert_as_one_device(Apply(f), (X,), (X,))


def test_state_and_attributes_are_those_of_the_model() -> None:
    net = Marked()
    net.note, net.double_it = "text", lambda x: 2 * x
    model = parallel(net, CROSS_ENTROPY)
    assert list(model.state_dict()) == list(net.state_dict()) == list(Marked().state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [n for n, _ in model.named_modules()][1:] == [n for n, _ in net.named_modules()][1:]
    assert model.w1 is net.w1 and model.head is net.head and model.net is net
    assert model.note == "text" and model.double_it(2) == 4 and model.matmul1 is net.matmul1
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        model.nothing_of_that_name
    before = [p for p in net.parameters()]
    model(X, T)
    assert all(a is b for a, b in zip(before, model.parameters()))
    other = Marked()
    nn.init.ones_(other.w1)
    model.load_state_dict(other.state_dict())
    close(model(X, T), CROSS_ENTROPY(other(X), T))
    model.eval()
    assert not net.training and not net.head.training and not model.training
    model.train()
    assert net.training and net.head.training


def test_a_wrapper_can_be_copied_and_moved() -> None:
    model = parallel(Marked(), CROSS_ENTROPY)
    model(X, T)
    counterpart = copy.deepcopy(model)
    nn.init.zeros_(counterpart.w1)
    close(counterpart(X, T), CROSS_ENTROPY(counterpart.net(X), T))
    assert counterpart.w1 is not model.w1 and counterpart.w1 is counterpart.net.w1
    single = model.to(torch.float32)
    torch.testing.assert_close(single(X.float(), T), CROSS_ENTROPY(model.net(X.float()), T))


def test_a_replicated_parameter_beside_a_maximum_over_ranks() -> None:
    # What is whole on every rank is one tensor in this process: its gradient must be taken once.
    def f(m, x):
        top = (x @ m.w).amax(0)
        return top * m.p, top.sum() * m.p.sum(), (top * m.q + x @ m.w).max()

    assert_as_one_device(Apply(f, p=nn.Parameter(draw(8)), q=nn.Parameter(draw(8))), (X,), (X,))


# -- operators without a rule ------------------------------------------------------------------------------------------


def test_replicate_runs_whole_and_says_so() -> None:
    def f(m, x):
        return torch.linalg.tensorinv(m.w, 1) @ torch.relu(x @ m.w).mT + torch.linalg.tensorsolve(m.w, m.w[0]).sum()

    net = Apply(f, relu=None)
    model = assert_as_one_device(net, (X,), (X,), on_missing_rule="replicate")
    notes = "\n".join(model.plan.notes)
    assert "linalg_tensorinv" in notes and "linalg_tensorsolve" in notes and "whole on every device" in notes
    assert model.plan.operator("linalg_tensorinv").cause == "whole"
    assert not any("relu" in note for note in model.plan.notes)


def test_replicated_statistics_are_updated_once() -> None:
    net = nn.Sequential(nn.Linear(8, 8, dtype=D), nn.BatchNorm1d(8, dtype=D))
    assert_as_one_device(net, (X,), (X,), on_missing_rule="replicate")
    assert net[1].num_batches_tracked == 2


# -- capture and plan --------------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch):
    """The shapes of every capture."""
    from shardwright.parallel import call_planning

    seen, captures = [], call_planning.captures

    def counting(net, calls, **named):
        seen.extend([tuple(a.shape) for a in args if isinstance(a, torch.Tensor)] for args, _ in calls)
        return captures(net, calls, **named)

    monkeypatch.setattr(call_planning, "captures", counting)
    return seen


def test_captured_once_for_each_signature(captures) -> None:
    """At each size of training and of evaluation a program, made once."""
    net = Marked()
    model = parallel(net, CROSS_ENTROPY)
    first, second, third = ([(rows, 8), (rows,)] for rows in (16, 32, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, t in BATCHES:
            model(x, t).backward()
        with torch.no_grad():
            model(X, T)
        assert captures == [first]
        model.eval()
        model(X, T), model(X, T)
        assert captures == [first] * 2  # evaluation is another program, and no surprise
        model.train()
        model(X, T)
    assert captures == [first] * 2
    with pytest.warns(sw.RecaptureWarning, match=r"\(32, 8\).*\(16, 8\)") as caught:
        for rows in (32, 32, 8, 8):
            close(model(draw(rows, 8), labels(rows)), CROSS_ENTROPY(net(draw(rows, 8)), labels(rows)))
    assert captures == [first, first, second, third]
    assert len(caught) == 1 and "test_auto_parallel.py" in caught[0].filename
    programs = list(model._programs.values())
    assert len(programs) == 4
    model.train(False)
    model(X, T)
    assert captures == [first, first, second, third]
    assert set(model._programs.values()) == set(programs)
    assert model.plan.graph.inputs[0].shape == (16, 8)  # of the latest call


def test_a_submodule_in_evaluation_is_another_program(captures) -> None:
    net = Running()
    model = parallel(net)
    model(X)
    net.eval()  # not through the wrapper
    model(X)
    assert net.count == 1 and len(captures) == 2


def test_parameters_keep_their_layouts_when_the_batch_changes() -> None:
    net = Apply(lambda m, x: m.op(x, m.w), op=sw.shard(torch.matmul, ((1, 2), (2, 4))))
    model = parallel(net)
    model(X)
    layout = model.plan.parameters["w"].storage
    net.op = sw.shard(torch.matmul, ((8, 1), (1, 1)))  # another operator, too late for the parameter, which stays
    with pytest.warns(sw.RecaptureWarning):
        close(model(draw(32, 8)), net(draw(32, 8)))
    assert model.plan.parameters["w"].storage == layout
    assert model.plan.parameters["w"].layout != layout  # what its operator now asks for


def test_explain_prints_every_operator(capsys) -> None:
    model = parallel(Marked(), CROSS_ENTROPY)
    model(X, T)
    model.explain()
    printed = capsys.readouterr().out
    for operator in model.plan.operators:
        assert operator.name in printed
