"""The devices of a plan: their links, memory and speed; presets, and amounts of memory.

1. Links form levels (`Cluster`), from the inside out: the devices of a node, the nodes of a cluster. Ranks number the
   devices so that those of one unit of a level are contiguous: with sizes n_1, n_2, … a unit of level l holds the
   ranks of one multiple of b_l = n_1 ⋯ n_l, and a digit size@stride of the rank moves within level l where b_(l-1) <=
   stride and span <= b_l.

Example: nodes of 8 devices, 4 nodes: b_1 = 8, b_2 = 32. The digit 4@2 has span 8 and stays within a node; 4@8 crosses
nodes.

2. Presets (`preset`): clusters by name, namely any number of nodes of eight devices, and the processor of a laptop.
   Rates are those of the makers' data sheets, dense (without sparsity), and of one direction of a link. The rates
   that a program reaches are lower; `shardwright calibrate` measures them. Each figure has its source and the
   source's address; a figure without a source is marked "assumed", with a reason for its size.

3. Amounts of memory (`memory_of`, `parse_bytes`, `format_bytes`): "70GB" and numbers of bytes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from .errors import SettingError, shown
from .json_files.json_reader import MIB, read_object
from .json_files.json_values import write_text
from .layout import Digit

__all__ = ["MOST_DEVICES", "PRESETS", "Cluster", "Level", "format_bytes", "memory_of", "parse_bytes", "preset"]

#: The version of the JSON form.
SCHEMA = 1

#: Devices of a cluster or a plan, at most. A number beyond it is a mistake, or a file that was tampered with.
MOST_DEVICES = 1 << 20

#: The dtypes for which a peak rate may be given, by their names in torch.
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")

#: dtype without a rate of its own -> (dtype, part of that dtype's rate); the first with a rate counts. Two lanes of
#: float32 form one of float64 in vector units; a dtype without units of its own is widened to the next.
_FALLBACKS: dict[str, tuple[tuple[str, float], ...]] = {
    "float64": (("float32", 0.5),),
    "bfloat16": (("float16", 1.0), ("float32", 1.0)),
    "float16": (("bfloat16", 1.0), ("float32", 1.0)),
    "float8_e4m3fn": (("float8_e5m2", 1.0), ("bfloat16", 1.0), ("float16", 1.0)),
    "float8_e5m2": (("float8_e4m3fn", 1.0), ("bfloat16", 1.0), ("float16", 1.0)),
    "complex128": (("float64", 1.0), ("float32", 0.5)),
}


#: Free links have this many times the bandwidth of a device's memory, and this latency in seconds: a cut always pays,
#: and among plans with equal cuts the one that sends less is still the cheaper.
_FREE_BANDWIDTH, _FREE_SECONDS = 1e3, 1e-18


@dataclass(frozen=True)
class Level:
    """One level of links.

    Args:
        name: for reports.
        size: the number of units of the level below, or devices, that one unit of this level joins.
        bandwidth: bytes/s that one device sends over it; with `shared`, bytes/s of all devices of one unit together.
        latency: seconds from one device to another.
        shared: True where the devices of a unit share one medium, such as a memory or a bus.

    Raises:
        SettingError: a value that is not above 0.

    Example:
        >>> link = sw.Level("10 GbE", size=4, bandwidth=1.25e9, latency=30e-6)
        >>> link.size
        4
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    shared: bool = False

    def __post_init__(self) -> None:
        where = f"level {shown(self.name)}"
        _check_name(self.name, "a level", "name")
        _check_positive(self.size, where, "size", whole=True)
        _check_positive(self.bandwidth, where, "bandwidth")
        _check_positive(self.latency, where, "latency")
        if not isinstance(self.shared, bool):
            raise SettingError(f"{where}: 'shared' is {shown(self.shared)}", legal="true or false")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        name: for reports.
        levels: of links, from the inside out.
        memory: bytes per device.
        peak: multiplications and additions per second (flop/s) of a device, by dtype name, such as "float32".
        memory_bandwidth: bytes/s between a device and its memory.
        overhead: seconds to launch one operator.

    Raises:
        SettingError: a value that is not above 0, no level, no rate, more than `MOST_DEVICES` devices.

    Example:
        >>> cluster = sw.Cluster.of("h100x8x4")
        >>> cluster.devices, [level.name for level in cluster.levels]
        (32, ['NVLink 4', 'InfiniBand NDR'])
    """

    name: str
    levels: tuple[Level, ...]
    memory: float
    peak: dict[str, float]
    memory_bandwidth: float
    overhead: float

    def __post_init__(self) -> None:
        _check_name(self.name, "a cluster", "name")
        where = f"cluster {shown(self.name)}"
        if not self.levels or not all(isinstance(level, Level) for level in self.levels):
            raise SettingError(
                f"{where}: 'levels' is {shown(self.levels)}", legal="one Level or more, from the inside out"
            )
        for name in ("memory", "memory_bandwidth", "overhead"):
            _check_positive(getattr(self, name), where, name)
        if not isinstance(self.peak, Mapping) or not self.peak:
            raise SettingError(
                f"{where}: 'peak' is {shown(self.peak)}", legal='rates by type, such as {"float32": 1e12}'
            )
        for name, rate in self.peak.items():
            if name not in DTYPES:
                raise SettingError(f"{where}: 'peak' has the unknown type {shown(name)}", legal=", ".join(DTYPES))
            _check_positive(rate, f"{where}: 'peak'", name)
        if self.devices > MOST_DEVICES:
            raise SettingError(f"{where}: 'levels' has too many devices", legal=f"at most {MOST_DEVICES:,} devices")

    def __hash__(self) -> int:
        return hash((self.name, self.levels, self.memory, tuple(sorted(self.peak.items())), self.memory_bandwidth))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(level.size for level in self.levels)

    def rate(self, dtype: str) -> float:
        """flop/s in a dtype; without a rate of its own, that of the nearest dtype that has one."""
        for name, part in ((dtype, 1.0), *_FALLBACKS.get(dtype, ()), ("float32", 1.0)):
            if name in self.peak:
                return self.peak[name] * part
        return min(self.peak.values())

    def crossed(self, digits: Iterable[Digit]) -> tuple[tuple[Level, int], ...]:
        """The levels that a group of ranks which differ in `digits` only spans, inside out, with the number of units.

        The numbers multiply to the size of the group. A digit that straddles the border of a level is split there.
        Where the sizes do not divide, some groups cross the border and others do not: the outer level is counted for
        all.
        """
        return tuple((self.levels[i], units) for i, units in enumerate(self.units(digits)) if units > 1)

    def units(self, digits: Iterable[Digit]) -> tuple[int, ...]:
        """The number of units that a group spans at each level of the cluster: 1 where it stays within one unit below.

        The group's ranks differ in `digits` only; see `crossed`.
        """
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
        """The number of devices in one unit of a level."""
        return math.prod(each.size for each in self.levels[: level + 1])

    def part(self, devices: int) -> Cluster:
        """The innermost units of the cluster that hold `devices` devices; the last of them need not be full.

        Raises:
            SettingError: more devices than the cluster has.
        """
        if devices > self.devices:
            raise SettingError(
                f"the cluster {self.name!r} has {self.devices} devices, not {devices}",
                legal=f'at most {self.devices} devices, or a cluster with more, such as "h100x8x{-(-devices // 8)}"',
            )
        levels, inside = [], 1
        for level in self.levels:
            size = min(level.size, -(-devices // inside))
            levels.append(replace(level, size=size))
            inside *= level.size
            if inside >= devices:
                break
        return self if tuple(levels) == self.levels else replace(self, levels=tuple(levels))

    def with_free_links(self) -> Cluster:
        """The same devices, with links and launches at almost no cost.

        A search then cuts everything that can be cut, as a plan for trying out cuts requires.
        """
        levels = tuple(
            replace(level, bandwidth=_FREE_BANDWIDTH * self.memory_bandwidth, latency=_FREE_SECONDS, shared=False)
            for level in self.levels
        )
        return replace(self, name=f"{self.name}, free links", levels=levels, overhead=_FREE_SECONDS)

    @classmethod
    def of(
        cls, cluster: Cluster | str | os.PathLike[str] | Mapping[str, object] | None, devices: int | None = None
    ) -> Cluster:
        """The cluster of a setting.

        Args:
            cluster: a Cluster; the name of a preset ("h100x8" is a node, "h100x8x128" are 128 of them); the path of a
                JSON file; the content of such a file, as a dict; None: as many "h100x8" nodes as the devices need.
            devices: the number of its devices in use, the innermost ones; None: all.

        Raises:
            SettingError: any other value, a file that cannot be read or describes an impossible cluster, or fewer
                devices than `devices`.
        """
        if devices is not None:
            _check_positive(devices, "a cluster", "devices", whole=True)
        if isinstance(cluster, cls):
            found = cluster
        elif isinstance(cluster, Mapping):
            found = cls.from_dict(cluster)
        elif cluster is None:
            nodes = -(-(devices or 8) // 8)
            found = cls._preset("h100x8" if nodes == 1 else f"h100x8x{nodes}", devices)
        elif isinstance(cluster, str) and not cluster.endswith(".json") and not os.path.isfile(cluster):
            found = cls._preset(cluster, devices)
        elif isinstance(cluster, (str, os.PathLike)):
            found = cls.load(cluster)
        else:
            raise SettingError(
                f"a cluster cannot be {cluster!r}", legal="a preset's name, a JSON file, a dict or a Cluster"
            )
        return found if devices is None else found.part(devices)

    @classmethod
    def _preset(cls, name: str, devices: int | None) -> Cluster:
        return preset(name, devices)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster of the JSON file at `path`.

        Raises:
            SettingError: a file that cannot be read or is cut short; a field that is missing, unknown or not above 0;
                more than `MOST_DEVICES` devices.
        """
        encoded = read_object(
            path,
            SettingError,
            "the cluster file",
            "a preset's name, or a file that Cluster.save wrote",
            MIB,
            edited=True,
        )[1]
        return cls.from_dict(encoded, f"cluster file {os.fspath(path)!r}")

    @classmethod
    def from_dict(cls, encoded: object, where: str = "cluster") -> Cluster:
        """The cluster of a dict with the fields of `Cluster` and `Level`; "schema" may give the version.

        Args:
            encoded: the dict.
            where: the name of the source in an error.

        Raises:
            SettingError: a field that is missing, unknown or not above 0.
        """
        encoded = dict(_known(encoded, where, [f.name for f in fields(cls)], optional=("schema",)))
        schema = encoded.pop("schema", SCHEMA)
        if type(schema) is not int or schema != SCHEMA:
            raise SettingError(f"{where}: 'schema' is {shown(schema)}", legal=str(SCHEMA))
        if not isinstance(encoded["levels"], (list, tuple)) or not encoded["levels"]:
            raise SettingError(
                f"{where}: 'levels' is {shown(encoded['levels'])}", legal="a list of levels, from the inside out"
            )
        names, levels = [f.name for f in fields(Level)], []
        for i, level in enumerate(encoded["levels"]):
            at = f"{where}: 'levels'[{i}]"
            levels.append(_within(at, lambda: Level(**_known(level, at, names[:-1], optional=names[-1:]))))
        peak = dict(encoded["peak"]) if isinstance(encoded["peak"], Mapping) else encoded["peak"]
        return _within(where, lambda: cls(**encoded | {"levels": tuple(levels), "peak": peak}))

    def to_dict(self) -> dict[str, object]:
        """The cluster as a dict for `from_dict`."""
        return {"schema": SCHEMA, **asdict(self), "levels": [asdict(level) for level in self.levels]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to `path` as JSON, for `Cluster.of`.

        Raises:
            SettingError: it cannot be written.
        """
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n", SettingError, "the cluster")


def _check_name(value: object, where: str, field: str) -> None:
    if not isinstance(value, str) or not value:
        raise SettingError(f"{where}: {field!r} is {shown(value)}", legal="a name")


def _check_positive(value: object, where: str, field: str, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < math.inf:
        raise SettingError(
            f"{where}: {field!r} is {shown(value)}", legal=f"a {'whole ' if whole else ''}number above 0"
        )


def _known(encoded: object, where: str, names: Iterable[str], optional: Iterable[str]) -> Mapping[str, Any]:
    names, optional = list(names), list(optional)
    if not isinstance(encoded, Mapping):
        raise SettingError(f"{where}: {shown(encoded)} is no description", legal=f"the fields {', '.join(names)}")
    for name in encoded:
        if name not in names and name not in optional:
            raise SettingError(f"{where}: unknown field {shown(name)}", legal=", ".join([*names, *optional]))
    for name in names:
        if name not in encoded:
            raise SettingError(f"{where}: the field {name!r} is missing", legal=", ".join(names))
    return encoded


Made = TypeVar("Made")


def _within(where: str, make: Callable[[], Made]) -> Made:
    """The result of `make`; its errors name `where`."""
    try:
        return make()
    except SettingError as error:
        raise SettingError(
            f"{where}: {error.message}" if not error.message.startswith(where) else error.message, legal=error.legal
        ) from None


# -- presets

#: Seconds to launch one operator on an accelerator. Assumed: a little above the 3.8 µs from one short kernel to the
#: next, each launched by itself, of NVIDIA, "Getting Started with CUDA Graphs" (2019),
#: https://developer.nvidia.com/blog/cuda-graphs/ ; PyTorch's own time for an operator comes on top.
_LAUNCH = 5e-6

# Seconds from device to device: NCCL's own figures for a ring with the protocol LL128 (hwLat, in µs: NVLink 1.9, PCI
# Express 2.5, through the network 4.0),
# https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc
_NVLINK, _PCI, _NETWORK = 1.9e-6, 2.5e-6, 4.0e-6

# NVIDIA, "H100 Tensor Core GPU", specifications (SXM), https://www.nvidia.com/en-us/data-center/h100/ : 80 GB at 3.35
# TB/s; Tflop/s float64 67 in tensor cores, float32 67, bfloat16 and float16 1,979 with sparsity, float8 and int8
# 3,958 (half of it dense); NVLink 4 of 900 GB/s in both directions together. "DGX H100/H200 User Guide",
# https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html : eight ConnectX-7 of 400 Gb/s.
_HOPPER = {
    "float64": 67e12,
    "float32": 67e12,
    "bfloat16": 989.5e12,
    "float16": 989.5e12,
    "float8_e4m3fn": 1979e12,
    "float8_e5m2": 1979e12,
    "int8": 1979e12,
}
_NVLINK4 = Level("NVLink 4", 8, 450e9, _NVLINK)
_NDR = Level("InfiniBand NDR", 1, 50e9, _NETWORK)

#: Name -> one node, and the network that joins several of them.
PRESETS: dict[str, tuple[Cluster, Level]] = {
    "h100x8": (Cluster("h100x8", (_NVLINK4,), 80e9, _HOPPER, 3.35e12, _LAUNCH), _NDR),
    # NVIDIA, "H200 Tensor Core GPU", specifications (SXM), https://www.nvidia.com/en-us/data-center/h200/ : as an
    # H100, with 141 GB at 4.8 TB/s.
    "h200x8": (Cluster("h200x8", (_NVLINK4,), 141e9, _HOPPER, 4.8e12, _LAUNCH), _NDR),
    # NVIDIA, "A100 Tensor Core GPU", specifications (80GB SXM), https://www.nvidia.com/en-us/data-center/a100/ : 80
    # GB at 2,039 GB/s; Tflop/s float64 19.5 in tensor cores, float32 19.5, bfloat16 and float16 312, int8 624; NVLink
    # 3 of 600 GB/s in both directions together. "DGX A100 User Guide",
    # https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html : eight ConnectX-6 of 200 Gb/s for
    # computing.
    "a100x8": (
        Cluster(
            "a100x8",
            (Level("NVLink 3", 8, 300e9, _NVLINK),),
            80e9,
            {"float64": 19.5e12, "float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
            2.039e12,
            _LAUNCH,
        ),
        Level("InfiniBand HDR", 1, 25e9, _NETWORK),
    ),
    # Huawei, "Atlas 800T A2", technical specifications,
    # https://support.huawei.com/enterprise/zh/doc/EDOC1100317202/f3dba488 : eight Ascend 910B of 64 GB at 1.6 TB/s;
    # Tflop/s float16 313, float32 75; joined each to each by HCCS, 392 GB/s in both directions over seven links; a
    # port of 200 Gb/s (RoCE) each. Others cite that page for HCCS; for float16 they have anything from 256 to 400.
    # Assumed: bfloat16 as float16, since both have two bytes and use the same units; int8 twice that, as on the Ascend
    # 910 (256 and 512). Assumed, since none are published, are the latencies: for HCCS that of PCI Express, the slower
    # of the two known ones within a node; for RoCE that of the network above. A group of fewer than eight has fewer
    # than seven links; a level cannot express that.
    "ascend910bx8": (
        Cluster(
            "ascend910bx8",
            (Level("HCCS", 8, 196e9, _PCI),),
            64e9,
            {"float32": 75e12, "bfloat16": 313e12, "float16": 313e12, "int8": 626e12},
            1.6e12,
            _LAUNCH,
        ),
        Level("RoCE", 1, 25e9, _NETWORK),
    ),
}

# AMD, "Ryzen 7 7840U", https://www.amd.com/en/products/apu/amd-ryzen-7-7840u : 8 cores of 3.3 GHz, two channels of
# DDR5-5600, which are 89.6 GB/s. Two units of 8 float32 lanes that multiply and add in one cycle make 32 flop a cycle
# and core: Agner Fog, "Instruction tables", Zen 4, https://www.agner.org/optimize/instruction_tables.pdf . Assumed:
# 16 GB, as laptops commonly have. Assumed: half of the bandwidth for transfers between processes, for all together,
# since each byte is written and read.
_CORES, _FLOPS, _MEMORY_BANDWIDTH, _MEMORY = 8, 8 * 32 * 3.3e9, 89.6e9, 16e9
# Seconds for two processes on two cores to wait for one another: measured, an all-reduce of 32 bytes through shared
# memory (`runtime/distributed/shared_memory.py`) takes 45 us, and 87 on four ranks.
_MEETING = 45e-6
# Seconds for one operator of PyTorch on a processor. Assumed: of the order of a call from Python to a kernel, and
# below `_LAUNCH`, since nothing is launched. `shardwright calibrate` measures the time of a machine.
_CALL = 2e-6


def _laptop(devices: int) -> Cluster:
    """A laptop's processor as `devices` devices, each with its share of cores and memory."""
    return Cluster(
        "cpu",
        (Level("shared memory", devices, _MEMORY_BANDWIDTH / 2, _MEETING, shared=True),),
        _MEMORY / devices,
        {"float32": _FLOPS / devices, "float64": _FLOPS / 2 / devices},
        _MEMORY_BANDWIDTH / devices,
        _CALL,
    )


def preset(name: str, devices: int | None = None) -> Cluster:
    """The cluster of that name: "h100x8" is one node, "h100x8x128" are 128, "cpu" is a processor shared by `devices`.

    Raises:
        SettingError: no cluster has that name.
    """
    if name == "cpu":
        return _laptop(devices or _CORES)
    found = re.fullmatch(r"(\w+?x\d+)(?:x([1-9]\d*))?", name)
    if found is None or found[1] not in PRESETS:
        raise SettingError(
            f"no cluster is called {name!r}",
            legal=f'{", ".join(PRESETS)}, with "x" and a number of nodes behind it where there are '
            'several ("h100x8x128"); "cpu"; or the path of a JSON file',
        )
    node, network = PRESETS[found[1]]
    nodes = int(found[2] or 1)
    return node if nodes == 1 else replace(node, name=name, levels=(*node.levels, replace(network, size=nodes)))


# -- amounts of memory

#: Bytes of each unit; "70G" is "70GB".
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

LEGAL = '"70GB", "64GiB", a number of bytes, or "cluster" for that of its devices'


def memory_of(setting: object, cluster: Cluster) -> float | None:
    """The bytes that a device may hold; None: no limit is requested.

    Args:
        setting: a number of bytes; text such as "70GB" or "1.5 TiB"; "cluster" or True: the memory of a device; None or
            False: no limit.

    Raises:
        SettingError: any other value, or an amount that is not above 0.
    """
    if setting is None or setting is False:
        return None
    if setting is True or (isinstance(setting, str) and setting.strip().lower() == "cluster"):
        return float(cluster.memory)
    return parse_bytes(setting, "memory", LEGAL)


def parse_bytes(amount: object, name: str, legal: str) -> float:
    """The bytes of a number or of text such as "70GB".

    Args:
        name, legal: of the setting, for the error.

    Raises:
        SettingError: any other value, or an amount that is not above 0.
    """
    if isinstance(amount, str):
        read = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)(b?)", amount.strip().lower())
        unit = read[2].upper() if read else "?"
        try:
            found = float(read[1]) * UNITS[unit] if read and unit in UNITS else math.nan
        except ValueError:
            found = math.nan
    else:
        found = float(amount) if isinstance(amount, (int, float)) and not isinstance(amount, bool) else math.nan
    if not 0 < found < math.inf:
        raise SettingError(f"{name}={amount!r} is no amount of memory", legal=legal)
    return found


def format_bytes(count: float) -> str:
    """An amount of bytes for a report: "1.50 GB"; always rounded up."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{math.ceil(count / size * 100) / 100:.2f} {unit}"
    return f"{math.ceil(count)} bytes"
