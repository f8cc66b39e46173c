"""The content of a report: the figures of a plan, as the values (`html_elements`) that a page lays out (`html_report`).

Every figure is the plan's own: the prices, timelines and schedules that the tables in a terminal have too. For a
pipeline, operators and collectives are those of one micro-batch, stage by stage.

Example: in data_parallel on 8 devices, with 32 rows, the operators of ``Linear(16, 32), ReLU, Linear(32, 8)`` and of
the loss take 15.0, 10.0, 20.0 and 45.7 us (`spent`), 90.7 us together (`whole`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from ..cluster import Cluster
from ..cost.communication_schedule import CommunicationSchedule
from ..cost.cost_model import CostModel, StepInTime
from ..cost.memory_timeline import MemoryTimeline
from ..errors import ShardwrightError
from ..graph import short_dtype
from ..identity_tables import IdentityMap
from ..layout import Digits, Layout, digits_size
from ..operator_explanation import Explanation, SearchesOfPlan, explained, local_alternatives, seconds_of, shares_of
from ..pipeline.pipeline_plan import PipelinePlan, moments, timeline_of
from ..redistribution import CollectiveKind
from ..sharded_plan import Collective, OperatorPlan, ParameterPlan, Plan
from . import tables
from .console_tables import UNLIMITED, console_of
from .description import cluster_line, describe, inputs_line
from .explanations import alternatives_table, because, cause, decided, difference, next_best, shares_table
from .format import cost_text, count_text, layout_text, size_text, time_text
from .html_elements import (
    KIND_COLOURS,
    Branch,
    Grid,
    Leaf,
    Place,
    Section,
    SlicePicture,
    SlicePictures,
    Stat,
    Tensor,
    gathered,
    joined,
    memory,
    unfolded,
)
from .operator_cuts import OperatorCuts, operator_cuts, vocabularies
from .operator_names import OperatorNames
from .plan_diff import strategy_text
from .table_elements import alternatives_of, beside_lines, folded_parameters, notes_of, regions
from .timeline import headline, picture

__all__ = ["PlanContent"]

#: The largest number of operators, after equal layers are folded, that are listed one by one; of a step's actions that
#: are drawn; of notes; of the tensors at the peak of memory.
MOST_OPERATORS, MOST_ACTIONS, MOST_NOTES, MOST_HELD = 2_000, 6_000, 40, 14

#: A search for alternatives without a request: only for a plan of at most so many operators, of so many of them. In a
#: larger plan their alternatives are priced while nothing else changes, without a search.
CHEAP, EXPLAINED = 160, 3

#: Seconds below this share of a sum are its rounding error.
ROUNDING = 1e-9

#: The meaning of a layout's text.
LAYOUTS = (
    "[2@4·4@1, -]: dim 0 in 8 parts, dim 1 whole on each device that has a part. 2@4: rank r has number r // 4 % 2 of "
    "2; the first number is the major one."
)


class PlanContent:
    """The content of one plan.

    Args:
        plan: the plan.
        title: its name on the page.
        pictures: of the page.
        explain: the number of operators, the most expensive first, whose alternatives are priced; None: `EXPLAINED`,
            by a search in a plan of at most `CHEAP` operators that was not searched within a limit of memory.
        file: the name of the plan's file, for commands; "": the plan is at hand in Python, which the page names then.
    """

    def __init__(
        self, plan: Plan | PipelinePlan, title: str, pictures: SlicePictures, explain: int | None, file: str = ""
    ) -> None:
        self.plan, self.title, self.pictures, self.file = plan, title, pictures, file
        self.names = OperatorNames(plan)
        self.cluster = Cluster.of(plan.cluster, plan.devices)
        self.staged = isinstance(plan, PipelinePlan)
        self.plans = dict(_plans(plan))
        self.stage_of = {name: stage for stage, each in self.plans.items() for name in each.decisions}
        self.clusters = {stage: Cluster.of(each.cluster, each.devices) for stage, each in self.plans.items()}
        self.explain = EXPLAINED if explain is None else explain
        self.searches = explain is not None or self.is_cheap
        self._of_plans: IdentityMap[Plan, SearchesOfPlan] = IdentityMap()

    @property
    def is_cheap(self) -> bool:
        """True where alternatives are searched without a request."""
        limited = any(each.found is not None and each.found.limit is not None for each in self.plans.values())
        return not limited and len(self.names.decisions) <= CHEAP

    @cached_property
    def spent(self) -> dict[str, float]:
        """Name of an operator or a result -> seconds of a step; of a pipeline, of one micro-batch."""
        return {name: seconds_of(each, (name,)) for each in self.plans.values() for name in each.price.by_operator} | {
            name: seconds_of(each, (name,)) for each in self.plans.values() for name in each.decisions
        }

    @cached_property
    def whole(self) -> float:
        """Seconds of all operators together."""
        return sum(each.cost for each in self.plans.values())

    # -- at a glance -------------------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """Mode, devices and cluster."""
        return describe(self.plan).headline

    def summary(self) -> Section:
        """The plan in the field's words, its cluster, the feeding of its inputs, its notes."""
        plan = self.plan
        found = plan.found.notes if isinstance(plan, Plan) and plan.found is not None else ()
        notes = notes_of(dict.fromkeys((*plan.notes, *found)), self.names)
        more = [f"and {len(notes) - MOST_NOTES} more notes"] if len(notes) > MOST_NOTES else []
        about = [
            cluster_line(plan),
            inputs_line(plan),
            *(line for each in self.plans.values() for line in regions(each, self.names)),
            *(f"note: {note}" for note in notes[:MOST_NOTES]),
            *more,
        ]
        # Layers that are split alike have equal lines, each of which stays; a note of each stage is said once.
        return Section((*describe(plan).body(), *dict.fromkeys(about)))

    def stats(self) -> tuple[Stat, ...]:
        """Key figures."""
        plan, cluster = self.plan, self.cluster
        unique = {p.name: p for p in plan.parameters.values()}
        elements = sum(math.prod(p.shape) for p in unique.values())
        over = plan.peak > cluster.memory
        out = [
            Stat(
                "a step", time_text(plan.cost), "every message waited for at once: the cost that plans are compared by"
            )
        ]
        if isinstance(plan, Plan):
            beside = "messages beside computation, as on a library such as NCCL"
            out.append(Stat("a step with overlap", time_text(plan.price.elapsed), beside))
        else:
            out.append(Stat("bubble", f"{plan.simulation.bubble:.1%}", "the part of the devices' time that they wait"))
        out.append(self._proof())
        capacity = f"a device has {size_text(cluster.memory)}" + "; that is too little" * over
        listed = len(self.names.decisions)
        everything = sum(len(each.decisions) for each in self.plans.values())
        forwarding = f"{listed:,} below, the others only send a value on; " * (everything > listed)
        return (
            *out,
            Stat("peak memory", size_text(plan.peak), capacity, "bad" * over, min(1.0, plan.peak / cluster.memory)),
            Stat("a rank sends", size_text(plan.sent), "in a step, forward and backward, passing on included"),
            Stat("devices", f"{plan.devices:,}", f"of {cluster.name}"),
            Stat("parameters", count_text(elements), f"{elements:,} elements of {len(unique):,} tensors, with buffers"),
            Stat("operators", f"{everything:,}", f"{forwarding}plan {plan.fingerprint}"),
        )

    def _proof(self) -> Stat:
        """The certificate as a figure: the gap between cost and lower bound."""
        plan = self.plan
        if not isinstance(plan, Plan) or plan.bound is None or plan.gap is None:
            searched = isinstance(plan, Plan) and plan.found is not None
            return Stat(
                "certificate", "none", "no lower bound was proved" if searched else "nothing was searched whole"
            )
        about = f"the search prices no plan below {time_text(plan.bound)}"
        return Stat("certificate", f"gap {plan.gap:.2%}", about, "good")

    def certificate(self) -> Section:
        """Cost, lower bound and gap of the search."""
        plan = self.plan
        if isinstance(plan, PipelinePlan):
            grids = () if plan.chosen is None else (Grid.of(alternatives_of(plan.chosen), "priced pipelines"),)
            return Section(
                (cost_text(plan.cost),), grids, missing="no lower bound was proved: stages are planned one by one"
            )
        lines = [cost_text(plan.cost, plan.bound, plan.gap)]
        if plan.found is not None:
            within = (
                "without a limit of memory" if plan.found.limit is None else f"within {size_text(plan.found.limit)}"
            )
            lines.append(
                f"searched: {plan.found.strategies:,} strategies of {plan.found.operators:,} operators, {within}"
            )
        if plan.bound is None:
            return Section(
                tuple(lines),
                missing="nothing was searched, so there is no lower bound"
                if plan.found is None
                else "no lower bound was proved",
            )
        lines.append(
            "the search prices no other plan of the searched strategies below the bound, by the links of this cluster"
        )
        return Section(tuple(lines))

    # -- operators ---------------------------------------------------------------------------------------------------

    @cached_property
    def operators(self) -> dict[str, OperatorPlan]:
        """By name."""
        return {o.name: o for each in self.plans.values() for o in each.operators if o.name in self.names.decisions}

    @cached_property
    def messages(self) -> dict[str, list[Collective]]:
        """Operator -> the collectives of a rank."""
        out: dict[str, list[Collective]] = {}
        for each in self.plans.values():
            for collective in each.collectives(0):
                out.setdefault(collective.operator, []).append(collective)
        return out

    @cached_property
    def cuts(self) -> dict[str, OperatorCuts]:
        """Operator -> its cuts."""
        plan = self.plan
        if isinstance(plan, Plan):
            made: Iterable[OperatorCuts] = () if plan.own is not None else operator_cuts(plan)
        else:
            shared = {s.number: frozenset(t.name for t in plan.transfers if t.kind == "parameter") for s in plan.stages}
            rows = vocabularies(plan.graph)
            made = (c for stage in plan.stages for c in operator_cuts(stage.plan, shared[stage.number], rows))
        return {c.op.name: c for c in made}

    def _same(self, name: str) -> Hashable:
        """Everything that must be equal of operators that share a leaf; seconds and messages may differ."""
        operator, decision = self.operators[name], self.names.decisions[name]
        recompute = decision.op.recompute is not None
        return (
            strategy_text(decision),
            operator.in_layouts,
            operator.out_layouts,
            operator.in_shapes,
            operator.cause,
            recompute,
        )

    def tree(self) -> Branch:
        """The operators by modules; layers whose operators are all equal share a branch."""
        names = self.names
        layer_of = {name: names.layers.get(names.paths[name]) for name in names.decisions}
        layers: dict[tuple[str, int], list[str]] = {}
        for name, layer in layer_of.items():
            if layer is not None:
                layers.setdefault(layer, []).append(name)
        alike: dict[Hashable, list[tuple[str, int]]] = {}
        for layer, inside in layers.items():
            before = f"{layer[0]}.{layer[1]}".lstrip(".")
            key = (layer[0], *((names.paths[n].removeprefix(before), self._same(n)) for n in inside))
            alike.setdefault(key, []).append(layer)
        group_of = {layer: group for group in alike.values() for layer in group}
        root, made, known = Branch(self.title), set[str](), dict[tuple[object, ...], Branch]()
        chains: list[tuple[tuple[tuple[str, int], ...], tuple[str, ...]]] = []
        group: tuple[str, ...]
        chain: tuple[tuple[str, int], ...]
        for name in names.decisions:
            if name in made:
                continue
            layer, path = layer_of[name], names.paths[name]
            if layer is None:
                chain, group = tuple((part, 1) for part in path.split(".")[:-1]), (name,)
            else:
                together = group_of[layer]
                if layer != together[0]:
                    continue
                place = layers[layer].index(name)
                group = tuple(layers[other][place] for other in together)
                numbers = names.joined(group) if len(group) > 1 else ""
                number = f"{{{numbers.partition('{')[2].partition('}')[0]}}}" if numbers else str(layer[1])
                container = tuple((part, 1) for part in layer[0].split(".") if part)
                before = f"{layer[0]}.{layer[1]}".lstrip(".")
                inside_parts = path.removeprefix(before).lstrip(".").split(".")[:-1]
                chain = (*container, (number, len(group)), *((part, 1) for part in inside_parts))
            made.update(group)
            chains.append((chain, group))
        shown = sorted(chains, key=lambda entry: -sum(self.spent[n] for n in entry[1]))[: self.explain]
        dear = {group for _, group in shown}
        costs = {
            stage: CostModel(cluster, each.devices)
            for (stage, each), cluster in zip(self.plans.items(), self.clusters.values())
        }
        for chain, group in chains[:MOST_OPERATORS]:
            at = root
            for depth, (title, times) in enumerate(chain):
                key = tuple(chain[: depth + 1])
                if key not in known:
                    known[key] = Branch(title, times)
                    at.inside.append(known[key])
                at = known[key]
            at.inside.append(self._leaf(group, group in dear, costs))
        self.omitted = sum(len(group) for _, group in chains[MOST_OPERATORS:])
        return unfolded(gathered(joined(root)))

    omitted = 0

    def _leaf(self, group: tuple[str, ...], explain: bool, costs: Mapping[int, CostModel]) -> Leaf:
        # The first layer may receive its input otherwise than the others: figures below are those of most of them.
        figures = {n: (self.spent[n], self._sent(n)) for n in group}
        texts = {n: (time_text(seconds), sent) for n, (seconds, sent) in figures.items()}
        usual, times = Counter(texts.values()).most_common(1)[0]
        name = next(n for n in group if texts[n] == usual)
        stage, operator, decision = self.stage_of[name], self.operators[name], self.names.decisions[name]
        plan = self.plans[stage]
        mine = self.messages.get(name, [])
        together = sum(self.spent[n] for n in group)
        path = self.names.paths[name].rpartition(".")[2]
        title = path if self.names.kinds[name] in path else f"{path} ({self.names.kinds[name]})"
        stages = sorted({self.stage_of[n] for n in group})
        why, priced, alternatives = self._why(name, explain)
        sentences = (
            (why,) if isinstance(why, str) else self._sentences(why, name) if isinstance(why, Explanation) else why
        )
        recomputed = decision.op.recompute is not None and not decision.op.recompute.keep
        notes = [*filter(None, (operator.note,)), *(["recomputed in the backward"] if recomputed else [])]
        if times < len(group):
            notes.append(
                f"seconds and messages below are those of {self.names.path(name)}, as of {times} of {len(group)}"
            )
        return Leaf(
            title,
            self.names.joined(group),
            group,
            ", ".join(dict.fromkeys(f"{cut.word} {cut.size}" for cut in self.cuts[name].cuts))
            if name in self.cuts
            else "",
            strategy_text(decision),
            operator.source,
            f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}" if self.staged else "",
            tuple(seconds for seconds, _ in figures.values()),
            together / self.whole if self.whole else 0.0,
            tuple(sent for _, sent in figures.values()),
            decided(why, self.names) if isinstance(why, Explanation) else cause(decision, self.names),
            sentences,
            priced,
            alternatives,
            Grid.of(shares_table(shares_of(plan, name, costs[stage]), self.names)),
            _sends(mine),
            tuple(self._tensors(operator, self.clusters[stage])),
            tuple(notes),
        )

    def _sent(self, name: str) -> int:
        """Bytes that a rank sends for an operator."""
        return sum(c.sent for c in self.messages.get(name, ()))

    def _asked(self, name: str) -> str:
        """The command, or the call, that prices an operator's alternatives."""
        path = self.names.paths[name]
        word = path if self.names.single(path) else name
        return f"shardwright explain {self.file} {word}" if self.file else f'plan.explain("{word}")'

    def _why(self, name: str, explain: bool) -> tuple[Explanation | str | tuple[str, ...], bool, Grid | None]:
        """The explanation of an operator, the reason why there is none, or sentences; its alternatives."""
        if not explain:
            return f"Its alternatives are not priced here: {self._asked(name)} prices them.", False, None
        try:
            if not self.searches:
                return self._beside(name)
            explanation = explained(self.plan, name, searches=self._of_plans)
        except ShardwrightError as error:
            return f"Its alternatives cannot be priced: {error.message}", False, None
        if explanation.missing is not None:
            return f"No alternatives: {explanation.missing}.", False, None
        return (
            explanation,
            True,
            Grid.of(alternatives_table(explanation, self.names)) if explanation.alternatives else None,
        )

    def _beside(self, name: str) -> tuple[tuple[str, ...], bool, Grid | None]:
        """Sentences on the alternatives of an operator while nothing else changes, and their table."""
        found = local_alternatives(self.plan, name, searches=self._of_plans)
        if not found:
            return ("There is no other way to cut it, or this plan is none of the search's.",), True, None
        best, label = found[0], "next best" if found[0].alone >= 0 else "better"
        reason = f", since {because(best.holder, self.names)}" if best.holder is not None else ""
        unit = " a micro-batch" if self.staged else " a step"
        rows = [
            (strategy_text(a.decision), difference(a.alone), because(a.holder, self.names) if a.holder else "")
            for a in found
        ]
        sentences = (
            f"{label}: {strategy_text(best.decision)}, {difference(best.alone)}{unit} if nothing else changes{reason}.",
            f"Memory is not looked at here. With all else chosen anew: {self._asked(name)}.",
        )
        return sentences, True, Grid(("alternative", "alone", "held by"), tuple(rows), (1,))

    def _sentences(self, why: Explanation, name: str) -> tuple[str, ...]:
        return tuple(
            filter(None, (next_best(why, self.names), "" if why.alternatives else "there is no other way to cut it"))
        )

    def _tensors(self, operator: OperatorPlan, cluster: Cluster) -> Iterator[Tensor]:
        """The tensors of an operator; equal ones of one side once."""
        local = operator.local_shapes(0)
        sides = (("in", operator.in_shapes, operator.in_layouts), ("out", operator.out_shapes, operator.out_layouts))
        dtypes = iter(operator.dtypes)
        for (side, shapes, layouts), parts in zip(sides, local):
            for i, (shape, layout, part) in enumerate(zip(shapes, layouts, parts)):
                dtype = next(dtypes)
                name = self.names.value(operator.in_names[i]) if side == "in" else ""
                yield Tensor(
                    f"{side} {i}",
                    name,
                    f"{short_dtype(dtype)}{list(shape)}",
                    layout_text(layout),
                    "x".join(map(str, part)) or "scalar",
                    self._slices(layout, shape, cluster),
                )

    def _slices(
        self, layout: Layout, shape: Sequence[int], cluster: Cluster, sized: bool = True
    ) -> SlicePicture | None:
        if not shape or layout.dims is None:
            return None
        return self.pictures.of(layout, tuple(shape) if sized else None, cluster)

    # -- parameters --------------------------------------------------------------------------------------------------

    def places(self) -> tuple[Place, ...]:
        """The parameters and buffers by their storage, those with most elements first."""
        plan = self.plan
        groups: dict[tuple[int, str], dict[str, ParameterPlan]] = {}
        of_stage = {name: s for s, each in self.plans.items() for name, p in each.parameters.items() if p.name == name}
        for stage, each in self.plans.items():
            for name, p in each.parameters.items():
                if p.name == name and of_stage[name] == stage:
                    groups.setdefault((stage, layout_text(p.storage)), {})[name] = p
        dtypes = {v.name: v.stored.dtype for each in self.plans.values() for v in each.graph.sources()}
        out = []
        for (stage, _), parameters in sorted(
            groups.items(), key=lambda e: -sum(math.prod(p.shape) for p in e[1].values())
        ):
            first = next(iter(parameters.values()))
            elements = sum(math.prod(p.shape) for p in parameters.values())
            stored = sum(math.prod(p.local_shape(0)) * dtypes[p.name].itemsize for p in parameters.values())
            folded = folded_parameters({name: (p.shape, p.layout, p.storage, p.note) for name, p in parameters.items()})
            aliases: dict[str, list[str]] = {}
            for alias, name in plan.graph.aliases.items():
                aliases.setdefault(name, []).append(alias)
            rows = []
            for text, names in folded:
                p = parameters[names[0]]
                notes = [f"also {', '.join(a)}" for n in names if (a := aliases.get(n))]
                notes += [f"used as {layout_text(p.layout)}"] if p.storage != p.layout else []
                notes += [p.note] if p.note else []
                shape = "x".join(map(str, p.shape)) or "scalar"
                mine = "x".join(map(str, p.local_shape(0))) or "scalar"
                rows.append(f"{text}: {shape}, on a device {mine}" + "".join(f"; {note}" for note in notes))
            cluster = self.clusters[stage]
            at = (
                f", stage {stage} on ranks {tables.ranks_text(plan.stages[stage].ranks)}"
                if isinstance(plan, PipelinePlan)
                else ""
            )
            slices = self._slices(first.storage, first.shape, cluster, len({p.shape for p in parameters.values()}) == 1)
            text = slices.text if slices is not None else f"{layout_text(first.storage)}: a scalar on each device"
            out.append(Place(text + at, tuple(rows), len(parameters), f"{elements:,}", size_text(stored), slices))
        return tuple(out)

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> Section:
        """The memory of a device over a step, by kind, and the largest tensors at the peak."""
        plan, drawn, grids, lines = self.plan, [], [], []
        if isinstance(plan, PipelinePlan):
            simulation = plan.simulation
            console = console_of(None, UNLIMITED)
            grids += [Grid.of(t, "stages") for t in tables.stages(plan, simulation, console)]
            lines.append(f"the most that a device holds is {size_text(plan.peak)}")
        for stage, each in self.plans.items():
            line = each.stage_timeline if self.staged else each.timeline
            which = f"stage {stage}, one micro-batch: " if self.staged else ""
            schedule = each.stage_schedule if self.staged else each.schedule
            totals = line.totals()
            if not totals or not max(totals):
                lines.append(f"{which}nothing is held")
                continue
            kinds = list(dict.fromkeys((*KIND_COLOURS, *(h.what for h in line.allocations))))
            bands = {kind: band for kind in kinds if any(band := line.totals((kind,)))}
            seconds = [m.seconds for m in moments(each)]
            at = totals.index(max(totals))
            half = "forward" if at < line.forward else "backward"
            caption = (
                f"{which}the peak of {size_text(totals[at])} is in the {half} of {self.names.path(line.moments[at])}"
            )
            drawn.append((caption, memory(seconds, bands, line.forward, self.clusters[stage].memory)))
            if not self.staged:
                assert isinstance(plan, Plan)
                grids.append(Grid.of(tables.memory(line.kinds, plan.peak, self.cluster, plan.optimizer), "by kind"))
            grids.append(self._allocated(line, at, schedule, f"{which}the largest at the peak"))
        if self.cluster.memory < plan.peak:
            lines.append(f"that is more than a device has, which is {size_text(self.cluster.memory)}")
        return Section(tuple(lines), tuple(grids), tuple(drawn))

    def _allocated(self, line: MemoryTimeline, at: int, schedule: CommunicationSchedule, title: str) -> Grid:
        """The largest allocations at a moment; equal ones of several layers together."""
        found: dict[tuple[str, float], dict[str, float]] = {}
        for h in line.allocations:
            if h.start <= at < h.stop and h.bytes:
                one = found.setdefault((h.what, h.bytes), {})
                one[h.name] = one.get(h.name, 0.0) + h.bytes
        rows: list[tuple[float, tuple[str, ...]]] = []
        for (what, _), sizes in found.items():
            whose = {name: self._whose(name, what, schedule) for name in sizes}
            operators: dict[str, list[str]] = {}
            unnamed: dict[str, list[str]] = {}
            for name, operator in whose.items():
                (operators if operator in self.names.decisions else unnamed).setdefault(operator, []).append(name)
            together = [
                (f"result of {text}", [n for operator in group for n in operators[operator]])
                for text, group in self.names.folded(operators, lambda _: "")
            ]
            together += [
                (text, [n for operator in group for n in unnamed[operator]])
                for text, group in folded_parameters(dict.fromkeys(unnamed, ""))
            ]
            for text, members in together:
                nbytes = sum(sizes[n] for n in members)
                rows.append(
                    (nbytes, (what, text, f"{len(members)} x {size_text(nbytes / len(members))}", size_text(nbytes)))
                )
        rows.sort(key=lambda row: -row[0])
        cells = [row for _, row in rows[:MOST_HELD]]
        if rest := rows[MOST_HELD:]:
            cells.append(("", f"{len(rest)} further rows", "", size_text(sum(n for n, _ in rest))))
        return Grid(("kind", "tensor", "each", "together"), tuple(cells), (2, 3), title)

    def _whose(self, name: str, what: str, schedule: CommunicationSchedule) -> str:
        """The operator that produces a tensor, or the tensor's own name; of a message, the message."""
        if what == "under way":
            return str(schedule.messages[int(name.rpartition(" ")[2])])
        return name if name in self.names.decisions else self.names.producer(name) or name

    # -- communication -----------------------------------------------------------------------------------------------

    def communication(self) -> Section:
        """Collectives by bytes and seconds, and the seconds for which the computation waits for them."""
        lines, grids = [], []
        for stage, each in self.plans.items():
            which = f"stage {stage}, one micro-batch and what is sent once a step" if self.staged else ""
            step = each.stage_in_time_once if self.staged else each.in_time
            schedule = each.stage_schedule if self.staged else each.schedule
            spent = each.price.communication
            if not each.price.collectives:
                lines.append(f"{which}{': ' * self.staged}nothing is sent")
                continue
            hidden = _rest(spent, step.exposed)
            lines.append(
                f"{which}{': ' * self.staged}messages take {time_text(spent)}; {time_text(step.exposed)} exposed (the "
                f"computation waits), {time_text(hidden)} hidden behind {time_text(step.compute)} of computation"
            )
            grids.append(_collectives(each, step, schedule, self.clusters[stage], which))
            if isinstance(self.plan, Plan):
                lines += list(beside_lines(each))[1:]
        if isinstance(self.plan, PipelinePlan) and self.plan.transfers:
            grids.append(Grid.of(tables.crossing(self.plan, self.names), "between stages"))
        if self.omitted_text:
            lines.append(self.omitted_text)
        return Section(tuple(lines), tuple(grids))

    @property
    def omitted_text(self) -> str:
        """The redistributions of results, which belong to no operator, as a sentence; "" for none."""
        rest = sum(seconds for name, seconds in self.spent.items() if name not in self.names.decisions)
        return (
            f"redistributions of results and buffers, which belong to no operator, take {time_text(rest)}"
            if rest
            else ""
        )

    # -- a step in time ----------------------------------------------------------------------------------------------

    def timeline(self) -> Section:
        """The step in time: of a pipeline its actions and bubbles."""
        plan = self.plan
        simulation = plan.simulation if isinstance(plan, PipelinePlan) else timeline_of(plan)
        made = simulation.schedule
        lines: list[str] = []
        if isinstance(plan, PipelinePlan):
            lines.append(
                f"with messages beside computation, as on a library: {headline(timeline_of(plan, beside=True))}"
            )
            ranks = [plan.stages[made.placement.index(group)].ranks for group in range(made.groups)]
        else:
            ranks = [range(plan.devices)]
        if len(simulation.spans) > MOST_ACTIONS:
            return Section(
                (headline(simulation), *lines),
                missing=f"{len(simulation.spans):,} actions are too many to draw here: shardwright simulate "
                f"{self.file or 'plan.json'} --picture step.svg draws them",
            )
        named = [f"ranks {tables.ranks_text(r)}" if len(r) > 1 else f"rank {r[0]}" for r in ranks]
        beside = self.names.in_time(plan.in_time) if isinstance(plan, Plan) else None
        drawn = picture(simulation, named, beside=beside)
        waits = [
            (
                named[group],
                time_text(simulation.busy(group)),
                f"{1 - simulation.busy(group) / simulation.total:.1%}",
                size_text(simulation.peak(group)),
            )
            for group in range(made.groups)
            if simulation.total
        ]
        grid = Grid(("devices", "works", "waits", "peak memory"), tuple(waits), (1, 2, 3))
        return Section(tuple(lines), (grid,), (("", drawn),))


