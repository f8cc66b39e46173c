"""Placement of a checkpoint's tensors under the strategies of another run, and the boxes that each of its ranks writes.

    a parameter                                     placed by its strategy
    optimizer state of a parameter's shape          placed as the parameter
    a buffer, other optimizer state                 whole; written by the first of the ranks that have it

Among ranks that hold the same slice, `tensor_files.written_boxes` picks the writer, as in a save of that run.

Example: ``fc.weight`` [32, 16], cut 4 ways along dim 0. Rank 1 writes the box of rows 8 to 16, and the same box of
``optimizer.fc.weight.exp_avg``. Rank 0 alone writes ``optimizer.fc.weight.step``, which is one number.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..json_files.json_values import dtype_named
from ..layout import Layout
from ..planfile.parameter_file import ParameterStrategies, TensorStorage
from .manifest import TensorEntry
from .run_state import Box, LocalTensor, TensorPlacement
from .tensor_files import written_boxes

__all__ = ["TargetPlacement", "boxes_of", "one_device", "placed", "strategy_name"]


class TargetPlacement(NamedTuple):
    """The placement of one tensor.

    Attributes:
        storage: shape, dtype, layout and ranks.
        alone: True where the first of its ranks alone writes it.
        per_rank: True where each rank has its own value, stacked along dim 0.
    """

    storage: TensorStorage
    alone: bool
    per_rank: bool

    @property
    def described(self) -> tuple[tuple[int, ...], str, dict[str, object] | None]:
        """Shape, dtype and layout, in the form in which a save describes a tensor."""
        storage = self.storage
        return (
            storage.shape,
            storage.dtype,
            TensorPlacement(storage.shape, storage.layout, storage.first, self.per_rank, None, ()).encoded,
        )


def strategy_name(name: str) -> str | None:
    """The name of a parameter or buffer in strategies, from its checkpoint name; None for optimizer state."""
    return None if name.startswith("optimizer.") else name.removeprefix("model.")


def one_device(entries: Mapping[str, TensorEntry]) -> ParameterStrategies:
    """The strategies of one device that has everything whole."""
    named = {strategy_name(name): entry for name, entry in entries.items()}
    return ParameterStrategies(
        1,
        {
            name: TensorStorage(e.shape, e.dtype, Layout.replicated(1, len(e.shape)))
            for name, e in named.items()
            if name is not None
        },
        {},
    )


def placed(
    entries: Mapping[str, TensorEntry], strategies: ParameterStrategies, source: str
) -> dict[str, TargetPlacement]:
    """The placement of each tensor of a checkpoint under `strategies`.

    Args:
        entries: the checkpoint's tensors, by name.
        strategies: the strategies of the other run.
        source: the checkpoint, as errors name it.

    Raises:
        CheckpointError: strategies of another model: names or shapes differ.
    """
    storages = strategies.all
    mine = {known: entry for name, entry in entries.items() if (known := strategy_name(name)) is not None}
    absent, unknown = [n for n in strategies.parameters if n not in mine], [n for n in mine if n not in storages]
    other = [n for n in mine if n in storages and storages[n].shape != mine[n].shape]
    if absent or unknown or other:
        wrong = [f"it has no {_some(absent)}"] * bool(absent) + [f"they have no {_some(unknown)}"] * bool(unknown)
        wrong += [f"{n!r} is {list(mine[n].shape)} in it and {list(storages[n].shape)} in them" for n in other[:3]]
        near = [n for name in unknown[:1] for n in difflib.get_close_matches(name, absent, 1, 0.6)]
        raise CheckpointError(
            f"the strategies {strategies.source} are of another model than the checkpoint: "
            + "; ".join(wrong)
            + (f" (is {near[0]!r} what {unknown[0]!r} was?)" if near else ""),
            source=source,
            legal="a plan, or strategies, of the model that was saved",
        )
    out = {}
    for name, entry in entries.items():
        called = strategy_name(name)
        storage = storages[called] if called is not None else _of_state(name, entry, strategies, source)
        parameter = strategies.parameters.get(called or name.removeprefix("optimizer.").rpartition(".")[0])
        alone = parameter is None or parameter.shape != storage.shape
        out[name] = TargetPlacement(replace(storage, dtype=entry.dtype), alone, bool((entry.layout or {}).get("own")))
    return out


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _of_state(name: str, entry: TensorEntry, strategies: ParameterStrategies, source: str) -> TensorStorage:
    """The placement of a tensor of an optimizer's state: ``optimizer.<parameter>.<key>``."""
    parameter = name.removeprefix("optimizer.").rpartition(".")[0]
    if parameter not in strategies.parameters:
        raise CheckpointError(
            f"{name!r} is of no parameter that {strategies.source} has",
            source=source,
            legal="a plan, or strategies, of the model that was saved",
        )
    storage = strategies.parameters[parameter]
    if storage.shape == entry.shape:
        return storage
    whole = Layout.replicated(storage.layout.devices, len(entry.shape))
    return TensorStorage(entry.shape, entry.dtype, whole, storage.first)


def boxes_of(places: Mapping[str, TargetPlacement], rank: int) -> list[tuple[str, Box]]:
    """The boxes that a rank writes, as a save of that run would: name and box, in the order of the tensors."""
    tensors = []
    for name, (storage, alone, per_rank) in places.items():
        box, holders = storage.of_rank(rank)
        if holders and (not alone or rank == storage.first):
            local = torch.empty([s.stop - s.start for s in box], dtype=dtype_named(storage.dtype), device="meta")
            place = TensorPlacement(
                storage.shape, storage.layout, storage.first, per_rank, box, (rank,) if alone else holders
            )
            tensors.append(LocalTensor(name, storage.dtype, place, local))
    return [
        (w.name, tuple(slice(a, a + n) for a, n in zip(w.starts, w.tensor.shape))) for w in written_boxes(tensors, rank)
    ]
