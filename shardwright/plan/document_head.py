"""The head of a plan's document: what its fields say of the whole plan, each checked as it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..errors import PlanError, ShardwrightError
from .decision import MODES
from .hybrid import OwnPrograms
from .memory import optimizer_bytes
from .storage import OptimizerParallel

__all__ = ["Head"]


@dataclass(frozen=True)
class Head:
    """The fields of a document, but for its sections.

    Attributes:
        words: the fields.
        lines: in which line of the file a field stands, of those that errors name a line of.
    """

    path: Path
    words: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def devices(self) -> int:
        """How many devices it is for."""
        devices = self.words.get("devices")
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise self.wrong(f"devices: {devices!r}", "a whole number of at least 1")
        return devices

    @property
    def uneven(self) -> bool:
        """Whether cuts need not divide."""
        return self.words.get("uneven") is True

    @property
    def mode(self) -> str:
        """Its parallel mode."""
        if self.words.get("mode") not in MODES:
            raise self.wrong(f"mode: {self.words.get('mode')!r}", ", ".join(MODES))
        return self.words["mode"]

    @property
    def cluster(self) -> Cluster | None:
        """What it is priced for."""
        given = self.words.get("cluster")
        return None if given is None else Cluster.from_dict(given, f"{self.path}: cluster")

    @property
    def hsdp(self) -> OptimizerParallel | None:
        """Its setting of optimizer parallel."""
        given = self.words.get("hsdp")
        if given is None:
            return None
        known = {f.name for f in fields(OptimizerParallel)}
        if not isinstance(given, dict) or set(given) - known:
            raise self.wrong(f"hsdp: {given!r}", f"an object with {', '.join(sorted(known))}")
        for name in ("whole", "kept"):
            if not isinstance(given.get(name, []), list) or not all(isinstance(x, str) for x in given.get(name, [])):
                raise self.wrong(f"hsdp: {name}: {given[name]!r}", "a list of names of parameters")
        try:
            return OptimizerParallel(**{k: frozenset(v) if isinstance(v, list) else v for k, v in given.items()})
        except (TypeError, ShardwrightError) as error:
            raise self.wrong(getattr(error, "message", f"hsdp: {given!r}"), getattr(error, "legal", None) or
                             "the settings of AutoParallel.hsdp") from None

    @property
    def own(self) -> OwnPrograms | None:
        """What there is to know of programs that are each rank's own."""
        given = self.words.get("own")
        if (given is None) != (self.mode != "hybrid_parallel"):
            raise self.wrong(f"own: {given!r} in {self.mode}", "it goes with hybrid_parallel")
        if given is None:
            return None
        if not isinstance(given, dict) or not isinstance(given.get("parameters"), list) or \
                not all(isinstance(name, str) for name in given["parameters"]):
            raise self.wrong(f"own: {given!r}", '{"parameters": [], "loss": true}')
        return OwnPrograms(frozenset(given["parameters"]), given.get("loss") is True)

    @property
    def optimizer(self) -> Any:
        """Whose state is reckoned with."""
        given = self.words.get("optimizer", "adam")
        try:
            optimizer_bytes(given)
        except ShardwrightError as error:
            raise self.wrong(error.message, error.legal or "") from None
        return given

    @property
    def memory(self) -> float | None:
        """Within how many bytes a device the plan was searched; None: memory was not looked at, or nothing says so."""
        given = self.words.get("memory")
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
            raise self.wrong(f"memory: {given!r}", "bytes that a device may hold, a number above 0, or no such field",
                             "memory")
        return float(given)

    @property
    def stage(self) -> int | None:
        """Of which stage of a pipeline it is the part, or None."""
        return self.words.get("stage")

    @property
    def where(self) -> str:
        """As errors name it."""
        return str(self.path) + (f", stage {self.stage}" if self.stage is not None else "")

    def wrong(self, message: str, legal: str, name: str = "") -> PlanError:
        """The error of what is said.

        Args:
            name: of the field that says it.
        """
        where = f"{self.path}:{self.lines[name]}" if name in self.lines else self.where
        return PlanError(message, source=where, legal=legal)
