"""Cost: seconds and bytes of a plan.

primitive_costs      seconds of one collective; floating point operations and bytes of one operator
cost_model           seconds of a redistribution, an operator, a step
communication_schedule     the collectives of a plan, the gradients summed together, and where each collective is issued
                           and waited for
communication_pass         the schedule of a program, made in one pass
memory_timeline      bytes held by a device at each moment of a step
"""

from __future__ import annotations
