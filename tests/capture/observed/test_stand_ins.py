"""Stand-ins for functions of Python while a model is captured: none of them stays anywhere, and none keeps a model."""

from __future__ import annotations

import copy
import gc
import sys
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import fresh
from torch import nn

from shardwright.capture.export import capture


class Imports(nn.Module):
    """A model whose forward imports a module that nobody has imported before."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import imported_meanwhile

        return self.fc(x) * imported_meanwhile.SCALE


def test_a_module_that_is_imported_meanwhile_has_the_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A stand-in that the module has out of reach, as a module that is written in C has it, holds no model."""
    (tmp_path / "imported_meanwhile.py").write_text(
        "import copy\nfrom copy import deepcopy\nfrom uuid import uuid4\nSCALE, KEPT = 2, [copy.copy]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    request.addfinalizer(lambda: sys.modules.pop("imported_meanwhile"))
    net = Imports()
    capture(net, (torch.zeros(4, 8),))
    made: Any = sys.modules["imported_meanwhile"]
    assert made.deepcopy is copy.deepcopy and made.uuid4 is uuid.uuid4
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None and made.KEPT[0] is not copy.copy and made.KEPT[0]([1]) == [1]


FIRST = """
import gc, weakref, torch
from torch import nn
from shardwright.capture.export import capture

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).relu()

net = Net()
reference = weakref.ref(net)
capture(net, (torch.zeros(4, 8),))
del net
gc.collect()
print(reference() is None)
"""


def test_the_first_model_of_a_process_can_be_freed() -> None:
    """torch imports much of itself in a first capture."""
    done = fresh(FIRST, timeout=600, check=True)
    assert done.stdout == "True\n", done.stderr
