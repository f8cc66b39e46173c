"""The registry of the zoo: what an entry is, batches, and losses.

Each builder returns a model in float64, inputs, a target, and a loss of what the model returns.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

os.environ.setdefault("HF_HUB_OFFLINE", "1")

__all__ = ["MODELS", "Built", "Model"]

#: How many rows a batch has, and how many tokens a row.
ROWS, LENGTH, VOCABULARY = 8, 8, 32


@dataclass
class Built:
    """A model, one batch and its loss: ``loss(net(*inputs, **kwargs), target)``."""

    net: nn.Module
    inputs: tuple
    loss: Callable[[Any, Any], Tensor]
    target: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """An entry of the zoo.

    Attributes:
        name: of the model.
        library: whose it is.
        build: makes it.
        note: what the table says of it besides.
        slow: whether its tests are long ones.
    """

    name: str
    library: str
    build: Callable[[], Built]
    note: str = ""
    slow: bool = False


MODELS: dict[str, Model] = {}


def library(name: str) -> Any:
    """A library, imported where a model is built of it.

    Raises:
        ImportError: it is not installed.
    """
    return importlib.import_module(name)


def model(library: str, note: str = "", slow: bool = False) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Enter a builder by its name."""

    def enter(build: Callable[[], Built]) -> Callable[[], Built]:
        name = build.__name__.strip("_")
        assert name not in MODELS, name
        MODELS[name] = Model(name, library, build, note, slow)
        return build

    return enter


# -- batches and losses ------------------------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, most: int = VOCABULARY, seed: int = 0) -> Tensor:
    return torch.randint(3, most, shape or (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def classes(count: int, rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(seed))


def next_token(output: Any, target: Tensor) -> Tensor:
    """Outside of the model, whose own loss is worked out in float32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def same_token(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def class_of(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output if isinstance(output, Tensor) else output.logits, target)


def squares(output: Any, target: Any = None) -> Tensor:
    """The mean squares of all outputs, each output with a weight of its own."""
    leaves = [
        x
        for x in pytree.tree_leaves(dict(output) if hasattr(output, "keys") else output)
        if isinstance(x, Tensor) and x.is_floating_point()
    ]
    return sum(((x + 0.1) ** 2).mean() * (i + 1) for i, x in enumerate(leaves))
