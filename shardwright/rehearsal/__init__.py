"""Measured beside planned: one rank of a plan, played alone on one device, and the trace of a run.

rehearse             the entry: a plan, or its file, and a rank
absent_ranks         the process group of ranks that are not there, and what their messages would take
drawn_values         parameters, buffers and inputs of the rank's shapes, drawn at random
step_measurement     seconds of each operator, and the most bytes that the device holds
step_in_time         the step in time with these seconds, beside the messages of the plan
rehearsal_report     measured seconds and bytes beside those of the plan, as values and as text
trace_comparison     the entry: a trace of torch.profiler, and its plan
trace_reading        the steps of a trace, by the names of its ranges
"""

from __future__ import annotations
