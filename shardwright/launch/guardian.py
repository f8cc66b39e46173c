"""The guardian of a run: a small process that ends the workers where the launcher was killed.

The launcher writes a line to the guardian's standard input whenever its workers change: the process ids of those that
run. The input ends with the launcher, however it ends.

    the last line is empty      the launcher had ended its workers: the guardian ends
    the last line has ids       the launcher was killed. Each worker gets SIGTERM, and SIGCONT in case it is stopped;
                                SIGKILL after the run's grace period

Example: of workers 4711 and 4712 the second is stopped, by a debugger or by Ctrl-Z, when the launcher is killed. Both
save and end. A signal of the kernel (``PR_SET_PDEATHSIG``) would stay pending at the second one, which is stopped, and
would give the first one no second signal.

The file runs as a script, without the package, and in a session of its own: no signal of the terminal reaches it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

__all__ = ["Guardian"]

_LOOK = 0.1  # seconds between two looks for workers that have not ended yet


class Guardian:
    """The guardian of one run, from the launcher's side. Used as a context.

    Args:
        grace: seconds that workers have to end after SIGTERM.
    """

    def __init__(self, grace: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def __enter__(self) -> Guardian:
        return self

    def __exit__(self, *exception: object) -> None:
        self.watched([])
        with contextlib.suppress(OSError):  # it is gone
            self._process.communicate()

    def watched(self, pids: Iterable[int]) -> None:
        """Tell the guardian which workers run."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone
            self._process.stdin.write(f"{' '.join(map(str, pids))}\n".encode())
            self._process.stdin.flush()


def _signalled(pids: Iterable[int], number: int) -> list[int]:
    """Send a signal to the process groups of workers; those that exist."""
    reached = []
    for pid in pids:
        with contextlib.suppress(OSError):
            os.killpg(pid, number)
            reached.append(pid)
    return reached


def main(grace: float) -> None:
    """Guard the workers that standard input names, until it ends."""
    last = ""
    for line in sys.stdin:
        last = line
    pids = [int(pid) for pid in last.split()]
    deadline = time.monotonic() + grace
    pids = _signalled(pids, signal.SIGTERM)
    _signalled(pids, signal.SIGCONT)
    while (pids := _signalled(pids, 0)) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    _signalled(pids, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
