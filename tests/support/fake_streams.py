"""Streams and events of a device that is not there: what is queued runs at once, and the order is written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright import accelerators


class FakeStreams:
    """The module of an accelerator that tensors of the CPU are taken to lie on.

    Attributes:
        log: what streams and events were asked, in order.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._on = ["compute"]
        self._made = 0

    def current_stream(self, device: Any = None) -> Any:
        return self._stream(self._on[-1])

    def Stream(self, device: Any = None) -> Any:
        return self._stream("side")

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.log.append(f"{name} waits for {event.name}"),
        )

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._on.append(stream.name)
        yield
        self._on.pop()

    def Event(self) -> Any:
        self._made += 1
        name = f"e{self._made}"
        return SimpleNamespace(
            name=name,
            record=lambda stream=None: self.log.append(f"{name} on {stream.name if stream else self._on[-1]}"),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
            query=lambda: True,
        )


@contextlib.contextmanager
def on_fake_streams(*modules: Any) -> Iterator[FakeStreams]:
    """Let modules that ask `accelerators` take the CPU for an accelerator."""
    made = FakeStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "module_of", lambda device: made)
        plain = torch.empty

        def empty(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
            if pin_memory:
                made.log.append("pinned memory")
            return plain(*given, **named)

        patch.setattr(torch, "empty", empty)
        for module in (accelerators, *modules):
            patch.setattr(module, "is_accelerator", lambda device: True)
        yield made
