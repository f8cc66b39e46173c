"""The wrapped model.

auto_parallel        `AutoParallel`: plans at the first call, then runs
call_planning        the plan of one call, on which all ranks agree
settings             its settings, as methods
graph_cache          the graphs of one model at the sizes that it is called with
sequence_buckets     sequences padded to a few lengths
whole_model          the plain model with whole parameters, for a while
model_copies         ``copy.deepcopy`` of a wrapped model
foreign_wrappers     DDP, FSDP2 and torch.compile around or inside of the model: errors
"""

from __future__ import annotations
