"""The rank that others wait for, found from the positions of all ranks."""

from __future__ import annotations

import re

from hypothesis import given, strategies as st

from shardwright.runtime.distributed.watch.rank_positions import Seen, not_moving, spelled


def at(place: str = "", ranks: tuple[int, ...] = (), call: int = 1) -> Seen:
    return Seen(call, "p", place, ranks, "", False, 60.0, "train.py:57 in main")


def test_the_blame_is_followed_to_the_rank_that_waits_for_nobody() -> None:
    """0 waits for 1, which waits for 3, which sleeps; 2 has nothing to do with it."""
    seen = {0: at("the gather of 'a'", (0, 1)), 1: at("the sum of 'b'", (1, 3)), 2: at(), 3: at()}
    told = not_moving(seen, 4, 0)
    assert told.startswith(
        "rank 3 has not come to the sum of 'b' in call 1; rank 1 waits there since 60 s\n"
        "  rank 3 is at train.py:57 in main, since call 1 began"
    )
    assert "rank 2" not in told


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_spelled_as_ranges(ranks: set[int]) -> None:
    word, _, told = spelled(ranks).partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    read = [range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1) for part in told.split(", ")]
    assert [r for run in read for r in run] == sorted(ranks)
    assert all(a[-1] + 1 < b[0] for a, b in zip(read, read[1:]))


@given(st.data())
def test_whoever_is_blamed_is_waited_for_and_waits_for_nobody(data) -> None:
    world = data.draw(st.integers(2, 6))
    groups = st.lists(st.integers(0, world - 1), min_size=1, unique=True)
    seen = {}
    for rank in range(world):
        if not data.draw(st.booleans()) or rank == 0:
            ranks = tuple(sorted({rank, *data.draw(groups)}))
            seen[rank] = at(f"the sum over {ranks}", ranks)
        elif data.draw(st.booleans()):
            seen[rank] = at()
    told = not_moving(seen, world, 0)
    idle = [r for r in range(world) if r not in seen or not seen[r].place]
    blamed = re.match(r"ranks? ([\d, -]+) ha(?:s|ve) not come", told)
    if blamed:
        for part in blamed[1].split(", "):
            for rank in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1):
                assert rank in idle
                assert any(rank in s.ranks for s in seen.values() if s.place)
    else:  # a circle, or nobody is missing: then whom rank 0 waits for waits itself
        assert all(r not in idle for r in seen[0].ranks)
