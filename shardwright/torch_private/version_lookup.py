"""Names that a version of torch may lack: looked up when they are first used, each with the feature that needs it.

1. A name that an import needs (`NAMES`): torch's object, or a stand-in whose use is the error (`name_of_torch`).
2. A path that may be missing (`lookup`): the object or None.
3. A path or an attribute that must be there (`required`, `read_private`): the object or a `TorchVersionError`.

Example: ``lookup("torch._C.nothing")`` is None. ``required("torch._C.nothing", "counting")`` is the error "torch 2.13.0
has no torch._C.nothing, which this feature needs: counting".
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..errors import TorchVersionError

__all__ = ["NAMES", "Missing", "demand", "lookup", "missing_error", "name_of_torch", "read_private", "required"]

#: Name in this package -> (path in torch, the feature that needs it). Looked up when first imported.
NAMES = {
    "AdaptiveOutput": ("torch.nn.modules.adaptive._ASMoutput", "nn.AdaptiveLogSoftmaxWithLoss"),
    "BatchNorm": ("torch.nn.modules.batchnorm._BatchNorm", "batch norms whose momentum is None"),
    "CustomGraphPass": ("torch._inductor.custom_graph_pass.CustomGraphPass", "compiled programs on a library"),
    "CustomOpDef": ("torch._library.custom_ops.CustomOpDef", "a rule for a torch.library.custom_op"),
    "DisableTorchFunction": ("torch._C.DisableTorchFunction", "a torch.autograd.Function in a model"),
    "DisableTorchFunctionSubclass": ("torch._C.DisableTorchFunctionSubclass", "gradients that are DTensors"),
    "FakeTensor": ("torch._subclasses.fake_tensor.FakeTensor", "capturing a model"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg.FakeStore", "shardwright rehearse"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor.FakeTensorMode", "capturing a model"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem._StorageInfo", "checkpoints for torch's own loader"),
    "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", "seeing what operators dispatch to"),
    "allow_hooks": ("torch._C._autograd._saved_tensors_hooks_enable", "torch.func around a parallel model"),
    "assert_async": ("torch._assert_async", "checking indices of a tensor"),
    "at_backward_end": ("torch.autograd.Variable._execution_engine.queue_callback", "sums of gradients"),
    "backward_number": ("torch._C._current_graph_task_id", "sums of gradients"),
    "forbid_hooks": ("torch._C._autograd._saved_tensors_hooks_disable", "torch.func around a parallel model"),
    "forbidden_hooks": ("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", "torch.func around it"),
    "no_python_dispatcher": ("torch._dispatch.python.no_python_dispatcher", "a captured model at other sizes"),
    "no_torch_function": ("torch._C._disabled_torch_function_impl", "a captured model at other sizes"),
    "ctc_loss_backward": ("torch.ops.aten._ctc_loss_backward.Tensor", "nn.CTCLoss"),
    "dtensor_handlers": ("torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers", "averages of models"),
    "foreach_norm": ("torch._foreach_norm", "clip_grad_norm_"),
    "functional_all_gather": ("torch.ops._c10d_functional.all_gather_into_tensor", "collectives in processes"),
    "functional_all_reduce": ("torch.ops._c10d_functional.all_reduce", "collectives in processes"),
    "functional_all_to_all": ("torch.ops._c10d_functional.all_to_all_single", "collectives in processes"),
    "functional_reduce_scatter": ("torch.ops._c10d_functional.reduce_scatter_tensor", "collectives in processes"),
    "functional_wait": ("torch.ops._c10d_functional.wait_tensor", "collectives in processes"),
    "transforms": ("torch._C._functorch.get_interpreter_stack", "torch.func around a parallel model"),
    "unscale_": ("torch._amp_foreach_non_finite_check_and_unscale_", "torch.amp.GradScaler"),
    "options_of_mode": ("torch._inductor.list_mode_options", "modes of compiled programs on a library"),
    "mark_static_address": ("torch._dynamo.mark_static_address", "CUDA graphs of compiled programs"),
    "profiler_enabled": ("torch.autograd._profiler_enabled", "names in a profile"),
    "make_fx": ("torch.fx.experimental.proxy_tensor.make_fx", "torch.vmap in a model"),
    "pytree": ("torch.utils._pytree", "inputs and outputs in tuples, lists and dicts"),
    "stage_backward_input": ("torch.distributed.pipelining._backward.stage_backward_input", "split backwards"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward.stage_backward_weight", "split backwards"),
    "top_saved_tensors_hooks": ("torch._C._autograd._top_saved_tensors_default_hooks", "recomputation inside hooks"),
}
#: The names of `NAMES` that were looked up.
LOOKED_UP: dict[str, object] = {}


def missing_error(path: str, feature: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {path}, which this feature needs: {feature}",
        legal="a version of torch that docs/versions.md names",
    )


class Missing(type):
    """Type of the stand-ins: they can be imported, compared and inherited from, and nothing else."""

    path: str
    feature: str

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        raise missing_error(cls.path, cls.feature)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        raise missing_error(cls.path, cls.feature)


def lookup(path: str) -> Any:
    """The object at a path; None where a part of the path is missing."""
    found: Any = torch
    parts = path.split(".")
    for count, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            try:
                import_module(".".join(parts[:count]))
            except ImportError:
                return None
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def name_of_torch(name: str) -> Any:
    """A name of `NAMES`, or its stand-in."""
    if name not in LOOKED_UP:
        path, feature = NAMES[name]
        value = lookup(path)
        LOOKED_UP[name] = Missing(name, (), {"path": path, "feature": feature}) if value is None else value
    return LOOKED_UP[name]


def read_private(owner: object, name: str, feature: str) -> Any:
    """An attribute of one of torch's objects, which must be there."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing_error(f"{type(owner).__module__}.{type(owner).__qualname__}.{name}", feature) from None


def required(path: str, feature: str) -> Any:
    found = lookup(path)
    if found is None:
        raise missing_error(path, feature)
    return found


def demand(*names: str) -> None:
    """Say now, before anything runs, that names of this package are missing from this version of torch.

    Raises:
        TorchVersionError: one of them is.
    """
    for name in names:
        if isinstance(name_of_torch(name), Missing):
            raise missing_error(*NAMES[name])
