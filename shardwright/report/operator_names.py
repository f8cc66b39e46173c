"""Operators by their place in the model: the paths that tables show, and operators found by a path or its end.

    an operator                        its path (`runtime.profile_ranges`)
    equal operators of equal layers    layers.{0-11}.self_attn.q_proj

A name that a user gives is an operator's name, its path, a module's path, or the end of one: ``q_proj``.

Example: ``q_proj`` names the operators of all layers whose path ends so; ``layers.3.self_attn.q_proj`` one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cost.cost_model import StepInTime
from ..errors import PlanError
from ..partition.local_program import Decision
from ..pipeline.pipeline_plan import PipelinePlan
from ..rules.dims import send
from ..runtime.profile_ranges import operator_paths, plain_kind
from ..sharded_plan import Plan, near
from .description import layer_of, numbers_text

__all__ = ["Found", "OperatorNames"]

#: Numbers of equal layers in a folded path, as in ``layers.{1-31}.up``; the first of them stands for all.
FOLDED = re.compile(r"\{(\d+)[\d, -]*\}")


@dataclass(frozen=True)
class Found:
    """Operators that a name means.

    Attributes:
        path: the operator's or the module's path; with several equal ones, the folded path.
        operators: names of the operators; of several equal modules those of the first.
        alike: the number of equal modules or operators.
    """

    path: str
    operators: tuple[str, ...]
    alike: int = 1


class OperatorNames:
    """The operators of a plan by their paths.

    Args:
        plan: the plan.

    Attributes:
        paths: name of an operator -> its path.
        kinds: name of an operator -> its plain name, such as "linear".
        sources: names of the parameters, buffers and inputs, apart from what a stage of a pipeline receives.
        sent: name of the identity at the end of a stage -> the operator whose result it hands on.
    """

    def __init__(self, plan: Plan | PipelinePlan) -> None:
        plans = [stage.plan for stage in plan.stages] if isinstance(plan, PipelinePlan) else [plan]
        self.decisions: dict[str, Decision] = {
            name: d for each in plans for name, d in each.decisions.items() if d.op.target is not send
        }
        self.producers = {v: op.name for each in plans for v, op in each.graph.producers().items()}
        self.sent = {
            name: self.producers.get(d.op.inputs[0].name, d.op.inputs[0].name)
            for each in plans
            for name, d in each.decisions.items()
            if d.op.target is send
        }
        self.sources = {v.name for each in plans for v in each.graph.sources()} - self.producers.keys()
        self.buffers = {name for each in plans for name in each.graph.buffers}
        self.kinds = {name: plain_kind(d.op) for name, d in self.decisions.items()}
        self.paths = operator_paths(self.decisions)

    def path(self, name: str) -> str:
        """The path of an operator as it is shown: inside of a layer from the layers' container on, ``layers.0.up``;
        of a numbered module with the operator's kind, ``3 (linear)``; where a stage of a pipeline hands a result on,
        ``send of layers.0.up``."""
        if name in self.sent:
            return f"send of {self.path(self.sent[name])}"
        path = self.paths.get(name, name)
        kind = f" ({self.kinds[name]})" if name in self.kinds and self.is_numbered(path) else ""
        return self._short(path, self.layers.get(path)) + kind

    def text(self, name: str) -> str:
        """The path of an operator as it is shown, and its kind where the path does not say it."""
        path, kind = self.path(name), self.kinds.get(name, "")
        return path if kind in path else f"{path} ({kind})"

    def value(self, name: str) -> str:
        """The path of the operator that produces a value, ``result of ...``; a value that none produces as it is."""
        found = self.producer(name)
        return name if found is None else f"result of {self.path(found)}"

    def producer(self, value: str) -> str | None:
        """The operator that produces a value, one in another layout (``relu~1``), or one inside of the operator
        (``softmax.1``); None for a value that none produces."""
        name = value.partition("~")[0]
        found = self._made_by(name)
        while found in self.decisions and self.kinds[found] == "alias":  # another name of the same result
            name = self.decisions[found].op.inputs[0].name
            found = self._made_by(name)
        if found not in self.decisions and name not in self.sources:
            found = name.rpartition(".")[0]
        return found if found in self.decisions else None

    def _made_by(self, name: str) -> str:
        """The operator that makes a value, ahead of stages that hand it on; "" for a source of the plan, since a
        parameter's name may be an operator's, or begin with one."""
        found = "" if name in self.sources else self.producers.get(name, name)
        return self.sent.get(found, found)

    def in_time(self, step: StepInTime) -> StepInTime:
        """The same step, whose spans have the paths of operators and of the values that messages move."""
        return replace(step, spans=tuple(replace(span, what=self._moved(span.what)) for span in step.spans))

    def _moved(self, what: str) -> str:
        kind, comma, value = what.partition(", ")
        return f"{kind}, {self.value(value)}" if comma else self.path(what)

    @staticmethod
    def is_numbered(path: str) -> bool:
        """True for the path of a numbered module, which does not say what it is."""
        return path.rpartition(".")[2].isdecimal()

    @staticmethod
    def _short(path: str, layer: tuple[str, int] | None) -> str:
        above = "" if layer is None else layer[0].rpartition(".")[0]
        return path.removeprefix(f"{above}.") if above else path

    @cached_property
    def layers(self) -> dict[str, tuple[str, int]]:
        """Path of an operator -> (path of the container, number) of its layer."""
        return layer_of(self.paths.values())

    def folded(self, names: Iterable[str], same: Callable[[str], Hashable]) -> list[tuple[str, tuple[str, ...]]]:
        """Operators of equal layers joined: (the path for all of them, their names), in the order of the first ones.

        Args:
            names: of operators, or of other things, which stay alone.
            same: what must be equal of two operators.
        """
        groups: dict[tuple[Hashable, ...], list[str]] = {}
        for name in names:
            layer = self.layers.get(self.paths.get(name, name))
            inside = self._inside(name)
            key = (name,) if layer is None else (layer[0], inside, self.kinds[name], same(name))
            groups.setdefault(key, []).append(name)
        return [(self.joined(group), tuple(group)) for group in groups.values()]

    def joined(self, names: Sequence[str]) -> str:
        """The text for operators that differ in the number of their layer alone: ``layers.{0-3}.mlp.up``."""
        first = self.text(names[0])
        layer = self.layers.get(self.paths.get(names[0], names[0]))
        if len(names) == 1 or layer is None:
            return first
        numbers = numbers_text(self.layers[self.paths[name]][1] for name in names)
        container = layer[0].rpartition(".")[2]
        before = f"{container}.{layer[1]}".lstrip(".")
        return f"{container}.{{{numbers}}}".lstrip(".") + first.removeprefix(before)

    def _inside(self, name: str) -> str:
        """The path of an operator from its layer on."""
        path = self.paths.get(name, name)
        layer = self.layers.get(path)
        return path if layer is None else path.removeprefix(f"{layer[0]}.{layer[1]}".lstrip("."))

    # -- found by name

    @cached_property
    def modules(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a module -> the names of all operators in it."""
        out: dict[str, list[str]] = {}
        for name, d in self.decisions.items():
            place = self.paths[name] if self.paths[name].startswith(d.op.module) else d.op.module
            parts = place.split(".")
            for count in range(1, len(parts) + 1):
                out.setdefault(".".join(parts[:count]), []).append(name)
        return {path: tuple(names) for path, names in out.items()}

    def find(self, text: str) -> Found:
        """The operator or module that a name means; ``layers.{1-31}.up``, as tables write it, means the first of them.

        Raises:
            PlanError: there is none, with near ones; or the end of a path is that of several that are not split alike.
        """
        if text in self.decisions:
            return Found(self.paths[text], (text,))
        text = FOLDED.sub(r"\1", text)
        exact = self._found(text)
        if exact is not None:
            return exact
        ends = [path for path in dict.fromkeys((*self.modules, *self.paths.values())) if path.endswith(f".{text}")]
        alike: dict[tuple[Hashable, ...], list[Found]] = {}
        for found in filter(None, map(self._found, ends)):
            key = tuple(self._inside(name) for name in found.operators), tuple(map(self._split, found.operators))
            alike.setdefault(key, []).append(found)
        if not alike:
            known = (*self.modules, *self.paths.values(), *self.decisions)
            raise PlanError(f"no operator or module is called {text!r}", legal=near(text, known))
        groups = [self._group(group) for group in alike.values()]
        if len(groups) > 1:
            raise PlanError(
                f"{text!r} is the end of several paths, which are not split alike",
                legal="; ".join(f"{group.path} ({group.alike})" if group.alike > 1 else group.path for group in groups),
            )
        return groups[0]

    def single(self, path: str) -> bool:
        """True where a path means one operator."""
        found = self._found(path)
        return found is not None and len(found.operators) == 1

    def _found(self, path: str) -> Found | None:
        by_path = tuple(name for name, known in self.paths.items() if known == path)
        names = by_path or self.modules.get(path, ())
        real = [n for n in names if not (op := self.decisions[n].op).inputs or not self._counts(op.inputs)]
        if len(real) == 1:  # a batch norm also counts batches
            names = tuple(real)
        return Found(path, names) if names else None

    def _counts(self, inputs: Iterable[object]) -> bool:
        return self.buffers.issuperset(getattr(v, "name", "") for v in inputs)

    def _split(self, name: str) -> Hashable:
        d = self.decisions[name]
        return d.assignment.digits, d.cause, d.partial

    def _group(self, group: Sequence[Found]) -> Found:
        first = group[0]
        if len(group) == 1:
            return first
        layers = [self.layers.get(self.paths[found.operators[0]]) for found in group]
        if any(layer is None for layer in layers):
            return Found(first.path, first.operators, len(group))
        containers = {layer[0] for layer in layers if layer is not None}
        numbers = numbers_text(layer[1] for layer in layers if layer is not None)
        container = containers.pop()
        rest = first.path.removeprefix(f"{container}.{layers[0][1] if layers[0] else ''}".lstrip("."))
        return Found(f"{container}.{{{numbers}}}".lstrip(".") + rest, first.operators, len(group))
