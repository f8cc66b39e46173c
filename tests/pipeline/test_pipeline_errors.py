"""Pipelines that cannot be: one error that says where and what would do, the same in one process and on every rank."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from pipeline_networks import Chain, batches, staged
from ranks import run_ranks
from small_networks import D
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import ShardwrightError

WORLD = 4


class Backwards(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.layers[2](x))


class Idle(Chain):
    """The second stage computes with what the first has trained."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[0](x) + self.layers[3](x))


class Twice(Chain):
    """Statistics that both stages change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, dtype=D))
        self.register_buffer("var", torch.ones(16, dtype=D))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.batch_norm(layer(x), self.mean, self.var, training=True)
        return x


def piped(
    net: nn.Module | None = None,
    stages: int = 2,
    micro_batches: int = 4,
    rows: int = 16,
    options: dict | None = None,
    **given: object,
) -> None:
    """Call a pipeline once."""
    given.setdefault("stage_config", staged(2))
    model = sw.AutoParallel(net or Chain(), nn.MSELoss(), **(options or {})).dataset_strategy("full_batch")
    model.pipeline(stages=stages, micro_batches=micro_batches, **given)
    model(*batches(1, rows)[0])


def config(*stages: int) -> dict[str, int]:
    return {f"layers.{i}": stage for i, stage in enumerate(stages)}


def csv(text: str) -> str:
    """The path of a file with this schedule, the same on every rank."""
    path = FOLDER[0] / f"{zlib.crc32(text.encode())}.csv"
    if not path.exists():
        path.write_text(text)
    return str(path)


FOLDER: list = []


def played(text: str) -> None:
    piped(micro_batches=2, scheduler=csv(text))


def marked_twice() -> None:
    net = Chain()
    sw.set_stage(net.layers[0], 0)
    sw.set_stage(net.layers[0], 1)


def marked_and_configured() -> None:
    net = Chain()
    sw.set_stage(net.layers[0], 1)
    piped(net)


def of_two_names() -> None:
    net = Chain()
    net.layers[3] = net.layers[0]
    piped(net)


def too_late() -> None:
    model = sw.AutoParallel(Chain(), nn.MSELoss()).pipeline(2, stage_config=staged(2)).dataset_strategy("full_batch")
    model(*batches(1)[0])
    model.pipeline(2)


def frozen() -> None:
    net = Chain()
    net.layers[2:].requires_grad_(False)
    piped(net)


#: The case, and what its error says, in this order.
CASES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "no stage 1": (
        lambda: piped(stage_config=config(0, 0, 0, 0)),
        ("no operator is in stage 1 of 2", "[0]", "legal", "set_stage", "0 to 1"),
    ),
    "nothing in stages": (lambda: piped(stage_config={}), ("no operator is in stage 1 of 2", "legal", "set_stage")),
    "stage 2 skipped": (
        lambda: piped(stages=4, stage_config=config(0, 1, 3, 3)),
        ("no operator is in stage 2 of 4", "[0, 1, 3]", "legal"),
    ),
    "a stage past the count": (
        lambda: piped(stage_config=config(0, 0, 1, 5)),
        ("the module 'layers.3' is in stage 5, of 2", "legal", "stages 0 to 1"),
    ),
    "a stage below 0": (
        lambda: piped(stage_config=config(0, 0, 1, -1)),
        ("'layers.3'", "-1", "legal", "a whole number from 0"),
    ),
    "a stage that is no number": (
        lambda: sw.set_stage(nn.ReLU(), "last"),
        ("'last'", "legal", "a whole number from 0"),
    ),
    "a stage of no module": (
        lambda: sw.set_stage(torch.relu, 0),
        ("not an nn.Module", "legal", "a module of the model"),
    ),
    "a path that there is not": (
        lambda: piped(stage_config={"layer0": 0, "layers.3": 1}),
        ("there is no module 'layer0'", "legal", "layers"),
    ),
    "devices that do not divide": (
        lambda: piped(stages=3, stage_config=config(0, 1, 2, 2)),
        ("3 stages on 4 devices", "legal", "1, 2, 4"),
    ),
    "rows that do not divide": (
        lambda: piped(rows=18),
        ("the input 0 has 18 rows, which 4 micro-batches do not divide", "legal: 2, 3, 6, 9, 18"),
    ),
    "fewer micro-batches than stages": (lambda: piped(micro_batches=1), ("micro_batches=1", "2 stages", "legal", "2")),
    "a module twice by set_stage": (
        marked_twice,
        ("a Linear in stage 0 is put into stage 1 too", "legal", "one stage for each module"),
    ),
    "a module by set_stage and stage_config": (
        marked_and_configured,
        (
            "the module 'layers.0' is in two stages: 1 by set_stage, 0 by stage_config",
            "legal",
            "one stage for each module",
        ),
    ),
    "a module by two names": (of_two_names, ("'layers.0' and 'layers.3' are one, in two stages: 0 and 1", "legal")),
    "a value that flows back": (
        lambda: piped(Backwards()),
        (
            "linear",
            "test_pipeline_errors.py",
            "stage 1",
            "is in stage 0 itself",
            "to later stages only",
            "legal",
            "'layers.0'",
            "'layers.2'",
        ),
    ),
    "a schedule that waits for itself": (
        lambda: played("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"),
        ("wait for each other", "0B0", "1F1"),
    ),
    "a schedule without an action": (lambda: played("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n"), ("1B1",)),
    "a schedule for another number of groups": (lambda: played("0F0,0F1,0B0,0B1\n"), ("legal",)),
    "a schedule that there is not": (lambda: piped(scheduler="2f2b"), ("2f2b", "legal", "1f1b")),
    "a file that there is not": (lambda: piped(scheduler="nowhere.csv"), ("nowhere.csv", "legal")),
    "chunks of 1f1b": (lambda: piped(chunks=2), ("chunks=2", "legal")),
    "a stage without parameters": (
        lambda: piped(Idle(), stage_config=config(0, 0, 0, 0) | {"": 1}),
        ("stage 1 has no parameter that is trained and its own", "legal"),
    ),
    "a stage without trained ones": (
        frozen,
        ("stage 1 has no parameter that is trained and its own", "legal", "fewer stages"),
    ),
    "a buffer of two stages": (
        lambda: piped(Twice()),
        ("the buffer 'mean' is changed in stage 1 and used in stage 0", "legal", "one stage for all that uses it"),
    ),
    "no stages": (lambda: piped(stages=0), ("stages=0", "legal", "from 1")),
    "half a micro-batch": (lambda: piped(micro_batches=1.5), ("micro_batches=1.5", "legal", "from 1")),
    "a config that is none": (lambda: piped(stage_config=[0, 1]), ("stage_config=[0, 1]", "legal", "a dict")),
    "a limit of memory": (
        lambda: piped(options=dict(memory="1GB", parallel_mode="recursive_programming")),
        ("memory='1GB'", "legal"),
    ),
    "hybrid_parallel": (
        lambda: piped(options=dict(parallel_mode="hybrid_parallel")),
        ("a pipeline in hybrid_parallel", "legal", "semi_auto"),
    ),
    "after the first call": (too_late, ("pipeline() comes too late", "legal", "before the first call")),
    "a mark for all devices": (
        lambda: piped(marked(WORLD)),
        ("layers.3 (linear)", "pipeline_networks.py", "need 4 devices, there are 2", "legal", "((2, 1), (1, 1), (1,))"),
    ),
}


def marked(cut: int) -> Chain:
    net = Chain()
    sw.shard(net.layers[3], ((cut, 1), (1, 1), (1,)))
    return net


def message(name: str) -> str:
    """The words of an error, less the addresses of objects."""
    with pytest.raises(ShardwrightError) as caught:
        CASES[name][0]()
    return re.sub(r"0x[0-9a-f]+", "0x", f"{type(caught.value).__name__}: {caught.value}")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    FOLDER.append(tmp_path_factory.mktemp("schedules"))
    yield
    FOLDER.clear()


@pytest.mark.parametrize("name", CASES)
def test_one_error(name: str) -> None:
    sw.init(devices=WORLD)
    text, at = message(name), 0
    for part in CASES[name][1]:
        assert part in text[at:], f"{part!r} is not in {text!r}, or too early"
        at = text.index(part, at) + len(part)


def on_a_rank(rank: int, world: int) -> dict[str, str]:
    sw.init()
    return {name: message(name) for name in CASES}


@cache
def by_rank() -> list[dict[str, str]]:
    return run_ranks(on_a_rank, WORLD)


@pytest.mark.parametrize("name", CASES)
def test_the_same_words_on_every_rank(name: str) -> None:
    sw.init(devices=WORLD)
    alone = message(name)
    assert [words[name] for words in by_rank()] == [alone] * WORLD


def one_rank_is_fed_another_batch(rank: int, world: int) -> None:
    piped(rows=32 if rank == 3 else 16)


def one_rank_has_another_stage(rank: int, world: int) -> None:
    piped(stage_config=config(0, 0, 0, 1) if rank == 3 else config(0, 0, 1, 1))


def one_rank_has_another_schedule(rank: int, world: int) -> None:
    piped(scheduler="gpipe" if rank == 3 else "1f1b")


def one_rank_is_refused(rank: int, world: int) -> None:
    piped(stage_config=config(0, 0, 1, 7 if rank == 3 else 1))


def caught(rank: int, world: int, what: Callable[[int, int], None]) -> str:
    sw.init()
    with pytest.raises(ShardwrightError) as error:
        what(rank, world)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (one_rank_is_fed_another_batch, "ranks [3] feed other inputs than rank 0"),
        (one_rank_has_another_stage, "ranks [3] have planned another program than rank 0"),
        (one_rank_has_another_schedule, "ranks [3] have planned another program than rank 0"),
        (one_rank_is_refused, "ranks [3] cannot plan what the others can"),
    ],
)
def test_ranks_that_disagree(what: Callable, words: str) -> None:
    errors = run_ranks(caught, WORLD, what)
    assert all(words in error for error in errors[:3])
    assert words in errors[3] or "stage 7, of 2" in errors[3]  # its own error is nearer
