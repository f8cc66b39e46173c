"""Partition: from a graph and a strategy for each operator to the program of one rank.

local_program        instructions of the program, and the decisions it is partitioned from
partitioner          the redistribution on each edge between operators
parameter_sharding   the storage layout of each parameter: ZeRO/FSDP sharding (optimizer parallel)
padded_dims          padding of dims that their cuts do not divide
rematerialization    the values that autograd saves, the recomputed operators, the weights gathered again
in_place_sums        the redistributions that sum in the memory of their input
hybrid_parallel      graphs of one rank's own shapes: ``hybrid_parallel``, batch norm under data parallel
"""

from __future__ import annotations
