"""The wrapped model.

auto_parallel        `AutoParallel`: plans at the first call, then runs
call_planning        the plan of one call, on which all ranks agree
program_cache        the programs of a model: one for each kind of inputs and state of the model
data_shards          the part of the data that each process reads
train_step           step functions in place of a model, whose models are parallel while they run
value_and_grad       `value_and_grad` and `optimizer`, with which a step is a function of its gradients; torch.func
setting_methods      the settings of `AutoParallel` that are methods, and those that decide nothing of a plan
graph_cache          captured graphs of one model, one for each set of input sizes, of which some are derived
sequence_buckets     sequences padded to one of a few lengths
whole_model          the plain model with whole parameters, inside a ``with`` block
forwarded_attributes which attributes of a wrapper are those of its model, read and written
model_copies         ``copy.deepcopy`` of a wrapped model
foreign_wrappers     DDP, FSDP2 and torch.compile around or inside the model: errors
"""

from __future__ import annotations
