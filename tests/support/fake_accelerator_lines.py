"""The lines of the scripts that run cases on the fake accelerator, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from paths import ROOT
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
    made = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [json.loads(line) for line in made.stdout.splitlines() if line.startswith("{")]
    assert made.returncode == 0, made.stderr[-3000:]
    return {line.pop("name"): line for line in lines}
