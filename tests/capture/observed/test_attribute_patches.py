"""The methods of `nn.Module` are replaced once for the runs of a capture, in the thread that captures, and put back."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture.export import capture
from shardwright.capture.observed import attribute_patches
from shardwright.capture.observed.attribute_patches import module_attributes, module_calls, modules_patched
from shardwright.capture.recapture import ModelPrograms
from shardwright.errors import CaptureError


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Failing(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        raise CaptureError("no forward")


class Around(Scaled):
    """A model whose forward captures another model."""

    def forward(self, x: Tensor) -> Tensor:
        capture(Scaled(), (torch.zeros(2, 4),))
        return super().forward(x)


class Names:
    """An observer that lists names of attributes."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.assigned: list[str] = []

    def attribute_read(self, obj: object, name: str) -> None:
        self.read.append(name)

    def attribute_assigned(self, obj: object, name: str, by_torch: bool) -> None:
        self.assigned.append(name)


@pytest.fixture(autouse=True)
def methods_put_back() -> Any:
    before = dict(vars(nn.Module))
    yield
    assert dict(vars(nn.Module)) == before
    assert not attribute_patches._observers and not attribute_patches._callers


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Receives an entry each time that the methods are replaced."""
    made: list[object] = []
    plain = attribute_patches._module_methods

    def counted() -> Any:
        made.append(None)
        return plain()

    monkeypatch.setattr(attribute_patches, "_module_methods", counted)
    return made


@pytest.mark.parametrize("sizes", [(2,), (2, 3, 5)])
def test_one_patch_for_all_runs_of_a_capture(patches: list[object], sizes: tuple[int, ...]) -> None:
    """A model is exported and run once more; at further sizes it is run."""
    net, programs = Scaled(), ModelPrograms()
    for rows in sizes:
        capture(net, (torch.zeros(rows, 4),), programs=programs)
    assert len(patches) == len(sizes)


def test_after_an_error(patches: list[object]) -> None:
    with pytest.raises(CaptureError, match="no forward"):
        capture(Failing(), (torch.zeros(2, 4),))
    assert len(patches) == 1


def test_a_capture_inside_of_a_capture() -> None:
    net = Around()
    with module_attributes(around := Names()):
        with contextlib.suppress(CaptureError):  # torch may refuse an export inside of an export
            capture(net, (torch.zeros(2, 4),))
        net.scale = 3.0
        assert net.scale == 3.0
    assert around.read[-1] == "scale" and around.assigned[-1] == "scale"


def test_threads_share_the_patch() -> None:
    """The thread that ends last puts the methods back; each sees its own reads."""
    net, ours, theirs = Scaled(), Names(), Names()
    entered, ended = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with modules_patched(), module_attributes(theirs):
            entered.set()
            ended.wait(60)
            assert net.linear is not None

    thread = threading.Thread(target=elsewhere)
    plain = nn.Module.__call__
    with modules_patched(), module_attributes(ours):
        thread.start()
        assert entered.wait(60)
        assert net.scale == 2.0
        assert nn.Module.__call__ is not plain
    assert nn.Module.__call__ is not plain and "__getattribute__" in vars(nn.Module)
    ended.set()
    thread.join()
    assert ours.read == ["scale"] and theirs.read == ["linear"]


def test_a_caller_makes_the_calls_of_its_thread() -> None:
    net, called = Scaled(), []

    def enter(call: Any, module: nn.Module, *args: Any) -> Any:
        called.append(type(module).__name__)
        return call(module, *args)

    with module_calls(enter):
        net(torch.zeros(2, 4))
        thread = threading.Thread(target=net, args=(torch.zeros(2, 4),))
        thread.start(), thread.join()
    net(torch.zeros(2, 4))
    assert called == ["Scaled", "Linear"]
