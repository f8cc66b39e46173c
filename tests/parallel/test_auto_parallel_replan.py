"""Marks after the first call are errors until `AutoParallel.replan`; marks that a mode ignores are warned of."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_device import close
from ranks import run_ranks
from small_networks import draw, labels
from torch import Tensor, nn

import shardwright as sw

X, T = draw(16, 8), labels(16)
LOSS = nn.CrossEntropyLoss()

#: An operator that a forward finds among globals, not in its module.
SHARED = sw.shard(torch.matmul, ((2, 1), (1, 2)))


class Layers(nn.Module):
    """Two layers, a marked product of its own, and one that the module does not hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 8, dtype=torch.float64)
        self.w, self.v = nn.Parameter(draw(8, 8, seed=1)), nn.Parameter(draw(8, 8, seed=2))
        self.product = sw.shard(torch.matmul, ((2, 2), (2, 1)))
        self.unused = sw.Operator(torch.relu)

    def forward(self, x: Tensor) -> Tensor:
        return SHARED(self.product(self.second(torch.relu(self.first(x))), self.w), self.v)


def called(net: nn.Module, **given: Any) -> sw.AutoParallel:
    sw.init(devices=4)
    model = sw.AutoParallel(net, LOSS, **given).dataset_strategy("full_batch")
    model(X, T)
    return model


MARKS: dict[str, Callable[[Layers], Any]] = {
    "shard() of a module": lambda net: sw.shard(net.first, ((4, 1), (1, 1), (1,))),
    "shard() of an operator": lambda net: sw.shard(net.product, ((4, 1), (1, 1))),
    "shard() as a method": lambda net: net.product.shard(((4, 1), (1, 1))),
    "shard() of a global operator": lambda net: SHARED.shard(((4, 1), (1, 1))),
    "recompute() of a module": lambda net: sw.recompute(net.first),
    "recompute() of the whole model": lambda net: sw.recompute(net),
    "shard() of an operator that never runs": lambda net: net.unused.shard(((4, 1),)),
    "recompute() of an operator": lambda net: sw.recompute(net.product),
    "set_stage()": lambda net: sw.set_stage(net.second, 1),
    "no_optimizer_parallel()": lambda net: sw.no_optimizer_parallel(net.w),
    "no_optimizer_parallel() of a module": lambda net: sw.no_optimizer_parallel(net.second),
    "layerwise_parallel()": lambda net: sw.layerwise_parallel(net.w),
}


@pytest.fixture
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late mark collects garbage, lest a model that is out of use counts. Here none is, and a suite has much."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.mark.parametrize("name", MARKS)
def test_marks_after_the_first_call(name: str, without_collections: None) -> None:
    net, strategy = Layers(), SHARED.in_strategy
    model = called(net)
    before = dict(vars(net.first)), net.product.in_strategy, net.product.recomputed
    with pytest.raises(sw.SettingError) as error:
        MARKS[name](net)
    call = name.split(" of")[0].split(" as")[0]
    assert f"{call} comes too late" in error.value.message and "test_auto_parallel_replan.py" in str(error.value)
    assert "model.replan()" in error.value.legal
    assert (dict(vars(net.first)), net.product.in_strategy, net.product.recomputed) == before
    model.replan()
    try:
        MARKS[name](net)  # now it is taken
    finally:
        SHARED.shard(strategy)


def test_a_model_that_is_out_of_use_refuses_no_marks() -> None:
    net = Layers()
    model = called(net)
    vars(model)["itself"] = [model]  # a circle, which waits for the collector
    del model
    sw.shard(net.first, ((4, 1), (1, 1), (1,)))
    assert called(net).plan.operator("first").in_strategy == ((4, 1), (1, 1), (1,))


def test_a_second_model_of_the_same_network_refuses_too() -> None:
    net = Layers()
    one, other = called(net), called(net)
    one.replan()
    with pytest.raises(sw.SettingError, match="comes too late"):
        sw.recompute(net.first)
    other.replan()
    sw.recompute(net.first)


