"""The state of all random numbers of a process: the stream of programs that draw, and the generators of torch, of its
accelerator, of numpy and of Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ..runtime.random import stream

__all__ = ["generators", "restore_generators"]


def generators() -> dict[str, Any]:
    """The states of now."""
    state = {"stream": stream.state_dict(), "torch": torch.get_rng_state().numpy().tobytes(), "python": random.getstate(),
             "numpy": np.random.get_state(legacy=False)}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Go on with the states that `generators` has told; those that are not told of stay as they are."""
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "stream" in state:
        # The stream belongs to the seed of torch's generator, of which it takes a number: so before it and after it.
        kept = torch.get_rng_state()
        stream.load_state_dict(state["stream"])
        if "torch" in state:
            torch.set_rng_state(kept)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
