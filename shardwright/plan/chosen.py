"""The stages of a pipeline that a search has chosen, and what else it priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..schedules import Schedule, schedule
from ..staging import Pipelining

__all__ = ["Alternative", "Chosen", "StageChoice"]


class StageChoice(NamedTuple):
    """A stage: units [first, last) on so many devices, computed again in the backward or not."""

    first: int
    last: int
    devices: int
    recompute: bool


@dataclass(frozen=True)
class Alternative:
    """What was priced.

    Attributes:
        devices: by stage.
        micro_batches: how many.
        recomputed: how many of the stages are computed again.
        seconds: of a step, by the formula of `balance`; None: it cannot be.
        peak: bytes of the device that holds the most; of what does not fit the least that there is.
        why: it cannot be.
    """

    devices: tuple[int, ...]
    micro_batches: int
    recomputed: int = 0
    seconds: float | None = None
    peak: float | None = None
    why: str = ""

    @property
    def stages(self) -> int:
        """How many stages."""
        return len(self.devices)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and among what.

    Attributes:
        paths: by unit, its modules.
        stages: in order.
        seconds, peak: as of `Alternative`.
        alternatives: the best first.
    """

    paths: tuple[tuple[str, ...], ...]
    stages: tuple[StageChoice, ...]
    micro_batches: int
    seconds: float
    peak: float
    alternatives: tuple[Alternative, ...]

    @property
    def modules(self) -> dict[str, int]:
        """Dotted path -> stage."""
        return {path: s for s, stage in enumerate(self.stages) for paths in self.paths[stage.first:stage.last]
                for path in paths if path}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices, by stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def unequal(self) -> bool:
        """Whether stages have unequal numbers of devices."""
        return len(set(self.sizes)) > 1

    @property
    def setting(self) -> Pipelining:
        """As a user would ask for it, but for the sizes."""
        return Pipelining(len(self.stages), "1f1b", self.micro_batches)

    @property
    def schedule(self) -> Schedule:
        """Who does what when."""
        return schedule("1f1b", len(self.stages), self.micro_batches)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The units that are computed again."""
        return tuple(u for stage in self.stages if stage.recompute for u in range(stage.first, stage.last))
