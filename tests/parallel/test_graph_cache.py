"""A model called with many sizes: one export, one plan that is reused, the results of one device."""

import copy
import logging
import random
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from capture_count import counted_captures
from gpt import GPT
from ranks import run_ranks
from small_networks import D, draw, labels
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.planners.planning_problem import PLANNERS


@pytest.fixture(autouse=True)
def four_devices():
    sw.init(devices=4)


#: Links on which whatever is cut is sent for nothing.
FREE = sw.Cluster("free", (sw.Level("links", 4, 1e18, 1e-15),), 1e9, {"float64": 1e9}, 1e11, 1e-9)


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
        return x.reshape(rows * length, -1).sum() * rows / length**0.5


def test_calls_of_one_form_are_split_once(monkeypatch):
    splitter, seen = import_module("shardwright.pipeline.microbatch").MicrobatchRewriter, []
    monkeypatch.setattr(splitter, "_of_rows", _counted(splitter._of_rows, "rows", seen))
    counts = []
    for layers in (2, 3):
        sw.plan(
            Language(layers),
            (labels(64, 16).view(8, 8),),
            devices=4,
            pipeline=dict(stages=2, micro_batches=2, stage_config={"net.blocks.0": 0, "net.norm": 1}),
        )
        counts.append(len(seen))
        seen.clear()
    assert counts[0] == counts[1]


@pytest.fixture
def captures(monkeypatch):
    """The kinds of captures, in order."""
    return counted_captures(monkeypatch)


def step(model, x):
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto", "recursive_programming", "dynamic_programming"])
def test_further_sizes_are_neither_exported_nor_searched_and_run_as_on_one_device(mode, captures, monkeypatch):
    plain = Language()
    model = sw.AutoParallel(copy.deepcopy(plain), parallel_mode=mode, cluster=FREE)
    model.dataset_strategy("full_batch")
    for name, mine in PLANNERS.items():
        monkeypatch.setitem(PLANNERS, name, replace(mine, decide=_counted(mine.decide, name, captures)))
    strategies = []
    for rows, length in ((8, 16), (16, 16), (24, 32), (8, 24), (40, 16), (16, 16)):
        x = labels(rows * length, 16, seed=rows + length).view(rows, length)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(others, gradients, rtol=1e-9, atol=1e-12)
        strategies.append([o.in_strategy for o in model.plan.operators])
    assert captures.count("export") == captures.count(mode) == 1
    assert captures.count("light run") == 4  # the last sizes have a program
    assert all(s == strategies[0] for s in strategies)
    assert any(cut > 1 for strategy in strategies[0] for cuts in strategy for cut in cuts)
    if model.plan.found is not None:
        assert model.plan.bound is None and "nothing was searched" in " ".join(model.plan.found.notes)


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_that_has_found_two_sizes_equal_and_a_loop_of_several_lines(seed, captures):
    """`mse_loss` asks whether input and target have one size. Each call of the loop has a line of its own."""
    torch.manual_seed(seed)
    plain, choose = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(D), random.Random(seed)
    loss_fn = nn.MSELoss()
    model = sw.AutoParallel(copy.deepcopy(plain), loss_fn=loss_fn).dataset_strategy("full_batch")
    model(draw(12, 8), draw(12, 4, seed=1)).backward()
    for rows in (16, 24, 4 * choose.randint(2, 9), 12):
        model.zero_grad(), plain.zero_grad()
        x, y = draw(rows, 8, seed=rows), draw(rows, 4, seed=rows + 1)
        loss, wanted = model(x, y), loss_fn(plain(x), y)
        loss.backward(), wanted.backward()
        torch.testing.assert_close(loss, wanted)
        for found, one in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(found.grad, one.grad)
    assert captures[0] == "export" and {*captures[1:]} == {"light run"}


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
    for rows, length in ((4, 6), (8, 6), (8, 12), (8, 9), (12, 20), (4, 6), (16, 9), (1, 11), (1, 5)):
        x = draw(rows, length, 8, seed=rows)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
    assert captures.count("export") == 2


def test_a_batch_of_one_row_is_a_size_like_others(captures):
    plain = Language()
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    for rows in (4, 1, 8, 2):
        x = labels(rows * 8, 16, seed=rows).view(rows, 8)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
    assert captures == ["export", *["light run"] * 3]


