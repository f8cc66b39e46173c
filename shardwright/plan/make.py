"""Making a plan from a model: capture, decide, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture import capture
from ..cluster import Cluster
from ..errors import SettingError
from ..graph import Graph
from ..layerwise import check_mode, one_slice, own_parameters
from ..layout import Layout
from ..marks import stored_whole
from ..ops import COLLECTIVES, for_ranks
from ..reading import MarkUse
from ..recompute import with_policy
from .bytes import memory_of
from .costs import Costs
from .decision import feeding
from .document import Document, as_document
from .dynamic import dynamic_programming
from .fitting import CUT
from .hybrid import OwnPrograms, decided, fed_whole, local_inputs, with_stacked
from .memory import optimizer_bytes
from .own_statistics import with_own_statistics
from .plan import Plan
from .propagation import sharding_propagation
from .recursive import recursive_programming
from .search import Decided
from .semi_auto import data_parallel, semi_auto
from .storage import OptimizerParallel

__all__ = ["MODES", "make_plan", "plan"]

#: Mode -> the planner: (graph, devices, fed, on_missing_rule=, stored=, uneven=) -> a `Decided`, or its first two entries.
PLANNERS = {"data_parallel": data_parallel, "semi_auto": semi_auto}

#: Those that weigh what they decide: they are also given costs=, memory= and hsdp=.
SEARCHES = {"sharding_propagation": sharding_propagation, "recursive_programming": recursive_programming,
            "dynamic_programming": dynamic_programming}

#: Those of them that fit a plan into a limit of memory: they are then also given optimizer= and cut=.
FITTING = ("recursive_programming", "dynamic_programming")

#: The modes in which each device has batch-norm statistics of its own, unless asked for those of the whole batch.
OWN_STATISTICS = ("data_parallel",)

#: All parallel modes.
MODES = ("stand_alone", "hybrid_parallel", *PLANNERS, *SEARCHES)


def make_plan(graph: Graph, devices: int, parallel_mode: str, dataset_strategy: Any, *,
              on_missing_rule: str = "error", stored: dict[str, Layout] | None = None,
              sync_batch_norm: bool = False, hsdp: OptimizerParallel | None = None,
              used: dict[str, Layout] | None = None, own: OwnPrograms | None = None, uneven: bool = False,
              cluster: Any = None, memory: Any = None, optimizer: Any = "adam",
              whole: frozenset[str] = frozenset(), strategies: Document | None = None) -> Plan:
    """Plan a captured model; every error that a strategy can cause is raised here.

    Args:
        stored: how parameters and buffers are stored, where that is settled already.
        hsdp: how the other parameters are stored; None: as their operators ask for them.
        used: in which layouts an earlier plan's operators ask for parameters; None: as `stored`.
        own: in hybrid_parallel, whose graph has one rank's shapes, what else there is to know of it.
        uneven: dims that their cuts do not divide are padded, where that can be.
        cluster: what the plan is priced for: a `Cluster`, or what `Cluster.of` takes.
        memory: how much a device may hold, for the modes that search: bytes, "70GB", or "cluster"; None: as much as it
            takes.
        optimizer: what keeps state for each parameter: "adam", "momentum", "sgd", or its bytes an element.
        whole: parameters that are never stored cut over their replicas.
        strategies: a plan whose operators' strategies hold here too, over what the model's own marks say.

    Raises:
        ShardwrightError: a strategy or a setting that does not fit, with the operator and a legal choice.
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise SettingError(f"a plan is for a whole number of devices, not {devices!r}", legal="devices=8")
    if parallel_mode not in MODES:
        raise SettingError(f"unknown parallel_mode {parallel_mode!r}", legal=", ".join(MODES))
    if on_missing_rule not in ("error", "replicate"):
        raise SettingError(f"unknown on_missing_rule {on_missing_rule!r}", legal='"error" or "replicate"')
    cluster = Cluster.of(cluster, devices)
    memory = memory_of(memory, cluster)
    optimizer_bytes(optimizer)  # an optimizer that there is not is said now
    if memory is not None and parallel_mode not in SEARCHES:
        raise SettingError(f"memory={memory!r} limits what is searched; {parallel_mode} searches nothing",
                           legal=", ".join(SEARCHES))
    if strategies is not None and parallel_mode not in (*PLANNERS, *SEARCHES):
        raise SettingError(f"{strategies.path} has strategies of operators, which {parallel_mode} runs as they stand",
                           legal=", ".join((*PLANNERS, *SEARCHES)))
    if parallel_mode == "stand_alone":
        fed = feeding(graph, 1, "full_batch")
        made = Plan(graph, 1, "stand_alone", fed, *data_parallel(graph, 1, fed, on_missing_rule="replicate"),
                    cluster=cluster)
        made.routed
        return made
    if parallel_mode == "hybrid_parallel":
        if hsdp is not None:
            raise SettingError("hsdp cuts what is replicated; in hybrid_parallel each rank runs its own program",
                               legal='data_parallel or semi_auto, or no hsdp')
        own = own or OwnPrograms(frozenset(), False)
        made = Plan(with_stacked(graph, devices, own), devices, parallel_mode, fed_whole(graph, devices, dataset_strategy),
                    decided(graph, devices), {}, own=own, cluster=cluster)
        made.routed
        return made
    placed = next((op for op in graph.ops if op.target in COLLECTIVES), None)
    if placed is not None:
        raise SettingError(f"sw.ops.{placed.kind} joins the programs of ranks, which {parallel_mode} makes itself",
                           **placed.where, legal='parallel_mode="hybrid_parallel", or the model without it')
    if parallel_mode in OWN_STATISTICS and not sync_batch_norm:
        graph = with_own_statistics(graph, devices, on_missing_rule)
    fed = feeding(graph, devices, dataset_strategy)
    given = dict(on_missing_rule=on_missing_rule, stored=used or stored, uneven=uneven)
    planner = SEARCHES.get(parallel_mode) or PLANNERS[parallel_mode]
    if strategies is not None:
        graph, planner, stored = strategies.onto(graph, devices, planner, stored, on_missing_rule=on_missing_rule,
                                                 uneven=uneven, first=used is None)
    if parallel_mode in SEARCHES:
        costs = Costs(cluster, devices)
        if memory is not None:
            given |= dict(memory=memory)
            if parallel_mode in FITTING:
                given |= dict(optimizer=optimizer, cut=replace(CUT, whole=whole))
        result = planner(graph, devices, fed, costs=costs, hsdp=hsdp, **given)
    else:
        result = planner(graph, devices, fed, **given)
    decisions, carries, found, storage = Decided(*result)
    if memory is not None:  # what is computed again was decided too
        graph = graph.with_ops(tuple(decisions[op.name].op for op in graph.ops))
    made = Plan(graph, devices, parallel_mode, fed, decisions, carries, stored, hsdp or storage, cluster=cluster,
                found=found, optimizer=optimizer)
    made.routed  # whatever cannot be routed is said now
    return made


