"""The solver: one state for each node of a `problem.Problem`, so that the sum of costs is least. No module of it knows
of operators, layouts or devices.

    problem              nodes, states, costs of pairs; a limit of memory at every moment
    solve                the way in, without and with a limit
    presolve             states and nodes that need not be looked at
    elimination          the exact least cost, node by node
    trws, anytime        bounds and states where elimination is too large
    memory_rows          the moments at which a limit matters
    lagrangian           a bound by prices of memory
    cutting_planes       the best prices
    splicing             states that keep the limit, made of two that do not
    least_memory         the least limit that can be kept, and the error that names it
    milp                 the same problem through HiGHS, to test the others against
    search_memory        the bound on the host memory of a search, and its messages
"""

from __future__ import annotations
