"""The operators and their rules: one description each, see `notation` for the string and `registry` for the record."""

from . import (  # noqa: F401  (each family registers itself)
    arrange, attention, classes, conv, create, grouped, lookup, loss, matmul, moments, norm, normalise, padding, patches,
    pointwise, pool, random, recurrent, reduce, resample, scan, scatter, send, view,
)
from .expand import Builder, expand
from .notation import Assignment, Bound, Factor, bind, parse
from .registry import Rule, bound_rule, find_rule, has_rule, register, rule, whole_rule
from .strategy import assignment_of, output_layouts_of

__all__ = ["Assignment", "Bound", "Builder", "Factor", "Rule", "assignment_of", "bind", "bound_rule", "expand",
           "find_rule", "has_rule", "output_layouts_of", "parse", "register", "rule", "whole_rule"]
