"""How a `problem.Problem` is solved: reductions, elimination, dual bounds, local search, limits of memory.

`plan.exact` puts them together; nothing here knows of operators, layouts or devices.
"""
