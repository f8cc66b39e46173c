"""One process a rank, on NCCL, HCCL or Gloo.

rank_executor        the program on one rank
collectives          process groups, and the steps of a redistribution as collectives
shared_memory        collectives of ranks of one host, through memory that they share
parameters, dtensors          parameters: DTensors outside, plain tensors inside
gradients, buckets, gradient_edits    gradients: summed in buckets, and changed by the user
parameter_hooks      hooks that users put on parameters
agreement            all ranks come to one plan, or to one error
coordination         what ranks tell one another of a checkpoint
watchdog             where each rank is, which rank is missing, and how all end together
calibrate            the cluster, measured
"""

from __future__ import annotations