def stepped(model: Any, optimizer: torch.optim.Optimizer, target: bool = True) -> Tensor:
    loss = model(X, T) if target else LOSS(model(X), T)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def replanned_steps(net: Layers, model: sw.AutoParallel, settings: Callable[[], Any]) -> None:
    """Two steps on one plan and two on another, of an optimizer with state, like one device's four."""
    one = Layers()
    one.load_state_dict(copy.deepcopy(net.state_dict()))
    mine, theirs = torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.Adam(one.parameters(), lr=0.1)
    for number in range(4):
        if number == 2:
            assert model.plan.operator("first").in_strategy != ((1, 4), (1, 4), (1,))
            assert model.replan() is model
            sw.shard(net.first, ((1, 4), (1, 4), (1,)))
            net.product.shard(((1, 1), (1, 4)))
            settings()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(stepped(model, mine), stepped(one, theirs, target=False), f"loss {number}")
    assert model.plan.operator("first").in_strategy == ((1, 4), (1, 4), (1,))
    assert model.plan.operator("product").in_strategy == ((1, 1), (1, 4))
    with pytest.raises(sw.SettingError, match="comes too late"):
        sw.shard(net.first, ((1, 1), (1, 1), (1,)))


def test_new_marks_and_settings_in_one_process() -> None:
    net = Layers()
    model = called(net)
    with pytest.raises(sw.SettingError, match="hsdp"):
        model.hsdp(threshold=0)
    replanned_steps(net, model, lambda: model.hsdp(threshold=0))
    assert any(p.storage != p.layout for p in model.plan.parameters.values())


def test_the_files_of_strategies_are_written_anew(tmp_path: Any) -> None:
    net = Layers()
    model = called(net)
    model.replan()
    model.save_operator_strategy_file(tmp_path / "plan.json")
    net.product.shard(((4, 1), (1, 1)))
    model(X, T)
    assert sw.Plan.load(tmp_path / "plan.json").operator("product").in_strategy == ((4, 1), (1, 1))


def test_a_pipeline_in_one_process_takes_other_stages() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    sw.init(devices=4)
    for number in range(3):
        sw.set_stage(net[number], int(number > 0))
    model = sw.AutoParallel(net, LOSS).dataset_strategy("full_batch").pipeline(stages=2, micro_batches=4)
    expected = LOSS(net(X), T)
    close(model(X, T), expected)
    model.replan().pipeline(stages=4, micro_batches=4, stage_config={"0": 0, "1": 1})
    with pytest.raises(sw.SettingError, match=r"two stages|stage 2|in stage"):
        model(X, T)
    model.pipeline(stages=1, micro_batches=4)


def test_where_a_model_is_not_planned_anew() -> None:
    net = Layers()
    model = called(net)
    with model.whole(), pytest.raises(sw.SettingError, match="whole"):
        model.replan()
    with model.no_sync(), pytest.raises(sw.SettingError, match="no_sync"):
        model.replan()


def test_models_of_a_step_that_calls_them_by_themselves() -> None:
    generator, judge = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def step(x: Tensor, t: Tensor) -> Tensor:
        return LOSS(judge(generator(x).detach()), t) + generator(x).square().mean()

    sw.init(devices=4)
    model = sw.AutoParallel(step).dataset_strategy("full_batch")
    expected = step(X, T)
    close(model(X, T), expected)
    with pytest.raises(sw.SettingError, match="comes too late"):
        sw.shard(judge, ((4, 1), (1, 1), (1,)))
    model.replan()
    sw.shard(judge, ((2, 2), (1, 2), (1,)))
    close(model(X, T), expected)


