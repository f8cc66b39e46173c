"""One process a rank, on NCCL, HCCL or Gloo.

rank_executor          the program on one rank
scheduled_collectives  collectives in two parts, issued and waited for where the schedule says; compiled programs
process_groups         the ranks that differ from this one in some digits alone
collectives            the steps of a redistribution as collectives
shared_memory          collectives of the ranks of one host, through memory that they share
parameters, dtensors   parameters: DTensors outside, plain tensors inside
sliced_tensors         functions of parameters in a script's own code
gradient_tensors       the gradients of parameters: DTensors
gradient_sums          the sums of gradients over ranks, in buckets
stage_weights          weights and gradients of a stage of a pipeline, over the micro-batches of a step
gradient_edits         gradients that the user edits between backward and step; their norms and GradScaler's check
requested_gradients    ``torch.autograd.grad`` of parameters
optimizer_steps        steps of optimizers on each rank's slices
parameter_hooks        hooks that users put on parameters
agreement              one plan for all ranks, or one error
rank_messages          messages between ranks, as JSON
rank_positions         the position of each rank, the rank that others wait for, and the time at wait points
watchdog               messages beside the collectives, and the verdict that ends a run
"""

from __future__ import annotations
