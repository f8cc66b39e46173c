"""A model of the zoo on one device and on four: captured once, planned in each mode, trained for two steps."""

from __future__ import annotations

import copy
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from models import Built, Model
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright.capture.export import capture
from shardwright.capture.graph_reader import MarkUse
from shardwright.cluster import Cluster
from shardwright.cost.communication_schedule import Fusion, forward_collectives
from shardwright.graph import Graph, Op
from shardwright.layout import digits_size
from shardwright.planners.planning_problem import PriceBook
from shardwright.planners.search_space import assignments, prime_axes
from shardwright.planning import make_plan
from shardwright.process_runtime import Runtime
from shardwright.pytree_objects import opened
from shardwright.rules import bound_rule, find_rule
from shardwright.runtime.optimizer_guard import Accumulation
from shardwright.runtime.step_program import make_program
from shardwright.settings import Settings
from shardwright.sharded_plan import Plan
from shardwright.verification.node_comparison import worst
from shardwright.verification.value_precision import Allowed
from shardwright.verification.verify_report import Worst

__all__ = ["DEVICES", "MODES", "Outcome", "Zoo"]

DEVICES, STEPS = 4, 2

MODES = ("semi_auto", "sharding_propagation", "recursive_programming", "dynamic_programming")
#: The modes that follow marks: every operator is marked, or every fourth of those that multiply or read a weight. See
#: `marked`.
MARKED = {"semi_auto": 1, "sharding_propagation": 4}

#: Links that cost nothing: a search cuts whatever can be cut.
FREE = Cluster.of("h100x8", DEVICES).with_free_links()
#: Shared by the modes, and by models with operators of the same sizes.
PRICES = PriceBook()

#: As `shardwright.verify` has them.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
FLOOR = 1e-2


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mode.

    Attributes:
        cut, operators: how many operators are cut, and how many have a dim that may be cut in two.
        parameters: how many parameters are cut, and how many there are.
        sends: True where the devices take part in a collective.
        worst: of losses, gradients and parameters, that which differs most by what is allowed of it.
    """

    cut: int
    operators: int
    parameters: tuple[int, int]
    sends: bool
    worst: Worst

    @property
    def share(self) -> float:
        return self.cut / self.operators


@dataclass
class Trained:
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


class Zoo:
    """One model: its graph and its run on one device, made once."""

    def __init__(self, model: Model) -> None:
        torch.manual_seed(0)
        self.model = model
        self.built: Built = model.build()
        with torch.no_grad():
            for (
                parameter
            ) in self.built.net.parameters():  # a head of zeros would leave no gradient to anything before it
                if not parameter.any():
                    parameter.normal_(0.0, 0.1)
        built = self.built
        self.graph = capture(built.net, (*built.inputs, built.target), built.kwargs, loss_fn=built.loss)
        self.allowed = Allowed(self.graph, torch.float64, TOLERANCES, STEPS)
        self.precision = self.allowed.result(0)
        net = copy.deepcopy(built.net)
        self.one = train(net, lambda: built.loss(net(*built.inputs, **built.kwargs), built.target))

    def plan(self, mode: str) -> Plan:
        """The plan of a mode."""
        graph = self.graph
        if mode in MARKED:
            graph = marked(graph, self.model.name, MARKED[mode])
        return make_plan(graph, DEVICES, Settings(mode, cluster=FREE, sync_batch_norm=True), prices=PRICES)

    def run(self, mode: str) -> Outcome:
        """The outcome of a mode: the plan's run against that on one device."""
        plan, net = self.plan(mode), copy.deepcopy(self.built.net)
        program = make_program(
            plan,
            net,
            Runtime(False, DEVICES, 0, torch.device("cpu")),
            gradients_mean=False,
            before=None,
            fusion=Fusion(),
            accumulation=Accumulation(),
        )
        leaves = pytree.tree_leaves(opened(((*self.built.inputs, self.built.target), self.built.kwargs)))
        many = train(net, lambda: program(*leaves))
        found = max(
            (
                worst(self.one.losses, many.losses, lambda name: self.allowed.result(0), self.allowed),
                worst(self.one.gradients, many.gradients, self.allowed.of_parameter, self.allowed, FLOOR),
                worst(self.one.state, many.state, self.allowed.state, self.allowed, FLOOR),
            ),
            key=Worst.excess,
        )
        cut = [name for name, p in plan.parameters.items() if p.trainable and p.layout.cuts != (1,) * len(p.shape)]
        could = [d for d in plan.decisions.values() if any(f.splittable and f.size % 2 == 0 for f in d.bound.factors)]
        return Outcome(
            sum(bool(d.assignment.used) for d in could),
            len(could),
            (len(cut), sum(p.trainable for p in plan.parameters.values())),
            any(True for i in plan.program.instructions for _ in forward_collectives(i)) or bool(plan.collectives(0)),
            found,
        )


def train(net: torch.nn.Module, call: Any) -> Trained:
    """Two steps on one batch."""
    optimizer, losses, gradients = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9), {}, {}
    for step in range(STEPS):
        loss = call()
        losses[f"loss of step {step + 1}"] = loss.detach().clone()
        loss.backward()
        gradients = gradients or {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    state = {n: x.detach().clone() for n, x in (*net.named_parameters(), *net.named_buffers())}
    return Trained(losses, gradients, state)


def marked(graph: Graph, name: str, every: int) -> Graph:
    """The graph with marks, each a strategy drawn at random of those that use most devices.

    Args:
        every: 1: every operator is marked; n: every n-th of those that multiply or read a weight.
    """
    draw, count = random.Random(zlib.crc32(name.encode())), 0
    sources = {v.name for v in (*graph.parameters.values(), *graph.buffers.values())}
    shared = {name for name, uses in graph.consumers().items() if name in sources and len(uses) > 1}
    axes = prime_axes(DEVICES)

    def mark(op: Op) -> Op:
        nonlocal count
        held, described = {v.name for v in op.inputs} & sources, find_rule(op)
        weighs = any(len(v.shape) > 1 for v in op.inputs if v.name in held)
        if described is None or held & shared or (every > 1 and not (weighs or described.is_product(op))):
            return op
        bound = bound_rule(op, described)
        choices = list(assignments(bound, DEVICES, axes))
        most = max(digits_size(a.used) for a in choices)
        count += 1
        if most == 1 or (count - 1) % every:
            return op
        chosen = draw.choice([a for a in choices if digits_size(a.used) == most])
        return replace(op, mark=MarkUse(chosen, None, op.source, tuple(range(len(op.inputs)))))

    return graph.with_ops(tuple(map(mark, graph.ops)))
