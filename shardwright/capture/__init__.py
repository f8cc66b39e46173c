"""Capture: read a model into a `Graph`, and record every condition under which the graph is valid.

annotations          marks of the user: shard, recompute, set_stage, no_optimizer_parallel
export               one run of the forward through `torch.export`
recapture            other sizes, models of one structure: a light run of the forward, which follows a program
outlines             tensors without elements, and operators on them, for recaptures
graph_reader         the exported program, read into a `Graph`
graph_checks         graphs that are refused: trained constants, buffers that carry gradients
graph_template       the graph at other sizes, filled into one that was read before
source_lines         files, lines and modules of the user's code
mutation             in-place operators, rewritten as a program without writes
regions              recompute regions, autograd functions and vmap regions, each kept whole
observed_state       the Python state that the forward reads and writes
observed             parts of this observation: names in code, stand-ins, state of arrays
second_run           further captures of one call: counters, and values that change by themselves
side_effects         effects of a forward besides its result
watched_calls        prints, logs and hooks of a forward
guards               the Python state that was read, checked before each call
conditions           questions of a forward to torch (gradients, values, strides), which guards repeat
model_device         the device of a model
module_calls         the model with its loss, or a function of models, as one module; hooks at the borders of the model
hybrid_models        rank-local parameters for ``hybrid_parallel``
"""

from __future__ import annotations
