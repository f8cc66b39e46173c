"""Capture: read a model into a `Graph`, and record every condition under which the graph is valid.

annotations          marks of the user: shard, recompute, set_stage, no_optimizer_parallel
export               one run of the forward through `torch.export`
recapture            other sizes: a light run of the forward, which follows an exported program
graph_reader         the exported program, read into a `Graph`
graph_template       the graph at other sizes, filled into one that was read before
in_place_reader      the in-place operators of the exported program
source_lines         files, lines and modules of the user's code
mutation             in-place writes, rewritten as a program without writes
kept_regions         recompute regions, autograd functions and vmap regions, each kept whole
python_state         Python state that the forward reads and writes
observed             parts of this observation: names in code, stand-ins, state of arrays
second_run           further captures of one call: counters, and values that change by themselves
side_effects         effects of a forward besides its result
watched_calls        prints, logs and hooks of a forward
guards               the Python state that was read, checked before each call
memoised_functions   functions that cache their results, such as `functools.lru_cache`
model_device         the device of a model
enclosing_modules    the model with its loss, or a function of models, as one module
module_hooks         hooks at the borders of the model
hybrid_models        rank-local parameters for ``hybrid_parallel``
"""

from __future__ import annotations