def _plans(plan: Plan | PipelinePlan) -> Iterator[tuple[int, Plan]]:
    if isinstance(plan, Plan):
        yield 0, plan
    else:
        yield from ((stage.number, stage.plan) for stage in plan.stages)


def _sends(collectives: Sequence[Collective]) -> Grid | None:
    """The collectives of an operator, equal ones once; None: it sends nothing."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for c in collectives:
        when = f"{c.phase}, again" if c.again else c.phase
        alike.setdefault((str(c.op), str(len(c.ranks)), when, c.cause, size_text(c.bytes)), []).append(c)
    rows = tuple((*key, str(len(group)), size_text(sum(c.sent for c in group))) for key, group in alike.items())
    columns = ("sends", "ranks", "phase", "for", "a rank's input", "times", "sent")
    return Grid(columns, rows, (1, 4, 5, 6)) if rows else None


def _rest(whole: float, part: float) -> float:
    """A sum of seconds without a part of it; 0 where they are equal but for rounding."""
    return rest if (rest := whole - part) > ROUNDING * whole else 0.0


def _collectives(plan: Plan, step: StepInTime, schedule: CommunicationSchedule, cluster: Cluster, title: str) -> Grid:
    """The collectives by kind, ranks and phase: bytes, seconds, and seconds of waiting."""
    sums: dict[tuple[CollectiveKind, Digits, str], list[float]] = {}  # by kind, digits and phase
    sent = sum(c.sent for c in plan.collectives(0))
    for c in plan.price.collectives:
        entry = sums.setdefault((c.kind, c.digits, c.phase), [0, 0.0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += c.bytes
        entry[2] += c.seconds
    for number, seconds in step.waits:
        message = schedule.messages[number]
        back = message.issue >= schedule.forward
        phase = {"gather": "storage", "redistribution": "backward" if back else "forward"}.get(message.role, "gradient")
        sums.setdefault((message.kind, message.digits, phase), [0, 0.0, 0.0, 0.0])[3] += seconds
    rows = []
    for (kind, digits, phase), (count, nbytes, seconds, waited) in sorted(sums.items(), key=lambda e: -e[1][2]):
        over = ", ".join(f"{units} by {level.name}" for level, units in cluster.crossed(digits))
        hidden = _rest(seconds, waited)
        rows.append(
            (
                str(kind),
                str(digits_size(digits)),
                over,
                str(phase),
                f"{count:g}",
                size_text(nbytes),
                *map(time_text, (seconds, waited, hidden)),
            )
        )
    total = [sum(entry[i] for entry in sums.values()) for i in range(3)]
    rows.append(
        (
            "all together",
            "",
            "",
            "",
            f"{total[0]:g}",
            size_text(total[1]),
            *map(time_text, (total[2], step.exposed, _rest(total[2], step.exposed))),
        )
    )
    columns = ("collective", "ranks", "over", "phase", "times", "bytes", "seconds", "exposed", "hidden")
    about = (
        f"bytes: of a rank's own inputs, together. A rank sends {size_text(sent)}: in an all-gather, say, it also "
        "passes on what it receives. Exposed: the computation waits; hidden: the rest. Messages of several collectives "
        "count as their first one, so a row may wait longer than its own seconds."
    )
    return Grid(columns, tuple(rows), (1, 4, 5, 6, 7, 8), title, about)
