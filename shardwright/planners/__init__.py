"""Planners: a strategy for each operator of a graph.

semi_auto            marks, and the batch where nothing is marked; data_parallel
propagation          marks that others follow: sharding_propagation
search               recursive_programming and dynamic_programming, within a device's memory
search_space         the strategies that a search considers for an operator
graph_problem        a graph as a problem of nodes, states and costs, and back
memory_problem       the same with bytes and a limit
remat_states         the choice between saving and recomputing a value
"""

from __future__ import annotations
