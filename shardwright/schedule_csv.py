"""Schedules of a pipeline as CSV files: a row for each group of devices, an action in each cell, empty cells allowed.

As torch.distributed.pipelining writes them, with computations alone: ``0F0,0F1,,0B0,0B1``.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

from .errors import SettingError
from .schedules import LEGAL, Action, Schedule, check_placed

__all__ = ["action_of", "read"]

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

#: What torch may write beside computations.
_OTHERS = re.compile(r"UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB]|OVERLAP_F_B")


def read(path: Path, groups: int, micro_batches: int, chunks: int | None) -> Schedule:
    """The schedule of a file.

    Args:
        groups: how many rows it has.
        chunks: how many stages a group has; None: what the file has.

    Raises:
        SettingError: a file that cannot be read, another number of rows, a cell that is no action, a stage without
            actions, or what `schedules.check` finds, with its row and cell.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingError(f"the schedule cannot be read: {getattr(error, 'strerror', None) or error}",
                           source=str(path), legal="a CSV file with a row for each group of devices") from error
    if len(rows) != groups:
        raise SettingError(f"the schedule has {len(rows)} rows for {groups} stages", source=str(path),
                           legal=f"{groups} rows, one for each group of devices")
    cells = [[(number, text.strip()) for number, text in enumerate(row, 1) if text.strip()] for row in rows]
    where = lambda group, place: f"{path}, row {group + 1}, cell {cells[group][place][0]}"  # noqa: E731
    actions = [tuple(action_of(text, where(group, place)) for place, (_, text) in enumerate(row))
               for group, row in enumerate(cells)]
    counts: dict[int, Counter[int]] = {}  # of every stage, how many of its actions stand where: one may have strayed
    for group, row in enumerate(actions):
        for action in row:
            counts.setdefault(action.stage, Counter())[group] += 1
    stages = groups * chunks if chunks is not None else len(counts)
    missing = next((stage for stage in range(stages) if stage not in counts), None)
    if missing is not None:
        past = next((where(group, place) for group, row in enumerate(actions) for place, action in enumerate(row)
                     if action.stage > missing), str(path))
        last = max(counts, default=0)
        raise SettingError(f"there is stage {last}, but no action of stage {missing}" if last > missing else
                           f"there are {len(counts)} stages, and no action of stage {missing}", source=past,
                           legal=f"every stage from 0 to {max(last, stages - 1)}" if chunks is None else
                                 f"{stages} stages, chunks={chunks} for each of {groups}")
    placement = tuple(counts[stage].most_common(1)[0][0] for stage in range(stages))
    out = Schedule(str(path), placement, micro_batches, tuple(actions))
    check_placed(out, where, True, str(path))
    return out


def action_of(text: str, source: str) -> Action:
    """The action of a cell."""
    found = _ACTION.fullmatch(text)
    if found is None:
        why = ": what is sent, gathered or overlapped follows from the computations" if _OTHERS.search(text) else ""
        raise SettingError(f"{text!r} is no action{why}", source=source, legal=LEGAL)
    return Action(int(found[1]), found[2], int(found[3]))
