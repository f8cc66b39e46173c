"""A model called with many sizes: one capture that scales, one plan that is reused, the results of one device."""

import copy
import random
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from gpt import GPT
from networks import D, draw, labels
from shardwright.capture import Recording, capture, capture_scalable

parallel = import_module("shardwright.parallel")


@pytest.fixture(autouse=True)
def four_devices():
    sw.init(devices=4)


class Language(nn.Module):
    """A small GPT with its loss."""

    def __init__(self, layers=1, length=32):
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(vocabulary=16, length=length, layers=layers, width=16, heads=4).to(D)

    def forward(self, tokens):
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())


class Branching(nn.Module):
    """Another computation for long inputs, and numbers made of sizes."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(draw(8, 8, seed=1))

    def forward(self, x):
        if x.shape[1] > 10:
            x = x[:, :10].relu()
        rows, length = x.shape[:2]
        mask = torch.arange(length) % 3 == 0
        x = torch.where(mask[:, None], x / length, x @ self.w)
        return x.reshape(rows * length, -1).sum() * rows / length ** 0.5


class Pooled(nn.Module):
    """A convolution net whose height and width may be others."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1, dtype=D), nn.GroupNorm(2, 4, dtype=D)
        self.head = nn.Linear(4, 4, dtype=D)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).logsumexp(-1).mean()


def images(rows, height, width):
    return draw(rows, 2, height, width, seed=rows)


