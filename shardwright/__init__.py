"""Shardwright: a PyTorch model written for one device, trained on many."""

from .errors import (
    CaptureError, LayoutError, MissingRuleError, PlanError, RuleError, RuntimeMismatchError, SettingError,
    ShardwrightError, StrategyError,
)
from .layout import Digit, Layout
from .marks import Operator, shard
from .parallel import AutoParallel, RecaptureWarning
from .plan import Plan, plan
from .rules import rule
from .runtime.deferred import no_init_parameters
from .runtime.init import init
from .verify import verify

__all__ = [
    "AutoParallel", "CaptureError", "Digit", "Layout", "LayoutError", "MissingRuleError", "Operator", "Plan",
    "PlanError", "RecaptureWarning", "RuleError", "RuntimeMismatchError", "SettingError", "ShardwrightError",
    "StrategyError", "init", "no_init_parameters", "plan", "rule", "shard", "verify",
]
