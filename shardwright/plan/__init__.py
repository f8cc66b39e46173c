"""Planning: who decides how operators are split, and what follows from it."""

from .make import MODES, make_plan, plan
from .plan import Collective, OperatorPlan, ParameterPlan, Plan

__all__ = ["MODES", "Collective", "OperatorPlan", "ParameterPlan", "Plan", "make_plan", "plan"]
