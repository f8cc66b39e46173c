"""Private names of torch: all of them in this folder, each with the feature that needs it.

A private name may be missing from a version of torch. An import from this package never fails for that: the imported
name is then a stand-in, whose use (a call, an attribute, an object of a class that inherits from it) raises
`TorchVersionError` with the version and the feature. Functions raise the same error when they are called.

Example: the import of ``FakeTensorMode`` never fails; ``FakeTensorMode()`` does where torch has no fake tensors.

version_lookup       names that a version of torch may lack, looked up when they are first used
tensor_internals     tensors and parameters
module_internals     tables of modules and hooks
operator_internals   operators and their schemas
capture_internals    torch.export, fake tensors, torch.compile
process_internals    process groups, launchers, pipeline schedules
"""

from __future__ import annotations

from typing import Any

from .capture_internals import (
    CHECKPOINT_LOGGER,
    COMPILED,
    COMPILER,
    EXPORTER,
    NOISY_LOGGERS,
    VMAP_ENDS,
    attributes_unchecked,
    called_above_autograd,
    code_written_late,
    exporting,
    in_place_of_checkpoint,
    layouts_unrecorded,
    recurrent_states,
    recurrent_weights,
    register_node,
    stack_lines,
    untraced,
    vmap_function,
    without_cudnn,
)
from .module_internals import (
    CALLED_INSTEAD,
    MODULE_TABLES,
    HooksOfAllModules,
    ModuleHooks,
    buffer_table,
    forward_hook_tables,
    hook_tables,
    hooks_of,
    hooks_of_all_modules,
    is_part,
    module_table,
    parameter_table,
    part_tables,
)
from .operator_internals import (
    CROSS_MAP_NORM,
    OpOverload,
    OpOverloadPacket,
    direct_apply,
    foreach_edits,
    fused_optimizers,
    operators,
    overload_name,
    overload_of,
    schema_of,
    torch_function,
    use_foreach,
)
from .process_internals import (
    GATHER_METHOD,
    SCATTER_METHOD,
    backward_can_start_at_functions,
    computation,
    default_store,
    group_timeout,
    lost_names,
    number_of_groups,
    schedule_without_transfers,
    without_names,
    worker_processes,
)
from .tensor_internals import (
    PARAMETER,
    GradientHooks,
    gradient_hooks,
    is_view,
    local_tensor,
    move_gradient_hooks,
    set_local_tensor,
    shell,
    spec_of,
    storage_id,
    take_comparisons,
    version_of,
)
from .version_lookup import NAMES, demand, name_of_torch

# fmt: off
__all__ = [
    "CALLED_INSTEAD", "CHECKPOINT_LOGGER", "COMPILED", "COMPILER", "CROSS_MAP_NORM", "EXPORTER", "GATHER_METHOD",
    "MODULE_TABLES", "NOISY_LOGGERS", "PARAMETER", "SCATTER_METHOD", "VMAP_ENDS", "GradientHooks", "HooksOfAllModules",
    "ModuleHooks", "OpOverload", "OpOverloadPacket", "attributes_unchecked", "backward_can_start_at_functions",
    "buffer_table", "called_above_autograd", "code_written_late", "computation", "default_store", "demand",
    "direct_apply", "exporting", "foreach_edits", "forward_hook_tables", "fused_optimizers", "gradient_hooks",
    "group_timeout", "hook_tables", "hooks_of", "hooks_of_all_modules", "in_place_of_checkpoint", "is_part", "is_view",
    "layouts_unrecorded", "local_tensor", "lost_names", "module_table", "move_gradient_hooks", "number_of_groups",
    "operators", "overload_name", "overload_of", "parameter_table", "part_tables", "recurrent_states",
    "recurrent_weights", "register_node", "schedule_without_transfers", "schema_of", "set_local_tensor", "shell",
    "spec_of", "stack_lines", "storage_id", "take_comparisons", "torch_function", "untraced", "use_foreach",
    "version_of", "vmap_function", "without_cudnn", "without_names", "worker_processes",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return name_of_torch(name)
