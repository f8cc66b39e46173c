"""What stages="auto" priced, the best first, and where it cut the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from ..plan.chosen import Alternative, Chosen
from .tables import table
from .units import size_text, time_text

__all__ = ["alternatives_of", "cuts_of"]

#: How many alternatives are shown.
MOST = 24


def alternatives_of(chosen: Chosen) -> Table:
    """A line for each that was priced; the first is the one that was taken."""
    made = table("priced", "devices a stage", "micro-batches", "recomputed", "a step", "more", "on a device", "",
                 right=("priced", "micro-batches", "recomputed", "a step", "more", "on a device"))
    for a in chosen.alternatives[:MOST]:
        seconds = "" if a.seconds is None else time_text(a.seconds)
        more = "" if a.seconds is None or not chosen.seconds else f"{a.seconds / chosen.seconds - 1:+.1%}"
        made.add_row(*map(Text, (f"{a.stages} stage{'s' * (a.stages > 1)}", _devices(a), str(a.micro_batches),
                                 str(a.recomputed) if a.recomputed else "", seconds, more,
                                 "" if a.peak is None else size_text(a.peak), a.why)))
    if len(chosen.alternatives) > MOST:
        made.add_row(f"and {len(chosen.alternatives) - MOST} more")
    return made


def cuts_of(chosen: Chosen) -> Iterator[str]:
    """A line for each stage: its modules, and whether they are computed again."""
    for s, stage in enumerate(chosen.stages):
        modules = [path for paths in chosen.paths[stage.first:stage.last] for path in paths if path]
        words = ", ".join(modules) if len(modules) <= 3 else f"{modules[0]} to {modules[-1]} ({len(modules)} modules)"
        yield f"stage {s} on {stage.devices} device{'s' * (stage.devices > 1)}: {words or 'the whole model'}" + \
            (", computed again in the backward" if stage.recompute else "")


def _devices(alternative: Alternative) -> str:
    """``4 x 8``: neighbours that have as many together."""
    runs = [(len(list(group)), devices) for devices, group in groupby(alternative.devices)]
    return ", ".join(f"{count} x {devices}" if count > 1 else str(devices) for count, devices in runs)
