"""The interpreter during captures and plans: garbage collection paused, and room for the frames of calls.

CPython 3.11 and later keeps the frames of a thread in chunks of 16 KiB. A call that does not fit asks the kernel for a
chunk, and its return gives the chunk back: a page fault and two system calls for each call that a loop makes at the end
of a chunk. Where the end of a chunk lies depends on the depth of the caller's stack: a plan of two layers of GPT-3 on
16,384 devices took 7.5 s from one depth and 16 s from another, half of it in the kernel.

A frame that is larger than a chunk gets a chunk of the next power of two. `roomy_stack` calls a function from a frame
of 320 KB, so the frames of all that the function calls share the rest of a chunk of 512 KiB. The kernel gives
memory only to the pages that are used.

Example: a frame of 40,000 words of 8 bytes has 320,000 bytes. It does not fit in a chunk of 256 KiB (262,144 bytes), so
the chunk has 524,288 bytes, and 204,288 bytes are free for the frames of the calls.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["gc_paused", "roomy_stack"]

#: Words of the large frame.
STACK_WORDS = 40_000

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the search for cycles inside the ``with`` block.

    Objects of a capture or a plan stay alive, and each search would walk all of them again (GPT-3 with stages="auto":
    58 s without the search, 65 s with it; its search within a limit: 5.5 s without, 6.7 s with).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def roomy_stack(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs with room for the frames of its calls.

    One call costs some 30 microseconds more, so the decorator is for captures, plans and searches, not for steps.

    Args:
        function: the function to run.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    if sys.version_info >= (3, 11):  # earlier interpreters allocate each frame by itself
        call.__code__ = call.__code__.replace(co_stacksize=STACK_WORDS)
    return wraps(function)(call)
