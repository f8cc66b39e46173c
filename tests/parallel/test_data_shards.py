"""The part of the data that each process reads, in one process and in many; numpy arrays as inputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from ranks import all_passed, run_ranks, run_scenarios
from step_forms import D, close, net
from torch.utils.data import DataLoader, TensorDataset

import shardwright as sw
from shardwright.process_runtime import Runtime, playing, stream

WORLD = 4
GENERATOR = torch.Generator().manual_seed(3)
DATA = TensorDataset(torch.randn(50, 12, dtype=D, generator=GENERATOR), torch.randint(0, 4, (50,), generator=GENERATOR))


def wrapped(strategy: Any = "data_parallel", mode: str = "semi_auto") -> sw.AutoParallel:
    return sw.AutoParallel(nn.Linear(12, 4), nn.CrossEntropyLoss(), mode).dataset_strategy(strategy)


def as_rank(rank: int, devices: int = 8) -> Any:
    """The runtime of a rank of several processes, for this process."""
    return playing(Runtime(True, devices, rank, torch.device("cpu")))


def parts(model: sw.AutoParallel, *batch: Any, devices: int = 8) -> Iterator[Any]:
    for rank in range(devices):
        with as_rank(rank, devices):
            yield sw.data_shard(model)(*batch)


X, Y = torch.arange(32.0).view(8, 4), torch.arange(8)


def test_the_parts_of_a_batch_are_those_of_the_strategy() -> None:
    assert [x.tolist() for x in parts(wrapped(), Y)] == [[i] for i in range(8)]
    assert all(torch.equal(x, X) and torch.equal(y, Y) for x, y in parts(wrapped("full_batch"), X, Y))
    for rank, (x, y) in enumerate(parts(wrapped(((4, 1), (4,))), X, Y)):
        assert torch.equal(x, X.chunk(4)[rank // 2]) and torch.equal(y, Y.chunk(4)[rank // 2])
    layout = sw.Layout((2, 4), ("dp", "mp"))
    for rank, (x, y) in enumerate(parts(wrapped((layout("dp", "mp"), layout("None"))), X, Y)):
        assert torch.equal(x, X[rank // 4 * 4 :][:4, rank % 4 : rank % 4 + 1]) and torch.equal(y, Y)
    assert torch.equal(sw.data_shard(wrapped())(X), X)  # in one process: the whole


def test_the_parts_of_pipelines_and_of_one_device() -> None:
    piped = wrapped().pipeline(stages=2, micro_batches=2)
    assert [x.tolist() for x in parts(piped, Y)] == [[2 * i, 2 * i + 1] for i in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert all(torch.equal(x, Y) for x in parts(wrapped(mode="stand_alone"), Y))
    automatic = wrapped().pipeline(stages="auto")
    with as_rank(3), pytest.raises(sw.SettingError, match=r"stages='auto'(.|\n)*full_batch"):
        _ = sw.data_shard(automatic).count


def test_batches_of_any_structure() -> None:
    with as_rank(1):
        made = sw.data_shard(wrapped())({"ids": np.arange(16), "rest": [X, "text", 7]})
    assert made["ids"].tolist() == [2, 3] and torch.equal(made["rest"][0], X[1:2]) and made["rest"][1:] == ["text", 7]


def test_index_and_count_for_readers_of_ones_own() -> None:
    for rank in range(8):
        with as_rank(rank):
            shard = sw.data_shard(wrapped())
            assert (shard.index, shard.count) == (rank, 8) and repr(shard) == f"DataShard(index={rank}, count=8)"
            rows = sw.data_shard(wrapped(((2, 1), (2,))))
            assert (rows.index, rows.count) == (rank // 4, 2)
            assert sw.data_shard(wrapped("full_batch")).count == 1
    shard = sw.data_shard(wrapped())
    assert (shard.index, shard.count) == (0, 1)
    for strategy in (((2, 2), (2,)), ((2, 1), (1,))):
        with as_rank(0), pytest.raises(sw.SettingError, match=r"cut all inputs along their rows alone(.|\n)*\*batch"):
            _ = sw.data_shard(wrapped(strategy)).index


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("strategy", ["data_parallel", ((4, 1), (4,)), "full_batch"])
def test_batches_are_those_of_one_process_in_its_order(shuffle: bool, strategy: Any) -> None:
    model = wrapped(strategy)
    for epoch in range(2):

        def read(epoch: int = epoch) -> list[list[int]]:
            rows = sw.sampler(DATA, model, batch_size=16, shuffle=shuffle, seed=5)
            rows.set_epoch(epoch)
            return list(rows)

        whole = read()
        assert [len(batch) for batch in whole] == [16] * 3
        seen = []
        for rank in range(8):
            with as_rank(rank):
                seen.append(read())
                step = {"data_parallel": 1, "full_batch": 8}.get(strategy, 2) if isinstance(strategy, str) else 2
        for k, batch in enumerate(whole):
            assert [row for rank in range(0, 8, step) for row in seen[rank][k]] == batch
    if shuffle:
        rows = sw.sampler(DATA, model, batch_size=16, shuffle=True, seed=5)
        first, second = list(rows), list(rows)
        assert second == whole != first  # each epoch by itself


def test_rows_one_by_one() -> None:
    """The batches have the same rows as in one process."""
    model, count = wrapped(), 5
    one = list(sw.sampler(DATA, model, shuffle=True))
    assert sorted(one) == list(range(50))
    seen = []
    for rank in range(count):
        with as_rank(rank, count):
            rows = sw.sampler(DATA, model, shuffle=True)
            assert len(rows) == 10
            seen.append(list(rows))
    for k in range(0, 10, 2):  # batches of 2 rows a process
        assert {row for rows in seen for row in rows[k : k + 2]} == set(one[5 * k : 5 * (k + 2)])


def test_the_rows_at_the_end() -> None:
    model = wrapped()
    assert len(sw.sampler(50, model, batch_size=16)) == 3
    last = sw.sampler(50, model, batch_size=16, drop_last=False)
    assert len(last) == 4 and list(last)[3] == [48, 49]
    with as_rank(1, 2):
        assert list(sw.sampler(50, model, batch_size=16, drop_last=False))[3] == [49]
        assert len(sw.sampler(51, model)) == 25
    for size, message in ((20, r"batches of 20 rows, which 8 parts(.|\n)*batch_size=16 or 24"), (16, "2 of 50 rows")):
        with as_rank(1), pytest.raises(sw.SettingError, match=message):
            sw.sampler(50, model, batch_size=size, drop_last=False)


def test_what_cannot_be_read() -> None:
    def rows() -> Iterator[int]:
        yield 1

    for wrong, message in (
        (lambda: sw.sampler(rows(), wrapped()), r"sampler\(generator\): it has no length(.|\n)*\.index and \.count"),
        (lambda: sw.sampler(DATA, nn.Linear(2, 2)), r"data_shard\(Linear\)"),
        (lambda: sw.sampler(DATA, wrapped(), batch_size=0), "batch_size=0"),
        (lambda: sw.sampler(True, wrapped()), r"sampler\(bool\)"),
    ):
        with pytest.raises(sw.SettingError, match=message):
            wrong()


def test_drawing_an_order_leaves_torchs_generator_alone() -> None:
    model, before = wrapped(), torch.get_rng_state()
    list(sw.sampler(DATA, model, batch_size=10, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


# -- one script in one process and in several


def train(strategy: Any, whole_batches: bool, setting: Callable[[sw.AutoParallel], Any] = lambda model: None) -> Any:
    """A script of a user: nothing in it asks how many processes there are. The losses, in which dropout is."""
    torch.manual_seed(0)
    stream.load_state_dict({"seed": 0, "calls": 0})  # as in a process of its own
    model = nn.Sequential(nn.Linear(12, 16, dtype=D), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4, dtype=D))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    parallel = sw.AutoParallel(model, nn.CrossEntropyLoss(), "data_parallel").dataset_strategy(strategy)
    setting(parallel)
    shard = sw.data_shard(parallel)
    loader: Any = (
        DataLoader(DATA, batch_size=16, drop_last=True)
        if whole_batches
        else DataLoader(DATA, batch_sampler=sw.sampler(DATA, parallel, batch_size=16, shuffle=True))
    )
    losses = []
    for _ in range(2):
        for x, y in loader:
            loss = parallel(*shard(x, y)) if whole_batches else parallel(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def piped(model: sw.AutoParallel) -> None:
    model.pipeline(stages=2, micro_batches=2, stage_config={"0": 0, "3": 1})


CASES: dict[str, tuple[Any, ...]] = {
    "parts": ("data_parallel", False),
    "whole": ("full_batch", False),
    "whole batches cut": ("data_parallel", True),
    "a pipeline": ("data_parallel", False, piped),
}


def one_script(rank: int, world: int) -> None:
    sw.init()
    for name, case in CASES.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*of the batch, under.*")
            losses = train(*case)
        with playing(Runtime(False, world, 0, torch.device("cpu"))):
            expected = train(*case)
        assert len(expected) == 6, name
        close(losses, expected)


def first_batches(rank: int, world: int) -> None:
    """The same values as different parts, and different values as one part."""
    sw.init()
    x, y = DATA[:16]

    def warned(strategy: Any, *batch: torch.Tensor, setting: Any = lambda model: None) -> list[str]:
        model = sw.AutoParallel(net(), nn.CrossEntropyLoss(), "data_parallel").dataset_strategy(strategy)
        setting(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):  # at the first call alone
                model(*batch)
        found = [w for w in caught if "of the batch, under" in str(w.message)]
        assert all(w.filename == __file__ for w in found)
        return [str(w.message) for w in found]

    (same,) = warned("data_parallel", x, y)
    assert "all 4 ranks feed the same values" in same and "the same rows 4 times" in same and "sw.sampler" in same
    mine = x + rank
    (apart,) = warned("full_batch", mine, y)
    assert "ranks 0 and 1 feed different values as one part of the batch, under dataset_strategy('full_batch')" in apart

    def staged(model: sw.AutoParallel) -> None:
        model.pipeline(stages=2, micro_batches=2, stage_config={"middle": 0, "last": 1})

    (position,) = warned("data_parallel", x.chunk(4)[rank], y.chunk(4)[rank], setting=staged)
    assert "ranks 0 and 2 feed" in position and "at one position in their stages of the pipeline" in position
    for quiet in (
        ("data_parallel", x.chunk(4)[rank], y.chunk(4)[rank]),
        ("full_batch", x, y),
        (((2, 1), (2,)), x.chunk(2)[rank // 2], y.chunk(2)[rank // 2]),
        ("data_parallel", torch.ones(4, 12, dtype=D), torch.zeros(4, dtype=torch.long)),  # constants measure time
    ):
        assert warned(*quiet) == []
    assert len(warned(((2, 1), (2,)), x, y)) == 1


def numpy_parts(rank: int, world: int) -> None:
    sw.init()
    model = net()
    parallel = sw.AutoParallel(model, nn.CrossEntropyLoss())
    x, y = (t.chunk(world)[rank].numpy() for t in DATA[:16])
    loss = parallel(x, y)
    with parallel.whole() as plain:
        close([float(loss.detach())], [nn.functional.cross_entropy(plain(DATA[:16][0]), DATA[:16][1]).detach()])


@pytest.mark.filterwarnings("ignore")
def test_one_script_in_one_process_and_in_four() -> None:
    scenarios = {f.__name__: f for f in (one_script, first_batches, numpy_parts)}
    all_passed(run_ranks(run_scenarios, WORLD, scenarios))


# -- numpy arrays


@dataclasses.dataclass
class Batch:
    rows: Any


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=D)

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor], *, last: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * more["scale"] + last.sum()


def test_numpy_arrays_are_taken_wherever_tensors_are() -> None:
    sw.init(devices=2)
    plain = Takes()
    model = sw.AutoParallel(plain)
    x, scale, last = np.arange(12.0).reshape(4, 3), np.array([[2.0]] * 4), np.arange(4.0)
    x.flags.writeable = False
    reversed_rows = np.ascontiguousarray(x[::-1])[::-1]  # negative strides
    big_endian = x.astype(">f8")
    tensors = [torch.tensor(a.tolist(), dtype=D) for a in (x, scale, last)]
    expected = plain(tensors[0], {"scale": tensors[1]}, last=tensors[2])
    for rows in (x, reversed_rows, big_endian, tensors[0]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as torch's, of an array that may not be written
            got = model(rows, {"scale": scale}, last=last)
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    assert len(model._programs) == 1
    assert model.infer_layout(x, {"scale": scale}, last=last)["layer.weight"].shape == (2, 3)


class Repeated(nn.Linear):
    def forward(self, x: torch.Tensor, times: int, *, scale: float, negated: bool) -> torch.Tensor:
        for _ in range(times):
            x = super().forward(x) * scale
        return -x if negated else x


def test_numbers_of_numpy_are_those_of_python() -> None:
    sw.init(devices=2)
    plain, x = Repeated(3, 3, dtype=D), torch.ones(4, 3, dtype=D)
    model = sw.AutoParallel(plain)
    for times in (1, 2):
        expected = plain(x, times, scale=0.5, negated=times == 1)
        got = model(x, np.int64(times), scale=np.float32(0.5), negated=np.bool_(times == 1))
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)
        model(x, times, scale=0.5, negated=times == 1)
    assert len(model._programs) == 2


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.array(["2020-01-01"], dtype="M8[D]")])
def test_arrays_without_numbers_are_refused(array: np.ndarray) -> None:
    with pytest.raises(sw.SettingError, match="an input is a numpy array of .*(.|\n)*numbers or truth values"):
        sw.AutoParallel(nn.Linear(3, 2))(array)


def test_numpy_arrays_in_plans_and_verifications() -> None:
    plain, x, y = nn.Linear(3, 2, dtype=D), np.random.default_rng(0).normal(size=(4, 3)), np.zeros((4, 2))
    plan = sw.plan(plain, (x,), nn.MSELoss(), y, devices=2)
    assert [value.shape for value in plan.graph.inputs] == [(4, 3), (4, 2)]
    assert sw.verify(plain, x, y, loss_fn=nn.MSELoss(), devices=2, steps=1).ok
