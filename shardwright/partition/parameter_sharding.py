"""ZeRO/FSDP sharding (optimizer parallel): the storage layout of each parameter.

    replicas of a parameter  = the digits of the rank that its layout does not name
    its storage layout       = dim 0 cut further by `shard_size` of them, the fastest, as the minor digits of that dim

A rank's slice is thus cut along its dim 0 over the ranks that hold the same slice. The redistribution from the
storage layout to the layout of the use is an ordinary one: an all-gather in the forward; for the gradient, a
reduce-scatter that sums over the ranks whose work differed.

Example: a weight of 512 rows, replicated on 4 devices, and ``shard_size=-1``: each rank stores 128 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from ..graph import Value
from ..layout import Digit, Digits, Layout, digits_size

__all__ = ["OptimizerParallel", "ParameterSharding", "stored_layouts"]

#: level1 cuts weights and the optimizer's state; level2 also accumulated gradients; level3 also reshards gathered
#: weights after the forward.
LEVELS = ("level1", "level2", "level3")

#: The level that leaves the choice to the planning (`planners.plan_search`); no plan has it.
AUTO_LEVEL = "auto"


@dataclass(frozen=True)
class OptimizerParallel:
    """The setting of `AutoParallel.hsdp`.

    Args:
        shard_size: the number of replicas over which a parameter is cut; -1: all.
        threshold: KB (1024 bytes) of a whole parameter from which on it is cut.
        optimizer_level: "level1", "level2" or "level3"; in a user's setting also "auto".
        whole: names of the parameters that are left out.
        kept: at "level3", names of the parameters whose gathered weights are saved for the backward nevertheless.

    Raises:
        SettingError: an invalid value.
    """

    shard_size: int = -1
    threshold: float = 64
    optimizer_level: str = "level1"
    whole: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        size, threshold = self.shard_size, self.threshold
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise SettingError(f"hsdp: shard_size={size!r}", legal="-1 for all replicas, or a whole number above 0")
        if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not threshold >= 0:
            raise SettingError(f"hsdp: threshold={threshold!r}", legal="KB, a number of at least 0")
        if self.optimizer_level not in (*LEVELS, AUTO_LEVEL):
            legal = ", ".join(map(repr, (*LEVELS, AUTO_LEVEL)))
            raise SettingError(f"hsdp: optimizer_level={self.optimizer_level!r}", legal=legal)

    @classmethod
    def of(cls, setting: OptimizerParallel | Mapping[str, Any] | None) -> OptimizerParallel | None:
        """The setting from the arguments of `AutoParallel.hsdp`.

        Raises:
            SettingError: an unknown argument.
        """
        if setting is None or isinstance(setting, cls):
            return setting
        known = ("shard_size", "threshold", "optimizer_level")
        if not isinstance(setting, Mapping) or set(setting) - set(known):
            raise SettingError(
                f"hsdp: {setting!r}", legal='{"shard_size": -1, "threshold": 64, "optimizer_level": "level1"}'
            )
        return cls(**setting)

    @property
    def is_automatic(self) -> bool:
        """True where the planning chooses the level."""
        return self.optimizer_level == AUTO_LEVEL

    @property
    def accumulates_whole(self) -> bool:
        """True where gradients that are accumulated before their sum are stored whole."""
        return self.optimizer_level == "level1"

    @property
    def reshard_after_forward(self) -> bool:
        """True where weights are resharded after the forward and gathered again in the backward."""
        return self.optimizer_level == "level3"

    def reshards_after_forward(self, name: str) -> bool:
        """True where the parameter `name` is resharded after the forward."""
        return self.reshard_after_forward and name not in self.kept


@dataclass(frozen=True)
class ParameterSharding:
    """The storage of one parameter.

    Attributes:
        note: the reason why it is not cut further than its use needs; None: it is, or it has no replicas.
        reported: True where `note` belongs in the plan's notes: the user could not expect it.
    """

    layout: Layout
    note: str | None = None
    reported: bool = False


def stored_layouts(
    used: Mapping[str, tuple[Value, Layout]], setting: OptimizerParallel
) -> dict[str, ParameterSharding]:
    """The storage of each parameter.

    Args:
        used: name -> the parameter, and the layout in which its operators consume it.

    Raises:
        SettingError: a `shard_size` that does not divide the replicas of a parameter which would be cut.
    """
    out, refused = {}, []
    for name, (value, layout) in used.items():
        replicas, size = digits_size(layout.replicas), setting.shard_size
        reason = _whole_reason(name, value, setting)
        if replicas == 1 or size == 1:
            out[name] = ParameterSharding(layout)
        elif reason is not None:
            out[name] = ParameterSharding(layout, reason)
        elif size != -1 and _neighbours(layout.replicas, size) is None:
            refused.append((name, value, layout))
        else:
            out[name] = _cut(value, layout, replicas if size == -1 else size)
    if refused:
        raise _does_not_divide(refused, setting)
    return out


def _whole_reason(name: str, value: Value, setting: OptimizerParallel) -> str | None:
    if name in setting.whole:
        return "left out by no_optimizer_parallel"
    if value.stored.nbytes < setting.threshold * 1024:
        return f"{value.stored.nbytes} bytes, below the threshold of {setting.threshold:g} KB"
    return None


def _cut(value: Value, layout: Layout, size: int) -> ParameterSharding:
    if not value.shape:
        return ParameterSharding(layout, "it has no dim to cut", True)
    rows = layout.local_shape(value.shape)[0]
    if rows % size:
        return ParameterSharding(
            layout, f"dim 0 of its slices has size {rows}, which {size} replicas do not divide", True
        )
    taken = _neighbours(layout.replicas, size)
    assert taken is not None and layout.dims is not None
    return ParameterSharding(Layout.of(layout.devices, ((*layout.dims[0], *taken), *layout.dims[1:])))


def _neighbours(replicas: Digits, size: int) -> Digits | None:
    """The fastest digits that number `size` replicas, most major first; None where no digits number exactly so
    many."""
    taken: list[Digit] = []
    for digit in sorted(replicas, key=lambda d: d.stride):
        part = digit.size if size % digit.size == 0 else size
        if digit.size % part:
            return None
        if part > 1:
            taken.append(Digit(part, digit.stride))
        size //= part
    return tuple(reversed(taken)) if size == 1 else None


def _does_not_divide(refused: Iterable[tuple[str, Value, Layout]], setting: OptimizerParallel) -> SettingError:
    counts: dict[tuple[int, ...], list[str]] = {}
    for name, _, layout in refused:
        number = digits_size(layout.replicas)
        counts.setdefault(tuple(s for s in range(1, number + 1) if _neighbours(layout.replicas, s)), []).append(
            f"{name!r} has {number}"
        )
    which = "; ".join(", ".join(names) for names in counts.values())
    legal = sorted(set.intersection(*(set(sizes) for sizes in counts)))
    return SettingError(
        f"hsdp: shard_size={setting.shard_size} does not divide the replicas of all parameters: {which}",
        strategy=f"hsdp(shard_size={setting.shard_size})",
        legal=f"{', '.join(map(str, [*legal, -1]))} (all), or no_optimizer_parallel for these",
    )
