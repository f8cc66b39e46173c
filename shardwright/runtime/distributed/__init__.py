"""One process a rank, on NCCL, HCCL or Gloo.

rank_executor        the program on one rank
compiled_parts       parts of a program that only a compiled program has
scheduled_collectives      collectives in two parts, issued and waited for where the schedule says
process_groups       the ranks that differ from this one in some digits alone
collectives          the steps of a redistribution as collectives
shared_memory        collectives of the ranks of one host, through memory that they share
parameters, dtensors          parameters: DTensors outside, plain tensors inside
gradients, buckets            gradients: DTensors of the parameters, summed in buckets
stage_weights        weights and gradients of a stage of a pipeline, over the micro-batches of a step
gradient_edits       gradients that the user edits between backward and step
requested_gradients  ``torch.autograd.grad`` of parameters
gradient_norms       norms of gradients and GradScaler's check, in one all-reduce
local_steps          steps of optimizers on each rank's slices
parameter_hooks      hooks that users put on parameters
agreement            one plan for all ranks, or one error
coordination         messages between ranks, as JSON
watch                the position of each rank, the rank that others wait for, and a common end
calibrate            measurement of the cluster
"""

from __future__ import annotations
