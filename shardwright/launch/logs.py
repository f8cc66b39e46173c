"""The logs of a run: what the coordinator writes, and the last lines of what a worker wrote."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator

from shardwright.launch.settings import RunSettings

__all__ = ["coordinator_log", "last_lines", "logger", "remove_restarts"]

logger = logging.getLogger("shardwright.launch")

# Enough for twenty long lines; a log of gigabytes is not read to show its end.
TAIL_BYTES = 64 * 1024


@contextlib.contextmanager
def coordinator_log(path: str) -> Iterator[None]:
    """Send everything this process writes to its standard error into a fresh file, and log there.

    The descriptor itself is redirected, not only the loggers: torch's sockets and stores warn from C++.
    """
    sys.stderr.flush()
    with open(path, "wb"):
        pass
    # Appending, so that a background run, whose standard output is this same file, writes between, not over.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    terminal = os.dup(2)
    handler = logging.FileHandler(path, mode="a")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    os.dup2(descriptor, 2)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(descriptor)


def last_lines(path: str, count: int = 20) -> list[str]:
    """The last lines of a text file; none if it is empty or not there.

    Of a line that was written over and over, as progress bars are, the last state is kept.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = text.rstrip().split("\n") if text.strip() else []
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-count:]]


def remove_restarts(settings: RunSettings) -> None:
    """Remove what this node's workers wrote after restarts of an earlier run, lest it be taken for this one's."""
    names = [re.fullmatch(r"restart_([1-9]\d*)", name) for name in os.listdir(settings.log_dir)]
    for attempt in [int(name[1]) for name in names if name]:
        for rank in settings.ranks:
            with contextlib.suppress(OSError):
                os.remove(settings.worker_log(rank, attempt))
        with contextlib.suppress(OSError):  # another node's, or a user's own file, is still there
            os.rmdir(settings.attempt_dir(attempt))
