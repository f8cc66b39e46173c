"""Measured beside planned: one rank of a plan, played alone on one device, and the trace of a run.

rehearse             the entry: a plan, or its file, and a rank
absent_ranks         the process group of ranks that are not there, and what their messages would take
drawn_values         parameters, buffers and inputs of the rank's shapes, drawn at random
operator_clock       seconds of each operator, forward and backward
held_memory          the most bytes that the device holds
rehearsal_report     the numbers beside those of the plan, and their text
trace_comparison     the entry: a trace of torch.profiler, and its plan
trace_reading        the steps of a trace, by the names of its ranges
measured_table       measured seconds beside promised ones, as values and as a table
"""

from __future__ import annotations
