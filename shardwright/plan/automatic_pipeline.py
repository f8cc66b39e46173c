"""From stages="auto" to a plan: choose, make the pipeline of what was chosen, and see that it fits.

The prices by which stages are chosen are read off a plan of other neighbours than they come to have. Where the
pipeline's own peak is above the limit, it is chosen again with so much less. Where stages of unequal numbers of devices,
whose borders have conversions of their own, turn out to be dearer than equal ones were priced, these are made
too and the cheaper pipeline is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..cluster import Cluster
from ..errors import PlanError, SettingError
from ..graph import Graph
from ..staging import Pipelining
from .automatic import Choosing, Planner, counts_of, first_count
from .chosen import Chosen
from .bytes import words_of
from .micro import rows_of

__all__ = ["UNITS_BY", "Automatic", "check_automatic"]

#: Mode -> that in which units are priced, where it is another one: what the recursion finds is near to the best.
UNITS_BY = {"dynamic_programming": "recursive_programming"}

#: How often stages are chosen anew with less memory.
MOST_TRIES = 4


def check_automatic(setting: Pipelining, modules: Mapping[str, int], strategies: Any = None) -> None:
    """That nothing is said besides which is to be chosen.

    Raises:
        SettingError: a module in a stage, another schedule, chunks, a plan's strategies.
    """
    if modules:
        path, stage = next(iter(modules.items()))
        raise SettingError(f'the module {path!r} is put into stage {stage}, and stages="auto" chooses stages itself',
                           legal="no set_stage and no stage_config, or a number of stages")
    if setting.scheduler != "1f1b" or setting.chunks not in (None, 1):
        what = f"scheduler={setting.scheduler!r}" if setting.scheduler != "1f1b" else f"chunks={setting.chunks}"
        raise SettingError(f'{what} with stages="auto", which are cut for 1f1b',
                           legal='scheduler="1f1b", or a number of stages')
    if strategies is not None:
        raise SettingError(f'{strategies.path} has strategies, and stages="auto" chooses them with the stages',
                           legal="no strategies, or a number of stages")


@dataclass(frozen=True)
class Automatic:
    """How the stages of one model are chosen.

    Attributes:
        count: for how many micro-batches it is captured first.
        captured: captures it: number of micro-batches -> graph, and that for twice the rows.
        before: what was chosen when it was called with other shapes: its stages stay.
        first: who chooses, where several processes plan together: (graph, settings, what chooses) -> what it chose;
            None: this one.
    """

    count: int
    captured: Callable[[int], tuple[Graph, Graph | None]]
    before: Chosen | None = None
    first: Callable[[Graph, Any, Callable[[], Chosen]], Chosen] | None = None

    @classmethod
    def of(cls, setting: Pipelining, args: tuple, kwargs: Mapping[str, Any], captured: Callable, before: Any = None,
           first: Callable | None = None, fed_apart: bool = False) -> Automatic:
        """For a call of a model; where no stages are chosen, for as many micro-batches as are asked for.

        Args:
            args, kwargs: the whole batch.
            before: the plan of an earlier call.
            fed_apart: each process feeds a part of the batch.

        Raises:
            SettingError: micro-batches to be chosen for given stages, or stages to be chosen where the batch depends on
                their number.
        """
        if setting.stages != "auto":
            if setting.micro_batches == "auto":
                raise SettingError('micro_batches="auto" with a number of stages', legal='a number, or stages="auto"')
            return cls(setting.micro_batches, captured)
        if fed_apart:
            raise SettingError('stages="auto" where each process feeds its own part of the batch: of how many parts '
                               "the batch is depends on the stages", legal='dataset_strategy("full_batch")')
        chosen, rows = getattr(before, "chosen", None), rows_of(args, dict(kwargs)) or 1
        if setting.micro_batches != "auto":
            count = setting.micro_batches
        elif chosen is None:
            count = first_count(rows)
        else:
            count = max((c for c in counts_of(rows) if len(chosen.stages) <= c <= chosen.micro_batches),
                        default=chosen.micro_batches)
        return cls(count, captured, None if chosen is None else replace(chosen, micro_batches=count), first)

    def run(self, graph: Graph, wide: Graph | None, splits: tuple[bool, ...], devices: int, dataset: Any,
            cluster: Cluster, memory: float | None, planner: Planner, piped: Callable[[Chosen], Any],
            micro_batches: int | str) -> Any:
        """The pipeline.

        Args:
            memory: bytes a device; None: those of the cluster.
            piped: makes the pipeline of what was chosen.

        Raises:
            PlanError: nothing fits.
        """
        if self.before is not None:
            return piped(self.before)
        limit = cluster.memory if memory is None else memory
        rows = next((v.shape[0] for v, part in zip(graph.inputs, splits) if part), 1)
        choosing: list[Choosing] = []

        def choose(target: float, unequal: bool) -> Chosen:
            if not choosing:
                choosing.append(Choosing(graph, wide, rows, self.count, devices, dataset, cluster, planner,
                                         micro_batches=micro_batches))
            return choosing[0].run(target, unequal)

        def made(target: float, unequal: bool = True) -> Any:
            settings = (devices, target, unequal, micro_batches, cluster)
            return piped(choose(target, unequal) if self.first is None else
                         self.first(graph, settings, lambda: choose(target, unequal)))

        target, least = limit, float("inf")
        for _ in range(MOST_TRIES):
            found = made(target)
            if found.chosen.unequal and found.cost > min((a.seconds for a in found.alternatives if a.seconds is not None
                                                          and len(set(a.devices)) == 1), default=float("inf")):
                other = made(target, unequal=False)
                found = other if other.cost <= found.cost and other.peak <= limit else found
            if found.peak <= limit:
                return found
            least, target = min(least, found.peak), target * limit / found.peak * (1 - 1e-6)
        raise PlanError(f'stages="auto": no pipeline that fits in {words_of(limit)} a device was found; the least that '
                        f"one needs is {words_of(least)}",
                        legal="more devices, smaller batches, optimizer parallel (hsdp), or more memory")
