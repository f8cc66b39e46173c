"""Capture: from a model to a `Graph`, with all that decides whether the graph still stands for the model.

annotations          what a user marks: shard, recompute, set_stage, no_optimizer_parallel
export               one run of the forward through `torch.export`
graph_reader         the exported program, read into a `Graph`
in_place_reader      its operators that write in place
source_lines         files, lines and modules of the user's own code
mutation             writes into tensors, as a program without writes
regions              recompute regions, autograd functions and vmap regions, each kept whole
observation          Python state that the forward reads and writes
side_effects         what a forward does besides its result
guards               that state, checked before each call
memoised_functions   functions that keep their results, such as `functools.lru_cache`
module_hooks         hooks at the borders of the model
manual               parameters that are each rank's own, for ``hybrid_parallel``
scaling              one symbolic capture for every batch size and sequence length
"""

from __future__ import annotations
