"""Schedules of a pipeline: complete, valid, free of deadlocks; how much they keep; CSV files; and what is refused."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from forked_python import fresh
from hypothesis import given, settings

from shardwright.errors import SettingError
from shardwright.pipeline.schedules import SCHEDULES, Action, Schedule, check, forward_only, schedule

#: Every schedule with the chunks that it takes.
CHUNKS = [
    ("gpipe", None),
    ("1f1b", None),
    ("interleaved", 1),
    ("interleaved", None),
    ("interleaved", 3),
    ("zero_bubble", None),
    ("zero_bubble", 2),
    ("zero_bubble", 3),
    ("zbv", None),
]

#: Two groups, two micro-batches, a blank cell in each row.
GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def fits(name: str, groups: int, micro_batches: int) -> bool:
    return name not in ("interleaved", "zero_bubble") or micro_batches % (micro_batches // groups) == 0


def replayed(made: Schedule) -> None:
    """Plays a schedule by the rules of the module's first lines: in rounds, each group as far as it gets."""
    backward = made.name != "forward"
    done: set[tuple[int, str, int]] = set()
    last = made.stages - 1

    def may(stage: int, kind: str, micro: int) -> bool:
        back = lambda s: (s, "B", micro) in done or (s, "I", micro) in done
        if kind == "F":
            return stage == 0 or (stage - 1, "F", micro) in done
        if kind == "W":
            return (stage, "I", micro) in done
        return (stage, "F", micro) in done and (stage == last or back(stage + 1))

    rows = [list(row) for row in made.actions]
    progress = True
    while progress:
        progress = False
        for row in rows:
            while row and may(*row[0]):
                assert tuple(row[0]) not in done
                done.add(tuple(row.pop(0)))
                progress = True
    assert not any(rows)
    for stage in range(made.stages):
        for micro in range(made.micro_batches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, micro) in done)
            assert kinds in (("FB", "FIW") if backward else ("F",))


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_every_schedule_is_complete_and_valid(name: str, chunks: int | None, groups: int) -> None:
    for micro_batches in range(groups, 4 * groups + 1):
        if not fits(name, groups, micro_batches):
            continue
        made = schedule(name, groups, micro_batches, chunks=chunks)
        stages = groups * (chunks or SCHEDULES[name])
        assert (made.name, made.stages, made.groups, made.micro_batches) == (name, stages, groups, micro_batches)
        for stage in range(stages):
            there_and_back = min(stage, 2 * groups - 1 - stage)
            assert made.placement[stage] == (there_and_back if name == "zbv" else stage % groups)
        for group, row in enumerate(made.actions):
            assert all(made.placement[action.stage] == group for action in row)
        replayed(made)
        check(made)
        assert Counter(made.order) == Counter(action for row in made.actions for action in row)
        split = {a.kind for row in made.actions for a in row} == set("FIW")
        assert split == (name in ("zero_bubble", "zbv"))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
def test_what_is_kept(groups: int) -> None:
    for micro_batches in range(groups, 3 * groups + 1):
        gpipe, ours = schedule("gpipe", groups, micro_batches), schedule("1f1b", groups, micro_batches)
        for s in range(groups):
            assert gpipe.most_saved(s) == micro_batches
            assert ours.most_saved(s) == min(micro_batches, groups - s)
        assert {forward_only(ours.placement, micro_batches).most_saved(s) for s in range(groups)} == {0}


def test_what_a_stage_keeps_is_counted_at_one_time() -> None:
    row = [
        Action(s, kind, k)
        for s, kind, k in ((0, "F", 0), (1, "F", 0), (1, "I", 0), (0, "I", 0), (1, "W", 0), (0, "W", 0))
    ]
    made = Schedule("mine", (0, 0), 1, (tuple(row),))
    check(made)
    assert [made.most_saved(0), made.most_saved(1)] == [1, 1]
    late = tuple(Action(0, kind, k) for kind, k in (("F", 0), ("I", 0), ("F", 1), ("W", 0), ("I", 1), ("W", 1)))
    assert Schedule("mine", (0,), 2, (late,)).most_saved(0) == 2  # the gradients of weights ask for it too
    zbv = schedule("zbv", 4, 8)
    assert [zbv.most_saved(s) + zbv.most_saved(7 - s) for s in range(4)] == [9] * 4  # as much on every group of the V


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1), (1, 0)])
def test_forwards_alone(placement: tuple[int, ...]) -> None:
    for micro_batches in (1, 2, 3, 8):
        made = forward_only(placement, micro_batches)
        assert (made.name, made.placement) == ("forward", placement)
        replayed(made)
    if Counter(placement).most_common(1)[0][1] == 1:  # nobody waits once the first micro-batch has come
        assert max(made.steps.values()) + 1 == 8 + len(placement) - 1