def on_ranks(rank: int, world: int) -> None:
    sw.init()
    for level in (None, "level1", "level3"):
        net = Layers()
        model = sw.AutoParallel(net, LOSS).dataset_strategy("full_batch")
        if level is not None:
            model.hsdp(threshold=0, optimizer_level=level)
        plain = Layers()
        mine, theirs = torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.Adam(plain.parameters(), lr=0.1)
        for number in range(4):
            if number == 2:
                held = {name: p.to_local().shape for name, p in net.named_parameters()}
                model.replan()
                with pytest.raises(sw.SettingError, match="comes too late"):
                    model.hsdp()
                sw.shard(net.first, ((1, 4), (1, 4), (1,)))
                net.product.shard(((1, 1), (1, 4)))
            close(stepped(model, mine), stepped(plain, theirs, target=False), f"{level}, loss {number}")
        assert model.plan.operator("first").in_strategy == ((1, 4), (1, 4), (1,))
        assert {name: p.to_local().shape for name, p in net.named_parameters()} == held
        close({n: p.full_tensor() for n, p in net.named_parameters()}, dict(plain.named_parameters()), str(level))
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    model = sw.AutoParallel(net, LOSS).dataset_strategy("full_batch")
    model.pipeline(stages=2, micro_batches=4, stage_config={"0": 0, "1": 1})
    model(X, T)
    with pytest.raises(sw.SettingError, match=r"replan\(\) of a pipeline in several processes"):
        model.replan()


def test_new_marks_on_processes() -> None:
    run_ranks(on_ranks, 4)


# -- marks without effect ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["data_parallel", "stand_alone", "hybrid_parallel"])
def test_a_mode_that_ignores_marks_says_so_once(mode: str) -> None:
    net = Layers()
    sw.init(devices=4)
    model = sw.AutoParallel(net, parallel_mode=mode)
    with pytest.warns(
        UserWarning, match=r"ignores the strategies of product \(test_auto_parallel_replan.py:\d+\), SHARED|matmul"
    ) as w:
        model(X)
    (text,) = (str(one.message) for one in w if "ignores" in str(one.message))
    assert f'parallel_mode="{mode}"' in text and "semi_auto, sharding_propagation" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
        model.eval()
        model(X)


def test_planning_alone_says_so_too() -> None:
    with pytest.warns(UserWarning, match="ignores the strategies of product"):
        sw.plan(Layers(), X, devices=4, parallel_mode="data_parallel")


@pytest.mark.parametrize("mode", ["semi_auto", "sharding_propagation", "dynamic_programming"])
def test_modes_that_follow_marks_are_silent(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        called(Layers(), parallel_mode=mode)


def test_many_ignored_marks_are_counted() -> None:
    net = nn.Sequential(*(sw.shard(nn.Linear(8, 8), ((4, 1), (1, 1), (1,))) for _ in range(11))).double()
    with pytest.warns(UserWarning, match=r"7 \(test_auto_parallel_replan.py:\d+\) and 3 more"):
        sw.plan(net, X, devices=4, parallel_mode="data_parallel")


def test_stages_without_a_pipeline() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    sw.set_stage(net[0], 0), sw.set_stage(net[1], 1)
    sw.init(devices=4)
    with pytest.warns(UserWarning, match=r"set_stage gave to 0, 1 are ignored.*model.pipeline\(stages=2\)"):
        sw.AutoParallel(net, LOSS).dataset_strategy("full_batch")(X, T)


class Unused(nn.Module):
    """A product that runs, cut for 2 devices, and marked operators for 3, 5 and 8 that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(8, 8))
        self.product = sw.shard(torch.matmul, ((2, 1), (1, 1)))
        self.other = sw.shard(torch.matmul, ((3, 1), (1, 1)))
        self.layout = sw.shard(torch.relu, (sw.Layout((5,), ("a",))("a", "None"),))
        self.layer = sw.shard(nn.Linear(8, 8), ((8, 1), (1, 1), (1,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.w)


def test_marks_of_operators_that_never_run_do_not_count() -> None:
    from shardwright.cli.plan_command import plan_call
    from shardwright.verification.verify import verify_call

    model = sw.AutoParallel(Unused()).dataset_strategy("full_batch")
    assert plan_call(model, (X,)).devices == 2
    assert verify_call(model, (X,), steps=1).plan.devices == 2
    model(X)
    assert model.plan.devices == 2


def test_full_batch_is_no_attribute() -> None:
    """The tutorial of another system sets it."""
    model = sw.AutoParallel(Layers(), LOSS)
    with pytest.raises(sw.SettingError, match="full_batch=True is no attribute") as error:
        model.full_batch = True
    assert 'model.dataset_strategy("full_batch")' in error.value.legal
