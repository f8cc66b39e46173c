"""One rank of a plan, played alone on one device.

rehearse             the entry: a plan, or its file, and a rank
absent_ranks         the process group of ranks that are not there, and what their messages would take
drawn_values         parameters, buffers and inputs of the rank's shapes, drawn at random
operator_clock       seconds of each operator, forward and backward
held_memory          the most bytes that the device holds
rehearsal_report     the numbers beside those of the plan, and their text
"""

from __future__ import annotations
