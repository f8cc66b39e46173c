"""Planning: who decides how operators are split, and what follows from it."""

from .make import MODES, make_pipeline, make_plan, plan
from .pipelined import PipelinePlan
from .plan import Collective, OperatorPlan, ParameterPlan, Plan

__all__ = ["MODES", "Collective", "OperatorPlan", "ParameterPlan", "PipelinePlan", "Plan",
           "make_pipeline", "make_plan", "plan"]
