"""The runtime: plans carried out.

lower                a plan as a `torch.fx` program
step_program         what one call of a planned model does
saved_tensors        recomputation and gathering again, while a program runs
deferred_init        parameters that come into being as slices
optimizer_guard      an optimizer step that would go wrong in silence, refused
pipeline_step        one step of a pipeline
pipeline_p2p         the stages of a pipeline on processes
call_boundary        parameters and results that are each rank's own
parameter_hooks      hooks that users put on parameters
freed                host memory that a step has freed
local, distributed   all ranks in one process; one process a rank
"""

from __future__ import annotations
