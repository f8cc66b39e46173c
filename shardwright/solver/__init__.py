"""The solver: one state for each node of a `problem.Problem`, so that the sum of costs is least.

No module of the solver knows of operators, layouts or devices.

    problem              nodes, states, costs of pairs; a memory limit at every moment
    solve                the entry points, without and with a limit; the least limit that can be kept
    presolve             states and nodes that need not be searched; contradictions
    elimination          the exact least cost, node by node
    joint_minima         least entries of large joints of tables, for the elimination
    tree_reweighted      bounds and states where elimination is too large (TRW-S)
    anytime              the search that improves on them within its budget
    memory_rows          the moments at which a limit matters; states within the limit, spliced
    lagrangian           a bound by prices of memory
    cutting_planes       the best prices
    priced_search        the cheapest states within a limit, by these prices
    milp                 the same problem through HiGHS, to test the other solvers against
    search_memory        the bound on the host memory of a search, and its messages
"""

from __future__ import annotations
