"""Rules: one description for each operator, from which strategies, redistributions and costs follow.

notation             the string of a rule, its factors and their assignment
registry             operator -> its rule; operators expanded into simpler ones
result_shapes        shapes and dtypes of an operator's results, by formulas or on the meta device
user_strategy        cuts or Layouts given by a user -> an assignment, or an error with the reason
dims                 names of dims, positions in a slice, padding
pointwise, matmul, spatial, reduction, normalization, loss, attention, shape, indexing, recurrent,
linear_algebra, fourier, random_operators
                     the families of operators
random_numbers/      the numbers that random operators draw, equal under every cut; masks of dropouts
"""

from __future__ import annotations

from . import (
    attention,
    dims,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalization,
    pointwise,
    random_numbers,
    random_operators,
    recurrent,
    reduction,
    shape,
    spatial,
)
from .notation import Assignment, Bound, Factor, bind, parse
from .registry import Builder, Rule, bound_rule, expand, find_rule, has_rule, register, rule, whole_rule
from .user_strategy import assignment_of, in_order, output_layouts_of, ungathered_layouts

__all__ = [
    "Assignment",
    "Bound",
    "Builder",
    "Factor",
    "Rule",
    "assignment_of",
    "bind",
    "bound_rule",
    "expand",
    "find_rule",
    "has_rule",
    "in_order",
    "output_layouts_of",
    "parse",
    "register",
    "rule",
    "ungathered_layouts",
    "whole_rule",
]
