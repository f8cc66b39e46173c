"""The stages that a search has chosen for a pipeline, and the pipelines that it priced beside it.

Example: 14 units on 8 devices: ``StageChoice(0, 7, 4, False), StageChoice(7, 14, 4, True)`` are two stages of seven
units on four devices each; the second one is recomputed in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..capture.annotations import PipelineSettings
from .schedules import Schedule, schedule

__all__ = ["PipelineSearchResult", "PricedPipeline", "StageChoice"]


class StageChoice(NamedTuple):
    """A stage: units [first, last) on `devices` devices, recomputed in the backward or not."""

    first: int
    last: int
    devices: int
    recompute: bool


@dataclass(frozen=True)
class PricedPipeline:
    """One pipeline that the search priced.

    Attributes:
        devices: number of devices of each stage.
        micro_batches: the number of micro-batches.
        recomputed: the number of stages that are recomputed.
        seconds: of a step, by the formula of `balance`; None: the pipeline is impossible.
        peak: bytes of the device that holds the most; for a pipeline that does not fit, the least achievable.
        why: the reason why it is impossible.
    """

    devices: tuple[int, ...]
    micro_batches: int
    recomputed: int = 0
    seconds: float | None = None
    peak: float | None = None
    why: str = ""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.devices)


@dataclass(frozen=True)
class PipelineSearchResult:
    """The chosen pipeline and its alternatives.

    Attributes:
        paths: for each unit, its modules.
        stages: in order.
        seconds, peak: as in `PricedPipeline`.
        alternatives: the best first.
    """

    paths: tuple[tuple[str, ...], ...]
    stages: tuple[StageChoice, ...]
    micro_batches: int
    seconds: float
    peak: float
    alternatives: tuple[PricedPipeline, ...]

    def encode(self) -> dict[str, Any]:
        """The same as values that `json_values` takes: one rank sends them to the others, which `read` them."""
        alternatives = [vars(pipeline) for pipeline in self.alternatives]
        return {**vars(self), "stages": [tuple(stage) for stage in self.stages], "alternatives": alternatives}

    @classmethod
    def read(cls, encoded: dict[str, Any]) -> PipelineSearchResult:
        """The search result of `encoded`."""
        stages = tuple(StageChoice(*stage) for stage in encoded["stages"])
        alternatives = tuple(PricedPipeline(**pipeline) for pipeline in encoded["alternatives"])
        return cls(**{**encoded, "stages": stages, "alternatives": alternatives})

    @property
    def modules(self) -> dict[str, int]:
        """Dotted path -> stage."""
        return {
            path: s
            for s, stage in enumerate(self.stages)
            for paths in self.paths[stage.first : stage.last]
            for path in paths
            if path
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of devices of each stage."""
        return tuple(stage.devices for stage in self.stages)

    @property
    def unequal(self) -> bool:
        """True where stages have unequal numbers of devices."""
        return len(set(self.sizes)) > 1

    @property
    def setting(self) -> PipelineSettings:
        """The setting by which a user would ask for these stages, apart from the numbers of devices."""
        return PipelineSettings(len(self.stages), "1f1b", self.micro_batches)

    @property
    def schedule(self) -> Schedule:
        """The 1F1B schedule of the chosen stages."""
        return schedule("1f1b", len(self.stages), self.micro_batches)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The units that are recomputed."""
        return tuple(u for stage in self.stages if stage.recompute for u in range(stage.first, stage.last))
