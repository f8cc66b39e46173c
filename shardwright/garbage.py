"""Captures and plans without looking for cycles of objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["gc_paused"]


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Cycles are not looked for: what is made lives on, and all of it would be walked again and again (GPT-3 with
    stages="auto": 58 s without, 65 s with; its search within a limit: 5.5 s without, 6.7 s with)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