def plan(net: nn.Module, inputs: tuple, loss_fn: Any = None, targets: Any = None, *, parallel_mode: str = "semi_auto",
         devices: int = 8, dataset_strategy: Any = "full_batch", on_missing_rule: str = "error",
         marks: Mapping[str, Any] | None = None, kwargs: dict[str, Any] | None = None,
         sync_batch_norm: bool = False, hsdp: Mapping[str, Any] | OptimizerParallel | None = None,
         recompute: Any = None, uneven: bool = False, cluster: Any = None, memory: Any = None,
         optimizer: Any = "adam", strategies: Any = None) -> Plan:
    """Plan a model without running it: no process group, no devices, nothing allocated.

    Args:
        net: the model; its parameters may be real or meta.
        inputs: the model's inputs, a tuple of tensors of **global** shapes; real, fake or meta.
        loss_fn, targets: the loss, called as ``loss_fn(net(*inputs), targets)``; None: the forward alone.
        parallel_mode: one of `MODES`.
        devices: how many devices.
        dataset_strategy: "full_batch", "data_parallel", or a tuple with one entry per tensor input.
        on_missing_rule: "error", or "replicate": operators without a rule run whole, and the plan says so.
        marks: in_strategies by the name of the operator (as `Plan.operators` has it), over what the model carries.
        kwargs: keyword inputs of the model.
        sync_batch_norm: in data_parallel, batch norms train by the statistics of the whole batch, as in the other modes,
            instead of each device's own.
        hsdp: the arguments of `AutoParallel.hsdp` as a dict, ``{}`` for its defaults; None: no optimizer parallel.
        recompute: which operators are computed again in the backward, as `AutoParallel` takes it.
        uneven: whether cuts may be asked for that do not divide a dim, as `AutoParallel` takes it.
        cluster: the devices and their links, which costs are reckoned for: a `Cluster`, the name of a preset such as
            "h100x8", a JSON file; None: see `Cluster.of`.
        memory: how much a device may hold, for the modes that search: bytes, "70GB", or "cluster" for its own; None: as
            much as it takes.
        strategies: a file that `Plan.save` wrote: its operators' strategies hold here too.
        optimizer: what keeps state for each parameter, to reckon with its memory: "adam", "momentum", "sgd", or its bytes
            an element.

    Returns:
        The plan.

    Raises:
        ShardwrightError: what does not fit, with the operator, the line, the sizes and a legal choice.
    """
    if not isinstance(net, nn.Module):
        raise SettingError(f"{net!r} is not an nn.Module", legal="a model, and its inputs as a tuple")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if loss_fn is not None:
        inputs = (*inputs, targets)
    check_mode(net, parallel_mode)
    own = None
    if parallel_mode == "hybrid_parallel":
        own = OwnPrograms(own_parameters(net), loss_fn is not None)
        inputs, kwargs = local_inputs(tuple(inputs), kwargs or {}, devices, dataset_strategy)
    with for_ranks(devices), one_slice(net):
        graph = _with_marks(capture(net, tuple(inputs), kwargs, loss_fn=loss_fn), marks or {})
    return make_plan(with_policy(graph, recompute), devices, parallel_mode, dataset_strategy, on_missing_rule=on_missing_rule,
                     sync_batch_norm=sync_batch_norm, hsdp=optimizer_parallel(hsdp, net, loss_fn), own=own,
                     uneven=uneven, cluster=cluster, memory=memory, optimizer=optimizer,
                     whole=stored_whole(net, loss_fn), strategies=as_document(strategies))


def optimizer_parallel(given: Any, net: nn.Module, loss_fn: Any) -> OptimizerParallel | None:
    """The setting `hsdp` for a model, some of whose parameters may be left out of it.

    Raises:
        SettingError: a setting that there is not.
    """
    setting = OptimizerParallel.of(given)
    return None if setting is None else replace(setting, whole=stored_whole(net, loss_fn))


def _with_marks(graph: Graph, marks: Mapping[str, Any]) -> Graph:
    """The graph with further operators marked, by name."""
    names = [op.name for op in graph.ops]
    for name, strategy in marks.items():
        if name not in names:
            raise SettingError(f"marks: no operator is called {name!r}", strategy=strategy, legal=", ".join(names))
    return graph.with_ops(tuple(
        replace(op, mark=MarkUse(marks[op.name], None, op.source, tuple(range(len(op.inputs)))))
        if op.name in marks else op for op in graph.ops))