def test_forwards_alone_take_the_stage_nearest_to_the_end() -> None:
    made = forward_only((0, 1, 0, 1), 4)
    assert " ".join(map(str, made.actions[0])) == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"
    assert max(made.steps.values()) + 1 == 2 * 4 + 1


def test_grid() -> None:
    assert (
        schedule("1f1b", 2, 3).grid()
        == """\
        Group 0  Group 1
Step 0  0F0
Step 1  0F1      1F0
Step 2           1B0
Step 3  0B0      1F1
Step 4  0F2      1B1
Step 5  0B1      1F2
Step 6           1B2
Step 7  0B2
"""
    )
    assert str(Action(12, "W", 3)) == "12W3"


@pytest.mark.parametrize("name", SCHEDULES)
def test_grid_has_every_action_after_what_it_needs(name: str) -> None:
    made = schedule(name, 4, 8)
    lines = made.grid().splitlines()
    cells = {cell: step for step, line in enumerate(lines[1:]) for cell in line.split()[2:]}
    assert cells == {str(action): step for action, step in made.steps.items()}
    assert len(cells) == sum(map(len, made.actions))
    for action in made.steps:
        assert all(made.steps[need] < made.steps[action] for need in made.needs(action))
    # With all actions equal, a backward in one of them: 2 · (m + p - 1) steps of gpipe and of 1f1b.
    if name in ("gpipe", "1f1b"):
        assert len(lines) - 1 == 2 * (8 + 4 - 1)


