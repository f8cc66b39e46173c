"""Planners: a strategy for each operator of a graph.

planning_problem       the problem that a planner solves, the table of planners, and the devices that marks imply
semi_auto              marked operators as marked, the others along the batch; data_parallel
sharding_propagation   unmarked operators follow the marks
recursive_programming  all strategies, device count by device count
dynamic_programming    all strategies of all operators at once
limited_alternatives   plans within a limit of memory around one operator
memory_fit             the cheapest plan that fits into a device's memory
layout_demands         the cuts of operators that follow the marks
search_space           the strategies that a search considers for an operator
shared_values          the ways to serve a value with several consumers
graph_problem          a graph as a problem of nodes, states and costs, and back
plan_search            the part that all searching planners share; the storage of parameters with the fastest step,
                       hsdp(optimizer_level="auto"); a plan reused at other sizes of the inputs
memory_problem         the same problem with bytes and a limit
save_or_recompute      the choice between saving and recomputing a value
operator_memory        the tensors that an operator saves, and its memory while it runs
"""

from __future__ import annotations

# Each enters its planners in the table; messages name the modes in this order.
# isort: off
from . import semi_auto
from . import sharding_propagation
from . import recursive_programming
from . import dynamic_programming
# isort: on

__all__ = ["dynamic_programming", "recursive_programming", "semi_auto", "sharding_propagation"]
