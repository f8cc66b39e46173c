"""Pipelines: a graph in stages, a batch in micro-batches, and the order in which they are computed.

schedules            gpipe, 1f1b, interleaved, zero bubble, ZBV, and schedules from a CSV file
stages               the stages of a graph, and the blocks between which it may be cut
batch_semantics      what an operator makes of a batch that comes in parts
microbatch           the graph of one micro-batch, and how results are joined
microbatch_values    what each value is when the batch comes in micro-batches
pipeline_plan        the plan as a value
build                each stage planned on its own devices
stage_costs          costs of blocks, and the least time over all cuts
stage_search         ``stages="auto"``
simulate             a step in time: bubbles, waiting, memory
"""

from __future__ import annotations
