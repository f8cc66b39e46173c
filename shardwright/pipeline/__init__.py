"""Pipelines: a graph in stages, a batch in micro-batches, and a schedule of their computations.

schedules               gpipe, 1f1b, interleaved, zero bubble, ZBV, and schedules from a CSV file
stages                  the stages of a graph, and the units between which it may be cut
batch_semantics         the relation of an operator's output on a batch to its outputs on the parts
microbatch              the graph of one micro-batch, and the join of the parts' results
pipeline_plan           the plan as a value
build                   each stage planned on its own devices
stage_costs             costs of units, and the least time over all cuts
stage_search            ``stages="auto"``
stage_storage           ``hsdp(optimizer_level="auto")``
schedule_simulation     a step in time: bubbles, waiting, memory
"""

from __future__ import annotations
