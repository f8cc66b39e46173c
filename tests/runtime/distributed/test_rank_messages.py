"""Messages of real ranks to one another about a checkpoint."""

from __future__ import annotations

import threading
import time

import pytest
from ranks import run_ranks, run_scenarios

import shardwright as sw
from shardwright.errors import CheckpointError
from shardwright.runtime.distributed.rank_messages import (
    ProcessRanks,
    error_as_json,
    error_of,
    exchanged,
    from_first,
    ranks_of_now,
)

WORLD = 4


def what_is_said_is_heard(rank: int, world: int) -> None:
    """Through memory, without it, and where what one says does not fit in it."""
    for shared in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDWRIGHT_SHARED_MEMORY", shared)
            talking = ProcessRanks()
        assert (talking._memory is not None) == (shared == "1")
        for length in (3, 10, 10**6, 20):
            mine = {"rank": rank, "words": "x" * (length if rank == 2 else 3)}
            expected = [{"rank": r, "words": "x" * (length if r == 2 else 3)} for r in range(world)]
            assert talking.exchanged(mine) == expected
            assert talking.gathered(mine) == (expected if rank == 0 else [])
            assert talking.from_first(mine) == expected[0]
        error = CheckpointError("full", source="disk") if rank == 3 else None
        with pytest.raises(CheckpointError, match="full .on rank 3."):
            talking.agreed(error)


def errors_of_all_kinds_are_heard(rank: int, world: int) -> None:
    talking = ranks_of_now()
    for error, kind, text in (
        (sw.StrategyError("not so", operator="up", source="net.py:4", strategy=(1, 2), legal="so"), None, "not so"),
        (OSError(28, "No space left on device", "disk"), CheckpointError, "No space left on device"),
        (ZeroDivisionError("by nothing"), RuntimeError, "ZeroDivisionError: by nothing"),
    ):
        with pytest.raises(kind or type(error), match=text) as raised:
            talking.agreed(error if rank == 2 else None)
        if kind is None:
            reported = (raised.value.operator, raised.value.source, raised.value.strategy, raised.value.legal)
            assert reported == ("up", "net.py:4", "(1, 2)", "so")
    assert exchanged({"rank": rank, "of": (rank, None, float("inf"))}) == [
        {"rank": r, "of": (r, None, float("inf"))} for r in range(world)
    ]
    assert from_first(f"{rank}" * 10**6) == "0" * 10**6


def test_an_error_that_is_none_of_ours_nor_pythons_arrives_as_its_text() -> None:
    for name in ("Unheard", "PACKAGE_FOLDER", "os", "print", "exit", "ExceptionGroup", "UnicodeDecodeError"):
        error = error_of({"kind": name, "message": "text"})
        assert type(error) is RuntimeError and str(error) == f"{name}: text"
    assert repr(error_of(error_as_json(ValueError("text")))) == "ValueError('text')"


def two_talks_at_once(rank: int, world: int) -> None:
    """A save in the background speaks while the loop asks whether it is time for the next."""
    saves, clock, heard = ranks_of_now(), ranks_of_now("clock"), []
    assert saves is ranks_of_now() and clock is ranks_of_now("clock")

    def speak() -> None:
        for number in range(100):
            time.sleep(0.001 * ((rank + number) % 3))
            heard.append(saves.exchanged(("save", number, rank)))

    thread = threading.Thread(target=speak)
    thread.start()
    asked = [clock.from_first(("clock", number, rank)) for number in range(150)]
    thread.join()
    assert asked == [("clock", number, 0) for number in range(150)]
    assert heard == [[("save", number, r) for r in range(world)] for number in range(100)]


SCENARIOS = {f.__name__: f for f in (what_is_said_is_heard, errors_of_all_kinds_are_heard, two_talks_at_once)}


def on_ranks(rank: int, world: int) -> dict[str, str | None]:
    sw.init()
    return run_scenarios(rank, world, SCENARIOS)


@pytest.fixture(scope="module")
def results() -> list[dict[str, str | None]]:
    return run_ranks(on_ranks, WORLD)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_four_ranks(results: list[dict[str, str | None]], name: str) -> None:
    for rank, result in enumerate(results):
        if result[name] is not None:
            pytest.fail(f"rank {rank}: {result[name]}", pytrace=False)
