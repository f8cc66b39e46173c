"""Cost: what a plan takes, in seconds and bytes.

primitives           seconds of one collective; floating point operations and bytes of one operator
cost_model           seconds of a redistribution, an operator, a step
memory_timeline      bytes that a device holds, moment by moment
"""

from __future__ import annotations
