"""Measured beside planned: one rank of a plan, played alone on one device, and the trace of a run.

rehearse             the entry: a plan, or its file, and a rank; seconds of each operator, and the most bytes held
simulated_ranks      the process group of ranks that are not there, what their messages would take, and values of the
                     rank's shapes, drawn at random
step_in_time         the step in time with these seconds, beside the messages of the plan
rehearsal_report     measured seconds and bytes beside those of the plan, as values and as text
trace_comparison     the entry: a trace of torch.profiler, read by the names of its ranges, and its plan
"""

from __future__ import annotations