def test_a_limit_of_memory_holds_for_a_reused_plan():
    model = sw.AutoParallel(Language(), parallel_mode="recursive_programming", memory="1MB")
    model.dataset_strategy("full_batch")
    for rows in (4, 8):
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


# -- pipelines ---------------------------------------------------------------------------------------------------------


def piped(plain, mode="semi_auto", micro_batches=2, **given):
    model = sw.AutoParallel(copy.deepcopy(plain), parallel_mode=mode, **given).dataset_strategy("full_batch")
    layers = len(plain.net.blocks)
    return model.pipeline(
        stages=2,
        micro_batches=micro_batches,
        stage_config={f"net.blocks.{i}": 2 * i // layers for i in range(layers)} | {"net.norm": 1},
    )


def compared(plain, model, sizes):
    """Steps of both at some sizes of tokens."""
    for seed, (rows, length) in enumerate(sizes):
        x = labels(rows * length, 16, seed=seed).view(rows, length)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(others, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["data_parallel", "recursive_programming"])
def test_a_pipeline_is_neither_exported_nor_searched_at_further_sizes(mode, captures, monkeypatch):
    mine = PLANNERS[mode]
    monkeypatch.setitem(PLANNERS, mode, replace(mine, decide=_counted(mine.decide, mode, captures)))
    plain, choose = Language(layers=2), random.Random(5)
    model = piped(plain, mode, cluster=FREE)
    compared(plain, model, [(8, 16)])
    assert captures == ["export", "light run", mode, mode]  # of a micro-batch, and of twice the rows
    compared(plain, model, [(16, 24), *((8 * choose.randint(1, 4), 8 * choose.randint(1, 4)) for _ in range(5))])
    assert captures.count("export") == 1 and captures.count(mode) == 2
    assert any(cut > 1 for o in model.plan.operators for cuts in o.in_strategy for cut in cuts)


def test_a_pipeline_whose_stages_are_chosen_keeps_them_at_further_sizes(captures):
    plain = Language(layers=2)
    model = sw.AutoParallel(copy.deepcopy(plain), parallel_mode="recursive_programming").dataset_strategy("full_batch")
    model.pipeline(stages="auto", micro_batches=2)
    compared(plain, model, [(8, 16), (16, 24)])
    assert isinstance(model.plan, sw.PipelinePlan)
    stages = model.plan.chosen.stages
    compared(plain, model, [(16, 16), (8, 32), (24, 8)])
    assert captures.count("export") == 1 and model.plan.chosen.stages == stages


def test_a_pipeline_that_is_called_at_several_lines():
    """A micro-batch of the second call is as large as the larger one of the first."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(D)
    model = sw.AutoParallel(copy.deepcopy(plain), nn.MSELoss()).dataset_strategy("full_batch")
    model.pipeline(stages=2, micro_batches=2, stage_config={"0": 0, "1": 0, "2": 1})
    x, y = draw(32, 8), draw(32, 4, seed=1)
    losses = [model(x[:8], y[:8])]
    losses += [model(x[:16], y[:16])]
    losses += [model(x, y)]
    for rows, loss in zip((8, 16, 32), losses):
        torch.testing.assert_close(loss, F.mse_loss(plain(x[:rows]), y[:rows]))


def test_a_pipeline_of_micro_batches_of_one_row(captures):
    plain = Language(layers=2)
    model = piped(plain, micro_batches=4)
    compared(plain, model, [(4, 8), (4, 12), (8, 12), (4, 16), (16, 20), (12, 24)])
    assert captures.count("export") == 1


def test_a_pipeline_of_a_model_with_branches_on_a_size(captures):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, dtype=D), nn.Linear(8, 8, dtype=D)

        def forward(self, x):
            h = self.a(x)
            if x.shape[1] > 10:
                h = h.tanh() * x.shape[1]
            return self.b(h).square().sum(1).mean()

    plain, choose = Branch(), random.Random(2)
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    model.pipeline(stages=2, micro_batches=2, stage_config={"a": 0, "b": 1})
    for seed in range(8):
        x = draw(4 * choose.randint(1, 4), choose.randint(6, 14), 8, seed=seed)
        (wanted, gradients), (found, others) = step(plain, x), step(model, x)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(others, gradients)
    assert captures.count("export") == 2


# -- what the forward does besides its result --------------------------------------------------------------------------


class Counting(Language):
    """Counts its calls, prints, logs, assigns."""

    def __init__(self, layers=1, length=32):
        super().__init__(layers, length)
        self.calls, self.left, self.kind = 0, 0.5, ""

    def forward(self, tokens):
        self.calls += 1
        self.left -= 0.25
        print("forward")
        logging.getLogger("scaling").warning("a call")
        self.kind = "tokens"
        return super().forward(tokens)


class Telling(Language):
    """Prints and keeps its sizes."""

    def forward(self, tokens):
        self.rows = tokens.shape[0]
        print(f"{tokens.shape[0]} rows of {tokens.shape[1]}")
        return super().forward(tokens)


class Printing(Language):
    """Prints its sizes and nothing else."""

    def forward(self, tokens):
        print(f"{tokens.shape[0]:>4} rows", tuple(tokens.shape), tokens.numel() // 2)
        return super().forward(tokens)


class Diverting(Language):
    """Prints the same text to another stream, and logs it with another level, where there are more than 10 rows."""

    def forward(self, tokens):
        many = tokens.shape[0] > 10
        print("rows", file=sys.stderr if many else sys.stdout)
        logging.getLogger("scaling").log(logging.ERROR if many else logging.WARNING, "rows")
        return super().forward(tokens)


class CountingLong(Language):
    """Counts its long inputs twice."""

    def __init__(self, layers=1, length=32):
        super().__init__(layers, length)
        self.calls = 0

    def forward(self, tokens):
        self.calls += 2 if tokens.shape[1] > 10 else 1
        return super().forward(tokens)


def effects(model, x, capsys, caplog):
    caplog.clear()
    capsys.readouterr()
    loss = model(x).detach()
    net = getattr(model, "net", model) if isinstance(model, sw.AutoParallel) else model
    state = {name: getattr(net, name, None) for name in ("calls", "left", "kind", "rows")}
    return loss, (
        tuple(capsys.readouterr()),
        [(r.getMessage(), r.levelname) for r in caplog.records if r.name == "scaling"],
        state,
    )


@pytest.mark.parametrize(
    "kind, pipeline",
    [
        (Counting, False),
        (Counting, True),
        (Telling, False),
        (Printing, False),
        (Diverting, False),
        (CountingLong, False),
    ],
)
def test_what_is_done_besides_the_result_is_done_at_every_size(kind, pipeline, captures, capsys, caplog):
    plain, choose = kind(layers=2 if pipeline else 1), random.Random(3)
    model = piped(plain) if pipeline else sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    for rows, length in (
        (4, 6),
        (8, 12),
        *((4 * choose.randint(1, 4), choose.randint(2, 20)) for _ in range(3)),
        (4, 6),
    ):
        x = labels(rows * length, 16, seed=rows).view(rows, length)
        (wanted, done), (found, others) = effects(plain, x, capsys, caplog), effects(model, x, capsys, caplog)
        torch.testing.assert_close(found, wanted)
        assert others == done
    assert captures.index("light run") == captures.count("export") <= 3  # counters of the first capture


def test_a_count_that_the_program_depends_on_is_refused_at_every_size():
    class Depends(Language):
        calls = 1

        def forward(self, tokens):
            self.calls += 1
            return super().forward(tokens) * (self.calls if tokens.shape[1] > 10 else 1)

    model = sw.AutoParallel(Depends()).dataset_strategy("full_batch")
    model(labels(4 * 8, 16).view(4, 8))
    for rows, length in ((4, 12), (8, 14)):
        with pytest.raises(sw.CaptureError, match="depends on its value"):
            model(labels(rows * length, 16).view(rows, length))
    model(labels(8 * 6, 16).view(8, 6))


# -- sizes that are known to differ ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [False, True])
def test_dims_that_are_said_to_vary_are_not_announced(pipeline, recwarn):
    plain, choose = Language(layers=2), random.Random(7)
    model = (
        piped(plain, varying=(0, 1))
        if pipeline
        else sw.AutoParallel(copy.deepcopy(plain), varying=(0, 1)).dataset_strategy("full_batch")
    )
    compared(plain, model, [(8, 16), *((4 * choose.randint(1, 4), choose.randint(2, 32)) for _ in range(4))])
    assert not any(issubclass(w.category, sw.RecaptureWarning) for w in recwarn)


def test_buckets_are_sizes_that_vary(captures, recwarn):
    plain = Language()
    model = (
        sw.AutoParallel(copy.deepcopy(plain))
        .dataset_strategy("full_batch")
        .buckets(seq=[8, 16, 32], mask=None, fill={"tokens": 0})
    )
    for rows, length in ((8, 16), (8, 32), (16, 8)):
        compared(plain, model, [(rows, length)])
    assert captures == ["export", "light run", "light run"]
    assert not any(issubclass(w.category, sw.RecaptureWarning) for w in recwarn)


def test_dims_that_vary_otherwise_than_was_said_are_announced_once():
    plain = Branching()
    for varying, dim in (((), 0), ((1,), 0), ((0,), 1), ((0, 2, 7), 1)):
        model = sw.AutoParallel(copy.deepcopy(plain), varying=varying).dataset_strategy("full_batch")
        with pytest.warns(
            sw.RecaptureWarning, match=r"\(4, 6, 8\)\] after .* planned for each set of shapes"
        ) as caught:
            for rows, length in ((3, 6) if dim == 0 else (4, 5), (4, 6), (8, 6), (8, 12), (1, 7)):
                x = draw(rows, length, 8, seed=rows)
                torch.testing.assert_close(model(x), plain(x))
        assert len(caught) == 1
    for wrong in (0, (-1,), (1.5,), "01", (True,)):
        with pytest.raises(sw.SettingError, match="varying"):
            sw.AutoParallel(plain, varying=wrong)


class Picking(Language):
    """Sizes that depend on the values of the tokens, where there are more than 10 rows."""

    def __init__(self, by_count):
        super().__init__()
        self.by_count = by_count

    def forward(self, tokens):
        if tokens.shape[0] <= 10:
            return super().forward(tokens)
        chosen = tokens[:, 0] > 3
        return super().forward(tokens[: int(chosen.sum())] if self.by_count else tokens[chosen])


@pytest.mark.parametrize("by_count", [True, False])
def test_sizes_that_depend_on_values_are_left_to_an_export(by_count, captures):
    plain = Picking(by_count)
    model = sw.AutoParallel(copy.deepcopy(plain)).dataset_strategy("full_batch")
    x = labels(64, 16, seed=8).view(8, 8)
    torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(sw.CaptureError, match="data-dep|values"):
        model(labels(128, 16, seed=16).view(16, 8))
    assert captures == ["export", "light run", "export"]


def _on_ranks(rank, world):
    sw.init()
    model = sw.AutoParallel(Language(), max_programs=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows, length in ((4, 8), (6, 8), (8, 12), (2, 16), (10, 12), (4, 8)):
        x = labels(2 * rows * length, 16, seed=rows).view(2 * rows, length)
        loss = model(x[rank * rows : (rank + 1) * rows])
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, len(model._programs)


def test_processes_meet_at_every_size():
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


SIZES = ((4, 8), (8, 12), (12, 16), (4, 16), (8, 20), (4, 8))


def _a_pipeline_on_ranks(rank, world, feed, sizes):
    sw.init()
    seen = counted_captures()
    model = sw.AutoParallel(Language(layers=2), max_programs=4).dataset_strategy(feed)
    model.pipeline(stages=2, micro_batches=2, stage_config={"net.blocks.0": 0, "net.blocks.1": 1, "net.norm": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places, losses, counts = world // 2, [], []  # positions in a stage, which each feed their own part
    for number, (rows, length) in enumerate(sizes):
        x = labels(rows * length, 16, seed=number).view(rows, length)
        part = rows // places
        feeding = x if feed == "full_batch" else x[rank % places * part :][:part]
        losses.append(float(model(feeding).detach()))
        model(feeding).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(seen))
    with model.whole() as net:
        return losses, {n: v.clone() for n, v in net.state_dict().items()}, seen, counts


@pytest.mark.parametrize("world, feed, sizes", [(2, "full_batch", SIZES), (4, "data_parallel", SIZES[:4])])
def test_a_pipeline_across_processes_is_exported_once_for_all_sizes(world, feed, sizes):
    plain = Language(layers=2)
    optimizer, wanted = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for number, (rows, length) in enumerate(sizes):
        loss = plain(labels(rows * length, 16, seed=number).view(rows, length))
        wanted.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for losses, weights, seen, counts in run_ranks(_a_pipeline_on_ranks, world, feed, sizes):
        assert losses == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(weights, dict(plain.state_dict()), rtol=1e-9, atol=1e-12)
        assert seen == ["export", *["light run"] * (len(seen) - 1)]
        # Of a micro-batch and of twice the rows, which is derived where more rows have run; a program is forgotten.
        assert counts == [2, 4, 6, 7, 9, 10][: len(sizes)]
