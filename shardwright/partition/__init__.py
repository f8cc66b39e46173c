"""Partition: from a graph and a strategy for each operator to the program of one rank.

local_program        instructions of the program, and the decisions that it is made from
partitioner          which redistribution runs on which edge
parameter_sharding   which parameter is stored how (ZeRO, FSDP; here: optimizer parallel)
uneven               dims that their cuts do not divide
rematerialization    what autograd saves, what is recomputed, which weights are gathered again
rank_local           programs that are each rank's own: ``hybrid_parallel``, batch norm under data parallel
"""

from __future__ import annotations
