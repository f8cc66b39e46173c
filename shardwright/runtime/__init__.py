"""The runtime: execution of plans.

lowering             a plan as a `torch.fx` program
step_program         one call of a planned model
profile_ranges       names of operators, redistributions and buckets in a profile; the paths of operators
saved_tensors        recomputed regions, and weights regathered in the backward
deferred_init        parameters that are planned before they have values, and created as slices
slice_initialization parts of parameters that a rank draws alone, with the numbers of one device
compilation          torch.compile of planned programs
device_seed          the random operators of a compiled program, and its seed in the memory of its device
optimizer_guard      checks before an optimizer's step
replaced_parameters  parameter objects that a script holds since before the first call
compared_parameters  ``torch.testing.assert_close`` of parameters in processes
pipeline_step        one step of a pipeline
pipeline_p2p         the stages of a pipeline on processes, and the messages between them
redistribution_functions  the autograd functions of redistributions, and exchanges of halos, which both runtimes share
second_derivatives   gradients that are differentiated again
per_rank_values      parameters and results that are each rank's own
calibrate            measurement of the cluster
local, distributed   all ranks in one process; one process a rank
"""

from __future__ import annotations
