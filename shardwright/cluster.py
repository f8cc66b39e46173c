"""The devices that a plan is for: how they are joined, what they hold, how fast they work.

Links form levels, from the inside out: the devices of a node, the nodes of a cluster. Ranks number the devices so that
those of one unit of a level stand together: with sizes n_1, n_2, … a unit of level l holds the ranks of one multiple of
b_l = n_1 ⋯ n_l, and a digit size@stride of the rank moves within level l where b_(l-1) <= stride and span <= b_l.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import SettingError
from .layout import Digit

__all__ = ["Cluster", "Level"]

#: The version of the JSON form.
SCHEMA = 1

#: The types of numbers that a peak rate may be given for, by their names in torch.
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")

#: Where a type has no rate of its own: which other's it has, and what part of it, the first that is given. Two lanes of
#: float32 make one of float64 in vector units; a type that is not computed with is widened to the next.
_FALLBACKS: dict[str, tuple[tuple[str, float], ...]] = {
    "float64": (("float32", 0.5),),
    "bfloat16": (("float16", 1.0), ("float32", 1.0)),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float8_e4m3fn": (("float8_e5m2", 1.0), ("bfloat16", 1.0), ("float16", 1.0)),
    "float8_e5m2": (("float8_e4m3fn", 1.0), ("bfloat16", 1.0), ("float16", 1.0)),
    "complex128": (("float64", 1.0), ("float32", 0.5)),
}


#: Links that are free send this many times what a device reads and writes of its memory, and take these seconds to begin:
#: a cut always pays, and of plans that cut alike the one that sends less is still the cheaper.
_FREE_BANDWIDTH, _FREE_SECONDS = 1e3, 1e-18


@dataclass(frozen=True)
class Level:
    """One level of links.

    Args:
        name: for reports.
        size: how many units of the level below, or devices, one unit of this level joins.
        bandwidth: bytes/s that one device sends over it; where `shared`, what all devices of one unit share.
        latency: seconds from one device to another.
        shared: the devices of a unit have one medium between them, such as a memory or a bus.

    Raises:
        SettingError: a value that is not above 0.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    shared: bool = False

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        _check_name(self.name, "a level", "name")
        _check_positive(self.size, where, "size", whole=True)
        _check_positive(self.bandwidth, where, "bandwidth")
        _check_positive(self.latency, where, "latency")
        if not isinstance(self.shared, bool):
            raise SettingError(f"{where}: 'shared' is {self.shared!r}", legal="true or false")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        name: for reports.
        levels: of links, from the inside out.
        memory: bytes a device.
        peak: multiplications and additions a second (flop/s) of a device, by the name of the type, such as "float32".
        memory_bandwidth: bytes/s between a device and its memory.
        overhead: seconds that it takes to launch one operator.

    Raises:
        SettingError: a value that is not above 0, no level, no rate.
    """

    name: str
    levels: tuple[Level, ...]
    memory: float
    peak: dict[str, float]
    memory_bandwidth: float
    overhead: float

    def __post_init__(self) -> None:
        _check_name(self.name, "a cluster", "name")
        where = f"cluster {self.name!r}"
        if not self.levels or not all(isinstance(level, Level) for level in self.levels):
            raise SettingError(f"{where}: 'levels' is {self.levels!r}", legal="one Level or more, from the inside out")
        for name in ("memory", "memory_bandwidth", "overhead"):
            _check_positive(getattr(self, name), where, name)
        if not isinstance(self.peak, Mapping) or not self.peak:
            raise SettingError(f"{where}: 'peak' is {self.peak!r}", legal='rates by type, such as {"float32": 1e12}')
        for name, rate in self.peak.items():
            if name not in DTYPES:
                raise SettingError(f"{where}: 'peak' has the unknown type {name!r}", legal=", ".join(DTYPES))
            _check_positive(rate, f"{where}: 'peak'", name)

    def __hash__(self) -> int:
        return hash((self.name, self.levels, self.memory, tuple(sorted(self.peak.items())), self.memory_bandwidth))

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(level.size for level in self.levels)

    def rate(self, dtype: str) -> float:
        """flop/s in a type; where it has no rate of its own, that of the nearest type which has one."""
        for name, part in ((dtype, 1.0), *_FALLBACKS.get(dtype, ()), ("float32", 1.0)):
            if name in self.peak:
                return self.peak[name] * part
        return min(self.peak.values())

    def crossed(self, digits: Iterable[Digit]) -> tuple[tuple[Level, int], ...]:
        """The levels that a group of ranks which differ in `digits` only spans, and how many units of each, inside out.

        The numbers multiply to the size of the group. A digit that straddles the border of a level is split there.
        Where the sizes do not divide, some groups cross the border and others do not: the outer level is counted for
        all.
        """
        return tuple((self.levels[i], units) for i, units in enumerate(self.units(digits)) if units > 1)

    def units(self, digits: Iterable[Digit]) -> tuple[int, ...]:
        """As `crossed`, an entry for each level of the cluster: 1 where a group stays within one unit below it."""
        out = [1] * len(self.levels)
        for digit in digits:
            stride, size, border = digit.stride, digit.size, 1
            for i, level in enumerate(self.levels):
                border *= level.size
                if size == 1:
                    break
                if border % (stride * size) == 0 or i == len(self.levels) - 1:
                    out[i] *= size
                    break
                inside = border // stride
                if inside > 1 and border % stride == 0 and size % inside == 0:
                    out[i] *= inside
                    stride, size = border, size // inside
        return tuple(out)

    def below(self, level: int) -> int:
        """How many devices one unit of a level holds."""
        return math.prod(each.size for each in self.levels[:level + 1])

    def part(self, devices: int) -> Cluster:
        """The innermost units of the cluster that hold so many devices; the last of them need not be full.

        Raises:
            SettingError: more devices than the cluster has.
        """
        if devices > self.devices:
            raise SettingError(f"the cluster {self.name!r} has {self.devices} devices, not {devices}",
                               legal=f"at most {self.devices} devices, or a cluster with more, such as "
                                     f'"h100x8x{-(-devices // 8)}"')
        levels, inside = [], 1
        for level in self.levels:
            size = min(level.size, -(-devices // inside))
            levels.append(replace(level, size=size))
            inside *= level.size
            if inside >= devices:
                break
        return self if tuple(levels) == self.levels else replace(self, levels=tuple(levels))

    def with_free_links(self) -> Cluster:
        """The same devices, joined by links that cost next to nothing, as does a launch.

        A search then cuts whatever can be cut: what a plan needs that is to be tried out.
        """
        levels = tuple(replace(level, bandwidth=_FREE_BANDWIDTH * self.memory_bandwidth, latency=_FREE_SECONDS, shared=False)
                       for level in self.levels)
        return replace(self, name=f"{self.name}, free links", levels=levels, overhead=_FREE_SECONDS)

    @classmethod
    def of(cls, given: Cluster | str | os.PathLike | Mapping[str, Any] | None, devices: int | None = None) -> Cluster:
        """The cluster that someone asks for.

        Args:
            given: a Cluster; the name of a preset ("h100x8" is a node, "h100x8x128" are 128 of them); the path of a
                JSON file; what such a file holds, as a dict; None: as many "h100x8" nodes as the devices need.
            devices: how many of its devices are used: the innermost; None: all.

        Raises:
            SettingError: another thing, a file that cannot be read or says what cannot be, or fewer devices than that.
        """
        if devices is not None:
            _check_positive(devices, "a cluster", "devices", whole=True)
        if isinstance(given, cls):
            found = given
        elif isinstance(given, Mapping):
            found = cls.from_dict(given)
        elif given is None:
            nodes = -(-(devices or 8) // 8)
            found = cls._preset("h100x8" if nodes == 1 else f"h100x8x{nodes}", devices)
        elif isinstance(given, str) and not given.endswith(".json") and not os.path.isfile(given):
            found = cls._preset(given, devices)
        elif isinstance(given, (str, os.PathLike)):
            found = cls.load(given)
        else:
            raise SettingError(f"a cluster cannot be {given!r}",
                               legal="a preset's name, a JSON file, a dict or a Cluster")
        return found if devices is None else found.part(devices)

    @classmethod
    def _preset(cls, name: str, devices: int | None) -> Cluster:
        from .cluster_presets import preset  # presets are Clusters
        return preset(name, devices)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Cluster:
        """The cluster that a JSON file describes.

        Raises:
            SettingError: a file that cannot be read or is cut short; a field that is missing, unknown or not above 0.
        """
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(f"the cluster file {os.fspath(path)!r} cannot be read: {error.strerror}",
                               legal="a preset's name, or a file that Cluster.save wrote") from None
        except ValueError as error:
            raise SettingError(f"the cluster file {os.fspath(path)!r} is not JSON, or cut short: {error}",
                               legal="a file that Cluster.save wrote") from None
        return cls.from_dict(held, f"cluster file {os.fspath(path)!r}")

    @classmethod
    def from_dict(cls, held: Any, where: str = "cluster") -> Cluster:
        """The cluster that a dict describes, of the fields of `Cluster` and `Level`; "schema" may say which version.

        Args:
            where: who is to be named in an error.

        Raises:
            SettingError: a field that is missing, unknown or not above 0.
        """
        held = dict(_known(held, where, [f.name for f in fields(cls)], optional=("schema",)))
        schema = held.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise SettingError(f"{where}: 'schema' is {schema!r}", legal=str(SCHEMA))
        if not isinstance(held["levels"], (list, tuple)) or not held["levels"]:
            raise SettingError(f"{where}: 'levels' is {held['levels']!r}",
                               legal="a list of levels, from the inside out")
        names, levels = [f.name for f in fields(Level)], []
        for i, level in enumerate(held["levels"]):
            at = f"{where}: 'levels'[{i}]"
            levels.append(_within(at, lambda: Level(**_known(level, at, names[:-1], optional=names[-1:]))))
        peak = dict(held["peak"]) if isinstance(held["peak"], Mapping) else held["peak"]
        return _within(where, lambda: cls(**held | {"levels": tuple(levels), "peak": peak}))

    def to_dict(self) -> dict[str, Any]:
        """The cluster as `from_dict` reads it."""
        return {"schema": SCHEMA, **asdict(self), "levels": [asdict(level) for level in self.levels]}

    def save(self, path: str | os.PathLike) -> None:
        """Write the cluster as JSON, for `Cluster.of`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _check_name(value: Any, where: str, field: str) -> None:
    if not isinstance(value, str) or not value:
        raise SettingError(f"{where}: {field!r} is {value!r}", legal="a name")


def _check_positive(value: Any, where: str, field: str, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or \
            not 0 < value < math.inf:
        raise SettingError(f"{where}: {field!r} is {value!r}", legal=f"a {'whole ' if whole else ''}number above 0")


def _known(held: Any, where: str, names: Iterable[str], optional: Iterable[str]) -> Mapping[str, Any]:
    names, optional = list(names), list(optional)
    if not isinstance(held, Mapping):
        raise SettingError(f"{where}: {held!r} is no description", legal=f"the fields {', '.join(names)}")
    for name in held:
        if name not in names and name not in optional:
            raise SettingError(f"{where}: unknown field {name!r}", legal=", ".join([*names, *optional]))
    for name in names:
        if name not in held:
            raise SettingError(f"{where}: the field {name!r} is missing", legal=", ".join(names))
    return held


def _within(where: str, make: Any) -> Any:
    """What `make` makes, its errors told of `where`."""
    try:
        return make()
    except SettingError as error:
        raise SettingError(f"{where}: {error.message}" if not error.message.startswith(where) else error.message,
                           legal=error.legal) from None