@pytest.mark.parametrize(("name", "chunks"), CHUNKS)
def test_csv_round_trip(name: str, chunks: int | None, tmp_path: Path) -> None:
    made, path = schedule(name, 3, 6, chunks=chunks), tmp_path / "a schedule.csv"
    path.write_text(made.to_csv())
    read = schedule(None, 3, 6, csv=path)
    assert (read.name, read.placement, read.actions) == (str(path), made.placement, made.actions)
    assert read == schedule("gpipe", 3, 6, csv=str(path), chunks=chunks or SCHEDULES[name])


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_torch_reads_what_is_written_and_the_other_way_round(name: str, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules as theirs

    stages = [
        SimpleNamespace(stage_index=2 * v, num_stages=4, group_size=2, group_rank=0, submod=None, is_last=False)
        for v in range(2)
    ]
    torchs, path = getattr(theirs, name)(stages, 4), tmp_path / "theirs.csv"
    chosen = "format" in inspect.signature(torchs._dump_csv).parameters  # torch 2.9 writes no other form
    torchs._dump_csv(path, *["compute_only"] * chosen)  # with a blank cell wherever a rank waits
    ours = schedule("ours", 2, 4, csv=path)
    assert [[str(a) for a in row] for row in ours.actions] == [
        [str(a) for a in torchs.pipeline_order[rank] if a is not None] for rank in range(2)
    ]
    path.write_text(ours.to_csv())
    torchs._load_csv(path)
    assert [list(map(str, row)) for row in ours.actions] == [list(map(str, torchs.pipeline_order[r])) for r in range(2)]


@st.composite
def valid(draw: st.DrawFn) -> Schedule:
    """Any order that there is: at every turn some action that may run, whole or split backwards, on any placement."""
    stages, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    groups = draw(st.integers(1, stages))
    placement = (*range(groups), *(draw(st.integers(0, groups - 1)) for _ in range(stages - groups)))
    chance = random.Random(draw(st.integers(0, 2**32)))
    split = {(s, k): chance.random() < 0.5 for s in range(stages) for k in range(micro_batches)}
    left = {Action(s, kind, k) for s, k in split for kind in ("FIW" if split[s, k] else "FB")}
    rows: list[list[Action]] = [[] for _ in range(groups)]
    while left:

        def blocked(a: Action) -> bool:
            mine = (
                {Action(a.stage, "F", a.micro)}
                if a.kind in "BI"
                else {Action(a.stage, "I", a.micro)}
                if a.kind == "W"
                else {Action(a.stage - 1, "F", a.micro)}
            )
            after = {Action(a.stage + 1, kind, a.micro) for kind in "BI"} if a.kind in "BI" else set()
            return bool((mine | after) & left)

        action = chance.choice(sorted(a for a in left if not blocked(a)))
        left.remove(action)
        rows[placement[action.stage]].append(action)
    return Schedule("shuffled", placement, micro_batches, tuple(map(tuple, rows)))


@given(valid())
def test_any_order_in_which_nobody_waits_for_ever_passes(made: Schedule) -> None:
    check(made)
    replayed(made)


@given(valid(), st.data())
def test_corruptions_are_refused(made: Schedule, data: st.DataObject) -> None:
    rows = [list(row) for row in made.actions]
    group = data.draw(st.integers(0, made.groups - 1))
    place = data.draw(st.integers(0, len(rows[group]) - 1))
    action = rows[group][place]
    how = data.draw(st.sampled_from(["left out", "twice", "past", "moved", "too early", "other kind"]))
    if how == "left out":
        del rows[group][place]
    elif how == "twice":
        rows[group].insert(data.draw(st.integers(0, len(rows[group]))), action)
    elif how == "past":
        rows[group][place] = data.draw(
            st.sampled_from([action._replace(stage=made.stages), action._replace(micro=made.micro_batches)])
        )
    elif how == "moved":
        rows.append([rows[group].pop(place)])
    elif how == "too early":  # before its own forward, or after its own last
        rows[group].remove(action)
        mine = [i for i, a in enumerate(rows[group]) if (a.stage, a.micro) == (action.stage, action.micro)]
        rows[group].insert(mine[-1] + 1 if action.kind == "F" else mine[0], action)
    else:
        rows[group][place] = action._replace(kind={"F": "B", "B": "I", "I": "B", "W": "B"}[action.kind])
    with pytest.raises(SettingError):
        check(Schedule("corrupted", made.placement, made.micro_batches, tuple(map(tuple, rows))))


@given(valid(), st.integers(0, 2**32))
@settings(max_examples=200)
def test_a_deadlock_is_found_if_and_only_if_there_is_one(made: Schedule, seed: int) -> None:
    """Each group's own order is shuffled so that it is valid by itself; together they may wait for each other."""
    chance, rows = random.Random(seed), [list(row) for row in made.actions]
    for row in rows:
        for _ in range(2 * len(row)):
            i = chance.randrange(len(row))
            if i and not _ordered(made, row[i - 1], row[i]):
                row[i - 1], row[i] = row[i], row[i - 1]
    shuffled = Schedule("shuffled", made.placement, made.micro_batches, tuple(map(tuple, rows)))
    try:
        replayed(shuffled)
    except AssertionError:
        with pytest.raises(SettingError, match="deadlock|comes before"):
            check(shuffled)
    else:
        check(shuffled)


def _ordered(made: Schedule, first: Action, second: Action) -> bool:
    return (first.stage, first.micro) == (second.stage, second.micro) or first in made.needs(second)


def refused(
    tmp_path: Path, text: str | bytes, groups: int = 2, micro_batches: int = 2, chunks: int | None = None
) -> str:
    """The error about a file, without the path of the file."""
    path = tmp_path / "mine.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingError) as error:
        schedule("1f1b", groups, micro_batches, chunks=chunks, csv=path)
    assert str(error.value).startswith(str(path))
    return str(error.value).replace(str(path), "mine.csv")


def test_blank_cells_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("\ufeff" + GOOD.replace(",", " , ") + "\n\n", encoding="utf-8")
    assert schedule(None, 2, 2, csv=path).actions == schedule(None, 2, 2, csv=path).actions
    assert [list(map(str, row)) for row in schedule(None, 2, 2, csv=path).actions] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F1", "0X1", "row 1, cell 2: '0X1' is no action\n  legal: a computation"),
        ("0F1", "0F", "row 1, cell 2: '0F' is no action"),
        ("1F0", "0SEND_F1", "row 2, cell 2: '0SEND_F1' is no action: what is sent, gathered or overlapped follows"),
        ("1F0", "(1F0;0B0)OVERLAP_F_B", "row 2, cell 2: '(1F0;0B0)OVERLAP_F_B' is no action: what is sent"),
        ("0F1", "0F2", "row 1, cell 2: 0F2 is of micro-batch 2, and there are 2\n  legal: micro-batch 0 to 1"),
        ("1F0", "5F0", "row 2, cell 2: there is stage 5, but no action of stage 2\n  legal: every stage from 0 to 5"),
        ("0F1", "", "mine.csv: 0F1 is missing\n  legal: it stands among the actions of group 0"),
        ("1B1", "", "mine.csv: 1B1 is missing\n  legal: 1B1, or 1I1 and 1W1, among the actions of group 1"),
        ("0F1", "0F0", "row 1, cell 2: 0F0 is there twice, first at row 1, cell 1"),
        ("0F1", "1F1", "row 1, cell 2: 1F1 is given to group 0, but stage 1 lies on group 1"),
        ("0B0", "0I0", "row 1, cell 4: 0W0 is missing: 0I0 does a part of the backward\n  legal: 0B0, or 0I0 and 0W0"),
        ("0B0", "0W0", "row 1, cell 4: 0I0 is missing: 0W0 does a part of the backward\n  legal: 0B0, or 0I0 and 0W0"),
        ("0B0", "0B0,0W0", "row 1, cell 4: 0B0 is the whole backward, and 0W0 (row 1, cell 5) a part of it"),
        ("0B0", "0W0,0I0", "row 1, cell 4: 0W0 comes before 0I0 (row 1, cell 5), which it needs"),
        ("0F1,,0B0,0B1", "0B1,0B0,0F1", "row 1, cell 2: 0B1 comes before 0F1 (row 1, cell 4), which it needs"),
        ("1B1\n", "1B1\n2F0\n", "mine.csv: the schedule has 3 rows for 2 stages\n  legal: 2 rows"),
        ("1F0,1B0,1F1,1B1", ",,", "mine.csv: group 1 does nothing"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, GOOD.replace(old, new))


def test_stages_of_a_file_are_those_asked_for(tmp_path: Path) -> None:
    assert "there are 2 stages, and no action of stage 2\n  legal: 4 stages" in refused(tmp_path, GOOD, chunks=2)
    assert "row 2, cell 1: 2F0 is of stage 2, and there are 2" in refused(
        tmp_path, GOOD.replace("\n,1F0", "\n2F0,1F0"), chunks=1
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path, b"\xff\xfe\0")
    assert "has 0 rows for 2 stages" in refused(tmp_path, "")
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(SettingError, match="the schedule cannot be read"):
            schedule(None, 2, 2, csv=path)


def test_a_deadlock_names_the_two_that_wait_for_each_other(tmp_path: Path) -> None:
    assert refused(tmp_path, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n") == (
        "mine.csv, row 1, cell 2: deadlock: 0B0 and 1F1 wait for each other: 0B0 (row 1, cell 2) needs 1B0, which "
        "comes after 1F1; 1F1 (row 2, cell 2) needs 0F1, which comes after 0B0\n  legal: 1B0 before 1F1"
    )
    three = refused(tmp_path, "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2F2,2B0,2F1,2B2,2B1\n", 3, 3)
    assert (
        "1B0 and 2F2 wait for each other: 1B0 (row 2, cell 3) needs 2B0, which comes after 2F2; "
        "2F2 (row 3, cell 2) needs 1F2, which comes after 1B0" in three
    )
    by_way = refused(tmp_path, "0F0,0B0,0F1,0F2,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2F1,2B0,2F2,2B1,2B2\n", 3, 3)
    assert "0B0 and 1F1 wait for each other" in by_way  # 1B0 waits for 1F1, and 2F1 too, but they are in no circle


def test_a_deadlock_of_three() -> None:
    # Stage 2 of group 0 asks for stage 1 of micro-batch 1, and so on round: no two alone make the circle.
    rows = (
        "0F0 3F1 3B1 0F1 0F2 3F0 3B0 3F2 3B2 0B0 0B1 0B2",
        "1F0 4F0 1F1 1F2 4B0 4F1 4B1 4F2 4B2 1B0 1B1 1B2",
        "2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2",
    )
    actions = tuple(tuple(Action(int(a[0]), a[1], int(a[2])) for a in row.split()) for row in rows)
    with pytest.raises(SettingError, match="deadlock: .* by way of ") as error:
        check(Schedule("mine", (0, 1, 2, 0, 1, 2), 3, actions))
    assert error.value.source is not None and error.value.source.startswith("group ")


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (dict(name="1f1b", groups=3, micro_batches=2), "micro_batches=2 for 3 stages.*\n  legal: at least 3"),
        (dict(name="1f1b", groups=0, micro_batches=2), "stages=0\n  legal: a whole number"),
        (dict(name="gpipe", groups=2, micro_batches=2.0), "micro_batches=2.0\n"),
        (dict(name="gpipe", groups=2, micro_batches=True), "micro_batches=True\n"),
        (dict(name="zero_bubble", groups=2, micro_batches=2, chunks=0), "chunks=0\n"),
        (
            dict(name="gpipe", groups=2, micro_batches=2, chunks=2),
            "chunks=2 for scheduler='gpipe'\n  legal: chunks=1, or",
        ),
        (dict(name="zbv", groups=2, micro_batches=4, chunks=1), "chunks=1 for scheduler='zbv'\n  legal: chunks=2"),
        (dict(name="interleaved", groups=4, micro_batches=9), "2 rounds.*\n  legal: 8 or 10 .*, or any multiple of 4"),
        (dict(name="zero_bubble", groups=4, micro_batches=13), "3 rounds.*\n  legal: 12 or 15 micro-batches"),
        (dict(name="foo", groups=2, micro_batches=2), "scheduler='foo'\n  legal: 'gpipe', '1f1b', 'interleaved', "),
    ],
)
def test_settings_that_cannot_be(given_: dict, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        schedule(**given_)


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_the_numbers_that_are_offered_instead_are_legal(groups: int) -> None:
    for micro_batches in range(groups, 6 * groups):
        if not fits("interleaved", groups, micro_batches):
            with pytest.raises(SettingError) as error:
                schedule("interleaved", groups, micro_batches)
            words = str(error.value.legal).split()
            for offered in (int(words[0]), int(words[2])):
                assert schedule("interleaved", groups, offered).micro_batches == offered


def test_forwards_alone_refuses_what_cannot_be() -> None:
    for placement, micro_batches, message in (
        ((0, 1), 0, "micro_batches=0"),
        ((), 2, "there is no stage"),
        ((0, 2), 2, "group 1 does nothing"),
    ):
        with pytest.raises(SettingError, match=message):
            forward_only(placement, micro_batches)
    row = (Action(0, "F", 0), Action(0, "B", 0))
    with pytest.raises(SettingError, match="0B0 stands in a schedule of forwards alone"):
        check(Schedule("forward", (0,), 1, (row,)))
    with pytest.raises(SettingError, match="0X0 is of an unknown kind"):
        check(Schedule("mine", (0,), 1, ((Action(0, "X", 0),),)))


def test_no_schedule_needs_a_process_group_and_shardwright_imports_none() -> None:
    script = (
        "import sys, shardwright, shardwright.pipeline.schedules as s\n"
        "assert 'torch.distributed.pipelining' not in sys.modules\n"
        "s.schedule('1f1b', 2, 4), s.schedule('gpipe', 2, 4)\n"
        "assert 'torch.distributed.pipelining' not in sys.modules\n"
        "s.schedule('zbv', 2, 4)\n"
        "import torch.distributed\nassert not torch.distributed.is_initialized()\n"
    )
    fresh(script, check=True)
