"""The lines of the scripts that run cases on the fake accelerator, each in a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import forked_python
import pytest
import torch
from paths import SUPPORT
from torch.utils import backend_registration


def needs_accelerators_in_python() -> None:
    """Skip the test where the version of torch has none."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip(f"torch {torch.__version__} has no accelerators that are written in Python")


def lines_of(script: str) -> dict[str, dict[str, Any]]:
    """Case -> its line.

    Args:
        script: the name of a file in `tests/support`.

    A version of torch that has no such accelerators skips the tests that ask.
    """
    needs_accelerators_in_python()
    made = forked_python.run([sys.executable, str(SUPPORT / script)], timeout=600)
    lines = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    assert made.returncode == 0, made.stderr[-3000:]
    return {line.pop("name"): line for line in lines}