CASES = {
    "language": (Language, lambda b, s: labels(b * s, 16).view(b, s), (12, 32)),
    "branching": (Branching, lambda b, s: draw(b, s, 8), (12, 20)),
    "pooled": (Pooled, images, (8, 12, 12)),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_a_graph_at_other_sizes_is_the_one_that_is_captured_there(case, seed):
    build, inputs, most = CASES[case]
    net, choose, scaled = build(), random.Random(seed), 0
    vary = [(0, 2, 3) if case == "pooled" else (0, 1)]
    x = inputs(*(choose.randint(4, m) for m in most))
    recording = Recording()
    plain = capture(net, (x,), recording=recording)
    scalable = capture_scalable(net, (x,), vary=vary, recording=recording)
    assert scalable.at([tuple(x.shape)]).inputs == plain.inputs
    for _ in range(4):
        y = inputs(*(choose.randint(4, m) for m in most))
        made = scalable.at([tuple(y.shape)])
        if made is None:  # only where torch or the model makes a difference between the sizes
            assert case == "pooled" or case == "branching" and (x.shape[1] > 10) != (y.shape[1] > 10)
        else:
            scaled += 1
            assert scalable.like(capture(net, (y,)), [tuple(y.shape)]) is not None
    assert scaled or case == "pooled"


@pytest.fixture
def captures(monkeypatch):
    """What was captured, in order."""
    seen = []
    for name in ("capture", "capture_scalable"):
        def noted(*args, _made=getattr(parallel, name), _name=name, **kwargs):
            seen.append(_name)
            return _made(*args, **kwargs)
        monkeypatch.setattr(parallel, name, noted)
    return seen


def step(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto", "recursive_programming", "dynamic_programming"])
def test_further_sizes_are_neither_captured_nor_searched_and_run_as_on_one_device(mode, captures, monkeypatch):
    plain = Language()
    free = sw.Cluster("free", (sw.Level("links", 4, 1e18, 1e-15),), 1e9, {"float64": 1e9}, 1e11, 1e-9)
    model = sw.AutoParallel(copy.deepcopy(plain), parallel_mode=mode, cluster=free)
    model.dataset_strategy("full_batch")
    made = import_module("shardwright.plan.make")
    for name in ("semi_auto", "data_parallel"):
        monkeypatch.setitem(made.PLANNERS, name, _counted(made.PLANNERS[name], name, captures))
    for name in ("recursive_programming", "dynamic_programming"):
        monkeypatch.setitem(made.SEARCHES, name, _counted(made.SEARCHES[name], name, captures))
    strategies = []
    for rows, length in ((8, 16), (16, 16), (24, 32), (8, 24), (40, 16), (16, 16)):
        x = labels(rows * length, 16, seed=rows + length).view(rows, length)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(others, gradients, rtol=1e-9, atol=1e-12)
        strategies.append([o.in_strategy for o in model.plan.operators])
    assert captures.count("capture") == 1
    assert captures.count("capture_scalable") == 2     # the rows alone differed at first, then the length too
    assert captures.count(mode) == 1
    assert all(s == strategies[0] for s in strategies)
    assert any(cut > 1 for strategy in strategies[0] for cuts in strategy for cut in cuts)
    if model.plan.found is not None:
        assert model.plan.bound is None and "nothing was searched" in " ".join(model.plan.found.notes)


def _counted(planner, name, seen):
    def counted(*args, **kwargs):
        seen.append(name)
        return planner(*args, **kwargs)
    return counted


def _cuts(plan):
    return [o.in_strategy for o in plan.operators]


def test_sizes_that_cuts_do_not_divide_as_before_are_planned_anew():
    plain, rows_of = Branching(), (8, 6, 3, 12, 2, 4)
    anew = [_cuts(sw.plan(plain, (draw(rows, 6, 8),), devices=4)) for rows in rows_of]
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    cuts = []
    for rows in rows_of:
        x = draw(rows, 6, 8, seed=rows)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
        cuts.append(_cuts(model.plan))
    assert cuts == anew


def test_a_branch_on_a_size_is_another_program(captures):
    plain = Branching()
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    for rows, length in ((4, 6), (8, 6), (8, 12), (8, 9), (12, 20), (4, 6), (16, 9)):
        x = draw(rows, length, 8, seed=rows)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
    assert captures.count("capture_scalable") <= 4
    assert captures.count("capture") <= 4


def test_a_batch_of_one_row_is_captured_by_itself():
    plain = Language()
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    for rows in (1, 4, 1, 8, 2):
        x = labels(rows * 8, 16, seed=rows).view(rows, 8)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)


def test_a_limit_of_memory_holds_for_a_reused_plan():
    model = sw.AutoParallel(Language(), parallel_mode="dynamic_programming", memory="1MB")
    model.dataset_strategy("full_batch")
    for rows in (4, 8, 12):
        model(labels(rows * 8, 16).view(rows, 8))
        assert model.plan.peak <= 1e6
    with pytest.raises(sw.PlanError, match="no plan fits"):
        model(labels(4000 * 32, 16).view(4000, 32))


def test_programs_that_were_not_used_lately_are_forgotten():
    plain = Language()
    model = sw.AutoParallel(copy.deepcopy(plain), max_programs=2).dataset_strategy("full_batch")
    for rows in (4, 8, 12, 4, 8, 12, 8, 4):
        x = labels(rows * 8, 16, seed=rows).view(rows, 8)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
        assert len(model._programs) <= 2
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(sw.SettingError, match="max_programs"):
            sw.AutoParallel(plain, max_programs=wrong)


def _on_ranks(rank, world):
    sw.init()
    model = sw.AutoParallel(Language(), max_programs=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows, length in ((4, 8), (6, 8), (8, 12), (2, 16), (10, 12), (4, 8)):
        x = labels(2 * rows * length, 16, seed=rows).view(2 * rows, length)
        loss = model(x[rank * rows:(rank + 1) * rows])
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, len(model._programs)


def test_processes_meet_at_every_size():
    from ranks import run_ranks
    plain = Language()
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for rows, length in ((4, 8), (6, 8), (8, 12), (2, 16), (10, 12), (4, 8)):
        loss = plain(labels(2 * rows * length, 16, seed=rows).view(2 * rows, length))
        wanted.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for losses, programs in run_ranks(_on_ranks, 2):
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert programs == 3
