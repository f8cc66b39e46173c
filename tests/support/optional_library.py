"""Optional libraries of tests, imported where a test first reads of one.

Every process of pytest-xdist imports every test file. An import of a large library there takes its seconds in each, and
its thousands of modules and classes then cost something in each capture and in each fork of a rank.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

__all__ = ["OptionalLibrary"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class OptionalLibrary:
    """A library in the place of its module; a test that reads of it is skipped where it is not installed.

    Args:
        name: its module, or one of this package that imports it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("pytestmark", "setup", "teardown"):  # pytest asks each name of a file so
            raise AttributeError(name)
        return getattr(self.load(), name)

    def load(self) -> Any:
        """The module itself, imported."""
        pytest.importorskip(self._name, exc_type=ImportError)
        return importlib.import_module(self._name)
