"""The storage of parameters as a file of its own: a line per parameter, with whole shape, dtype and storage layout.

    {"name": "up.weight", "shape": [4096, 1024], "dtype": "float32", "storage": [4, 1]}

Example: on 4 devices this line stores rows 0 to 1023 on rank 0, and so on to rows 3072 to 4095 on rank 3.

A layout is spelt as in a plan's document (`encoding.spell_layout`). In a pipeline a line also has the ranks that hold
the parameter, ``"ranks": "4-7"``, and its layout is over these ranks. Buffers have lines of their own. Where some cut
does not divide its dim, the head has ``"uneven": true``.

A model that loads such a file stores its parameters accordingly; a checkpoint is cut accordingly without any model.
Unlike a plan's document, the file has no strategies of operators and no graph.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from ..cluster import MOST_DEVICES
from ..errors import LayoutError, PlanError, SettingError, ShardwrightError, shown
from ..graph import Graph, Value
from ..json_files.json_reader import check_fields, read_object
from ..json_files.json_values import dtype_name, dtype_named, is_shape, write_text
from ..layout import Layout
from ..partition.padded_dims import is_stored_padded, true_slice
from ..pipeline.pipeline_plan import PipelinePlan, StageParameter
from ..sharded_plan import Plan
from . import load_plan
from .document_writer import fields_of, section
from .encoding import read_layout, spell_layout
from .plan_document import DocumentLine, read_lines

__all__ = ["ParameterStrategies", "TensorStorage", "as_parameter_strategies"]

#: The version of the format. It rises when files of the old format can no longer be read with their old meaning.
SCHEMA = 1

#: The value of the head's "kind".
KIND = "parameter strategies"

FIELDS = {"schema", "kind", "devices", "uneven", "parameters", "buffers"}

#: A part of a tensor, one slice a dim.
Box: TypeAlias = tuple[slice, ...]

_LEGAL = "a file that save_param_strategy_file wrote, or a plan"


@dataclass(frozen=True)
class TensorStorage:
    """The storage of one parameter or buffer.

    Attributes:
        shape: the shape of the whole tensor.
        dtype: such as "float32".
        layout: the layout over the ranks that hold it.
        first: the first of these ranks, in the world.
        where: the line of the file that defines it, or "".
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    first: int = 0
    where: str = field(default="", compare=False)

    @property
    def ranks(self) -> range:
        """The ranks that hold it, in the world."""
        return range(self.first, self.first + self.layout.devices)

    def slice(self, rank: int) -> tuple[slice, ...]:
        """The part of the whole that is stored on `rank`; empty slices where `rank` does not hold it."""
        if rank not in self.ranks:
            return (slice(0, 0),) * len(self.shape)
        return true_slice(self.layout, self.shape, rank - self.first)

    def of_rank(self, rank: int) -> tuple[Box, tuple[int, ...]]:
        """The part that is stored on `rank`, and the ranks that hold the same part, ascending.

        No ranks are returned where the part is empty.
        """
        if rank not in self.ranks:
            return self.slice(rank), ()
        box, ranks = _by_rank(self.layout, self.shape)[rank - self.first]
        return box, tuple(self.first + r for r in ranks)

    @property
    def boxes(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """The different parts, none of them empty, each with the ranks that hold it, ascending.

        A tensor without elements has one part.
        """
        return tuple(
            (box, tuple(self.first + rank for rank in ranks)) for box, ranks in _boxes(self.layout, self.shape)
        )


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """The value of `TensorStorage.boxes`, for ranks from 0 on.

    Cached: parameters and their optimizer state share few layouts and shapes.
    """
    found: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in range(layout.devices):
        box = true_slice(layout, shape, rank)
        if all(s.stop > s.start for s in box) or (0 in shape and not found):
            found.setdefault(tuple((s.start, s.stop) for s in box), []).append(rank)
    return tuple((tuple(slice(*bounds) for bounds in box), tuple(ranks)) for box, ranks in found.items())


@dataclass(frozen=True)
class ParameterStrategies:
    """The storage of a model's parameters.

    Attributes:
        devices: the number of devices, in all.
        parameters, buffers: by name; tied ones under their first name.
        path: the file they were read from, or None.
        plan: the fingerprint of the plan they were taken from, or None.
    """

    devices: int
    parameters: dict[str, TensorStorage]
    buffers: dict[str, TensorStorage]
    path: Path | None = field(default=None, compare=False)
    plan: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, plan: Plan | PipelinePlan, path: Path | None = None) -> ParameterStrategies:
        """The storage of a plan's parameters."""

        def stored(values: Mapping[str, Value]) -> Iterator[tuple[str, TensorStorage]]:
            for name, value in values.items():
                sharding = plan.parameters.get(name)
                if sharding is not None:
                    first = sharding.ranks.start if isinstance(sharding, StageParameter) else 0
                    yield (
                        name,
                        TensorStorage(
                            tuple(value.shape),
                            str(value.stored.dtype).removeprefix("torch."),
                            sharding.storage,
                            first,
                            str(path or ""),
                        ),
                    )

        return cls(
            plan.devices, dict(stored(plan.graph.parameters)), dict(stored(plan.graph.buffers)), path, plan.fingerprint
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ParameterStrategies:
        """Read a file of parameter strategies, or the parameters of a saved plan.

        Raises:
            PlanError: no such file, not of this kind, an invalid line, or two lines for one name.
            LayoutError: a layout that does not fit the tensor.
        """
        path = Path(path)
        text, encoded = read_object(path, PlanError, "the file of parameters' strategies", _LEGAL, edited=True)
        if encoded.get("kind") != KIND:
            if "schema" not in encoded or "kind" in encoded:
                raise PlanError("neither parameters' strategies nor a plan", source=str(path), legal=_LEGAL)
            return cls.of(load_plan(path), path)
        if type(encoded.get("schema")) is not int or encoded["schema"] != SCHEMA:
            raise PlanError(
                f"parameters' strategies of schema {shown(encoded.get('schema'))}",
                source=str(path),
                legal=f"schema {SCHEMA}, or the version of Shardwright that wrote it",
            )
        check_fields(encoded, FIELDS, PlanError, "the file", str(path))
        devices = encoded.get("devices")
        if type(devices) is not int or not 1 <= devices <= MOST_DEVICES:
            raise PlanError(
                f"devices: {shown(devices)}", source=str(path), legal=f"a whole number from 1 to {MOST_DEVICES:,}"
            )
        uneven = encoded.get("uneven", False)
        if not isinstance(uneven, bool):
            raise PlanError(f"uneven: {shown(uneven)}", source=str(path), legal="true or false")
        made = []
        for name in ("parameters", "buffers"):
            lines = read_lines(path, text, encoded.get(name, [] if name == "buffers" else None), name)
            made.append({line.name: _storage(line, devices, uneven) for line in lines.values()})
        twice = next((name for name in made[1] if name in made[0]), None)
        if twice is not None:
            raise PlanError(f"{twice!r} is a parameter too", source=made[1][twice].where, legal="one line")
        return cls(devices, made[0], made[1], path)

    def save(self, path: str | Path) -> None:
        """Write the file: the same text for the same layouts.

        Raises:
            PlanError: it cannot be written.
        """
        write_text(path, self.text(), PlanError, "the parameters' strategies")

    def text(self) -> str:
        """The text of the file."""
        head: dict[str, object] = {"schema": SCHEMA, "kind": KIND, "devices": self.devices}
        if any(s.layout.padded(s.shape) != s.shape for s in self.all.values()):
            head["uneven"] = True
        parts = [*fields_of(head, "  "), section("parameters", self._lines(self.parameters))]
        if self.buffers:
            parts.append(section("buffers", self._lines(self.buffers)))
        return "{\n" + ",\n".join(parts) + "\n}\n"

    def _lines(self, table: Mapping[str, TensorStorage]) -> Iterator[dict[str, object]]:
        for name, storage in table.items():
            line: dict[str, object] = {
                "name": name,
                "shape": list(storage.shape),
                "dtype": storage.dtype,
                "storage": spell_layout(storage.layout),
            }
            if len(storage.ranks) != self.devices:
                line["ranks"] = f"{storage.ranks[0]}-{storage.ranks[-1]}"
            yield line

    @property
    def all(self) -> dict[str, TensorStorage]:
        """Parameters and buffers."""
        return self.parameters | self.buffers

    @property
    def source(self) -> str:
        """The file's name in errors."""
        return str(self.path or "the strategies")

    # -- on a model --

    def onto(
        self, graph: Graph, devices: int, groups: int | str, stored: Mapping[str, Layout] | None, uneven: bool = False
    ) -> dict[str, Layout]:
        """The fixed storage of a captured model's parameters.

        Args:
            graph: the captured model.
            devices: the number of devices.
            groups: the number of device groups of the pipeline; 1 without a pipeline, or "auto".
            stored: parameters whose storage is fixed already.
            uneven: True where cuts need not divide.

        Raises:
            PlanError: strategies for another model or another number of devices, with the line; or a parameter whose
                fixed storage is another one.
            LayoutError: a cut that does not divide, and must; a buffer that is cut.
            SettingError: the stages are still to be chosen.
        """
        if groups == "auto":
            raise SettingError(
                f'{self.source} says where parameters lie, and stages="auto" is to choose it',
                legal="stages=" + str(len({line.first for line in self.parameters.values()})),
            )
        if self.devices != devices:
            raise PlanError(
                f"the parameters' strategies are for {self.devices} devices, there are {devices}",
                source=self.source,
                legal=f"those of {devices} devices, or {self.devices} devices",
            )
        self.check_names(graph.parameters, graph.buffers)
        for name, line in self.all.items():
            value = graph.parameters.get(name) or graph.buffers[name]
            if len(line.ranks) * groups != devices:
                raise PlanError(
                    f"the line is of {len(line.ranks)} of {self.devices} devices, and the model is cut into "
                    f"{groups} stage{'s' * (groups != 1)}",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    legal=f"ranks of one stage: {devices // int(groups)} devices",
                )
            dtype = str(value.stored.dtype).removeprefix("torch.")
            if (tuple(value.shape), dtype) != (line.shape, line.dtype):
                raise PlanError(
                    f"the line is of {line.dtype}{list(line.shape)}, the model has {dtype}{list(value.shape)}: "
                    "strategies of another model?",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    legal="a file made for this model",
                )
            if not uneven and line.layout.padded(line.shape) != line.shape:
                raise LayoutError(
                    f"cuts {line.layout.cuts} that do not divide {line.shape}",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    legal="cuts that do, or AutoParallel(…, uneven=True)",
                )
            if not is_stored_padded(line.layout, line.shape):
                raise LayoutError(
                    f"cuts {line.layout.cuts} that do not divide {line.shape}, by several digits of the rank",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    legal="cuts that divide, or neighbouring axes in their order",
                )
            if name in self.buffers and not line.layout.is_replicated:
                raise LayoutError(
                    f"cuts {line.layout.cuts} of a buffer",
                    operator=f"the buffer {name!r}",
                    source=line.where,
                    legal=f"the whole of it: {[1] * len(line.shape)}",
                )
            if stored is not None and stored.get(name, line.layout) != line.layout:
                raise PlanError(
                    f"it is stored as {stored[name]} already",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    legal="the layout that it has, or a model that is not cut yet",
                )
        return {**(stored or {}), **{name: line.layout for name, line in self.parameters.items()}}

    def check_names(
        self, parameters: Sequence[str] | Mapping[str, object], buffers: Sequence[str] | Mapping[str, object]
    ) -> None:
        """Check that every line names a parameter or buffer of a model.

        Raises:
            PlanError: the first line that does not, with its place.
        """
        for table, names, what in ((self.parameters, parameters, "parameter"), (self.buffers, buffers, "buffer")):
            for name, line in table.items():
                if name not in names:
                    near = difflib.get_close_matches(name, list(names), 3, 0.0)
                    raise PlanError(
                        f"the model has no {what} {name!r}: strategies of another model?",
                        source=line.where,
                        legal=", ".join(near) or "no such line",
                    )

    def check_stored(self, plan: Plan | PipelinePlan) -> None:
        """Check that a plan stores every parameter as its line says.

        Raises:
            PlanError: the first parameter that it stores otherwise, with its line.
        """
        made = ParameterStrategies.of(plan).parameters
        for name, line in self.parameters.items():
            if made[name] != line:
                other = made[name]
                on = f" on ranks {other.ranks[0]}-{other.ranks[-1]}" if len(other.ranks) != plan.devices else ""
                raise PlanError(
                    f"the plan cannot store it so, but as {other.layout}{on}",
                    operator=f"the parameter {name!r}",
                    source=line.where,
                    strategy=str(line.layout),
                    legal="that layout, or no line for it",
                )


def as_parameter_strategies(
    strategies: ParameterStrategies | str | os.PathLike[str] | None,
) -> ParameterStrategies | None:
    """The given strategies, or those of a path; None for None.

    Raises:
        ShardwrightError: the file holds no strategies.
    """
    return (
        strategies
        if strategies is None or isinstance(strategies, ParameterStrategies)
        else ParameterStrategies.read(strategies)
    )


@lru_cache(maxsize=4096)
def _by_rank(layout: Layout, shape: tuple[int, ...]) -> dict[int, tuple[Box, tuple[int, ...]]]:
    """The value of `TensorStorage.of_rank` for each rank, for ranks from 0 on."""
    nothing: tuple[Box, tuple[int, ...]] = ((slice(0, 0),) * len(shape), ())
    return dict.fromkeys(range(layout.devices), nothing) | {
        rank: (box, ranks) for box, ranks in _boxes(layout, shape) for rank in ranks
    }


def _storage(line: DocumentLine, devices: int, uneven: bool) -> TensorStorage:
    """The storage that a line describes.

    Raises:
        PlanError, LayoutError: an invalid value, with the line's place.
    """
    encoded, parameter = line.encoded, f"the parameter {shown(line.name)}"
    shape = encoded.get("shape")
    if not is_shape(shape):
        raise PlanError(f"shape: {shown(shape)}", operator=parameter, source=line.where, legal="such as [784, 512]")
    try:
        dtype = dtype_name(dtype_named(encoded.get("dtype")))
    except ValueError:
        raise PlanError(
            f"dtype: {shown(encoded.get('dtype'))}", operator=parameter, source=line.where, legal='such as "float32"'
        ) from None
    ranks = encoded.get("ranks", f"0-{devices - 1}")
    found = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", ranks) if isinstance(ranks, str) else None
    if not found or not int(found[1]) <= int(found[2]) < devices:
        raise PlanError(
            f"ranks: {shown(ranks)}",
            operator=parameter,
            source=line.where,
            legal=f'"0-{devices - 1}", or some of these',
        )
    first, count = int(found[1]), int(found[2]) - int(found[1]) + 1
    try:
        layout = read_layout(encoded.get("storage"), count, shape, uneven)
    except ShardwrightError as error:
        raise LayoutError(
            error.message,
            operator=parameter,
            source=line.where,
            strategy=encoded.get("storage"),
            legal=error.legal or f"cuts, one for each dim of {shape}",
        ) from None
    return TensorStorage(tuple(shape), dtype, layout, first, line.where)
