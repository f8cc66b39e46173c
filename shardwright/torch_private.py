"""Private names of torch: all of them in this module, each with the feature that needs it.

A private name may be missing from a version of torch. An import from this module never fails for that: the imported
name is then a stand-in, whose use (a call, an attribute, an object of a class that inherits from it) raises
`TorchVersionError` with the version and the feature. Functions raise the same error when they are called.

Example: the import of ``FakeTensorMode`` never fails; ``FakeTensorMode()`` does where torch has no fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from .errors import TorchVersionError

# fmt: off
__all__ = [
    "CALLED_INSTEAD", "CHECKPOINT_LOGGER", "COMPILED", "COMPILER", "MODULE_TABLES", "NOISY_LOGGERS", "PARAMETER",
    "VMAP_ENDS", "GradientHooks", "HooksOfAllModules", "ModuleHooks", "OpOverload", "OpOverloadPacket",
    "attributes_unchecked", "backward_can_start_at_functions", "buffer_table", "called_above_autograd",
    "code_written_late", "computation", "default_store", "demand", "exporting", "foreach_edits", "fused_optimizers",
    "gather_flat", "gradient_hooks", "group_timeout", "hooks_of", "hooks_of_all_modules", "in_place_of_checkpoint",
    "is_view", "layouts_unrecorded", "local_tensor", "module_table", "move_gradient_hooks", "number_of_groups",
    "operators", "overload_name", "overload_of", "parameter_table", "recurrent_states", "recurrent_weights",
    "register_node", "scatter_flat", "schedule_without_transfers", "schema_of", "shell", "spec_of", "stack_lines",
    "storage_id", "torch_function", "untraced", "use_foreach", "version_of", "vmap_function", "without_cudnn",
    "worker_processes",
]
# fmt: on

#: Name in this module -> (path in torch, the feature that needs it). Looked up when first imported.
_NAMES = {
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

#: Types of ``torch.ops.aten.add.Tensor`` and of ``torch.ops.aten.add``; their names are private, the types are not.
OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)

#: Tables of an nn.Module: parameters, buffers, submodules, names of buffers that no state dict holds.
MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

#: Attribute of a module: the function that is called in place of its own ``__call__``, such as by ``module.compile()``.
CALLED_INSTEAD = "_compiled_call_impl"

#: The package of ``torch.compile``, and an attribute of functions that it has compiled.
COMPILER, COMPILED = "torch._dynamo", "_torchdynamo_orig_callable"
PARAMETER = "_is_param"  # attribute of a tensor that ``isinstance(tensor, nn.Parameter)`` asks for
CHECKPOINT_LOGGER = "torch._higher_order_ops.wrap"  # warns of operators in place in a compiled checkpoint

#: Loggers, below ``torch.``, that export fills beside the error that it raises.
NOISY_LOGGERS = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")

#: Functions between which a captured torch.vmap lies -> what they add to the depth.
VMAP_ENDS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def _missing_error(path: str, feature: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {path}, which this feature needs: {feature}",
        legal="a version of torch that docs/versions.md names",
    )


class _Missing(type):
    """Type of the stand-ins: they can be imported, compared and inherited from, and nothing else."""

    path: str
    feature: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise _missing_error(cls.path, cls.feature)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these
            raise AttributeError(name)
        raise _missing_error(cls.path, cls.feature)


def _found(path: str) -> Any:
    """The object at a path; None where a part of the path is missing."""
    held: Any = torch
    parts = path.split(".")
    for count, part in enumerate(parts[1:], start=2):
        if not hasattr(held, part):
            try:
                import_module(".".join(parts[:count]))
            except ImportError:
                return None
        held = getattr(held, part, None)
        if held is None:
            return None
    return held


def _attribute(name: str) -> Any:
    """A name of `_NAMES`, or its stand-in."""
    if name not in globals():
        path, feature = _NAMES[name]
        value = _found(path)
        globals()[name] = _Missing(name, (), {"path": path, "feature": feature}) if value is None else value
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _attribute(name)


def _read(held: Any, name: str, feature: str) -> Any:
    """An attribute of one of torch's objects, which must be there."""
    try:
        return getattr(held, name)
    except AttributeError:
        raise _missing_error(f"{type(held).__module__}.{type(held).__qualname__}.{name}", feature) from None


def _needed(path: str, feature: str) -> Any:
    found = _found(path)
    if found is None:
        raise _missing_error(path, feature)
    return found


def demand(*names: str) -> None:
    """Say now, before anything runs, that names of this module are missing from this version of torch.

    Raises:
        TorchVersionError: one of them is.
    """
    for name in names:
        if isinstance(_attribute(name), _Missing):
            raise _missing_error(*_NAMES[name])


# Tensors


def version_of(x: Tensor) -> int:
    """A number that grows when `x` is written to in place."""
    return _read(x, "_version", "noticing a tensor that is changed in place")


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that tells one storage from another, for fake and meta tensors too."""
    return _read(storage, "_cdata", "telling views of one tensor from other tensors")


def is_view(x: Tensor) -> bool:
    """True where autograd knows `x` as a view of another tensor."""
    return _read(x, "_is_view", "pipelines that split the backward")()


def local_tensor(x: Any) -> Tensor:
    """The slice of a DTensor on this rank itself; ``to_local()`` would make an autograd node and a view (60 us)."""
    return _read(x, "_local_tensor", "parameters that are DTensors")


def spec_of(x: Any) -> Any:
    """The mesh, placements, shape and strides of a DTensor in one object; None for a plain tensor."""
    spec = getattr(x, "_spec", None)
    if spec is None and hasattr(x, "placements"):
        raise _missing_error("torch.distributed.tensor.DTensor._spec", "parameters that are DTensors")
    return spec


def gradient_hooks(tensor: Tensor) -> GradientHooks:
    """The hooks of a leaf from ``register_hook`` and ``register_post_accumulate_grad_hook``."""
    return GradientHooks(
        _read(tensor, "_backward_hooks", "hooks of parameters") or {},
        _read(tensor, "_post_accumulate_grad_hooks", "hooks of parameters") or {},
    )


def move_gradient_hooks(old: Tensor, new: Tensor) -> None:
    """Put a leaf's hooks onto another leaf. The handles of the old hooks still remove them."""
    held = gradient_hooks(old)
    if held.before:
        new._backward_hooks = held.before
    if held.after:
        new._post_accumulate_grad_hooks = held.after


class GradientHooks(NamedTuple):
    """The hooks of a leaf, by number: `before` get its gradient, `after` get the leaf once its gradient is added."""

    before: dict[int, Any]
    after: dict[int, Any]


# Modules


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, by their names."""
    return _read(module, "_parameters", "capturing a model")


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by their names."""
    return _read(module, "_buffers", "capturing a model")


def module_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The direct submodules of a module, by their names."""
    return _read(module, "_modules", "running a planned program")


class ModuleHooks(NamedTuple):
    """The tables of a module's hooks: number of a hook -> the hook."""

    forward_pre: dict[int, Any]
    forward: dict[int, Any]
    backward_pre: dict[int, Any]
    backward: dict[int, Any]
    forward_pre_with_kwargs: dict[int, bool]
    forward_with_kwargs: dict[int, bool]


class HooksOfAllModules(NamedTuple):
    """The tables of the global hooks, which every module runs: number of a hook -> the hook."""

    forward_pre: dict[int, Any]
    forward: dict[int, Any]
    backward_pre: dict[int, Any]
    backward: dict[int, Any]
    forward_with_kwargs: dict[int, bool]
    buffer_registration: dict[int, Any]


def hooks_of(module: nn.Module) -> ModuleHooks:
    """The hooks of a module itself."""
    return ModuleHooks(
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
    )


def hooks_of_all_modules() -> HooksOfAllModules:
    """The global hooks of modules."""
    held = nn.modules.module
    return HooksOfAllModules(
        held._global_forward_pre_hooks,
        held._global_forward_hooks,
        held._global_backward_pre_hooks,
        held._global_backward_hooks,
        held._global_forward_hooks_with_kwargs,
        held._global_buffer_registration_hooks,
    )


# Operators


def schema_of(target: Any) -> Any:
    """The schema of an overload; None for anything else, such as a plain function."""
    try:
        return target._schema
    except AttributeError:
        if isinstance(target, OpOverload):
            raise _missing_error("torch._ops.OpOverload._schema", "reading a captured model") from None
        return None


def overload_name(target: Any) -> str:
    """``"Tensor"`` for ``aten.add.Tensor``; empty for anything but an overload."""
    name = getattr(target, "_overloadname", None)
    if name is None and isinstance(target, OpOverload):
        raise _missing_error("torch._ops.OpOverload._overloadname", "reading a captured model")
    return name or ""


def overload_of(custom_op: Any) -> Any:
    """The overload of a function made with ``torch.library.custom_op``; None for anything else."""
    if isinstance(custom_op, _attribute("CustomOpDef")):
        return _read(custom_op, "_opoverload", "a rule for a torch.library.custom_op")
    return None


def operators(*names: str) -> tuple[Any, ...]:
    """Overloads of ATen that not every version of torch has, or whose names are private: those of this version.

    Args:
        names: such as ``"_softmax.default"``; a name without an overload means the default one.
    """
    found = (_found(f"torch.ops.aten.{name if '.' in name else name + '.default'}") for name in names)
    return tuple(overload for overload in found if overload is not None)


def torch_function(name: str) -> Any:
    """The function ``torch.NAME`` of torch's C++ part, without a Python layer; None if there is none."""
    return getattr(_found("torch._C._VariableFunctions"), name, None)


def fused_optimizers() -> frozenset[Any]:
    """The kernels that are whole optimizer steps over lists of tensors."""
    return frozenset(_found(f"torch._fused_{name}_") for name in ("sgd", "adam", "adamw", "adagrad")) - {None}


def foreach_edits() -> frozenset[Any]:
    """The functions that change each tensor of a list in place, by one number, one scalar tensor, or a number each."""
    found = (_found(f"torch._foreach_{name}_") for name in ("mul", "div", "add", "sub", "clamp_min", "clamp_max"))
    return frozenset(function for function in found if function is not None)


def use_foreach(kind: type) -> None:
    """Have ``clip_grad_norm_`` and its kin take tensors of a subclass in lists, as DTensors."""
    known = _found("torch.utils._foreach_utils._foreach_supported_types")
    if known is not None and kind not in known:
        known.append(kind)


def vmap_function(target: Any) -> str:
    """The name of a functorch function that a captured torch.vmap calls; "" for any other target."""
    return target.__name__ if getattr(target, "__module__", "") == "torch._functorch.predispatch" else ""


# Capture


@contextlib.contextmanager
def without_cudnn(device_types: Collection[str]) -> Iterator[None]:
    """Turn cuDNN off inside the ``with`` block, for operators on fake tensors of GPUs that this machine does not have.

    A CUDA build of torch asks cuDNN, and so the driver, for the layout of a convolution's result.
    """
    read, write = _found("torch._C._get_cudnn_enabled"), _found("torch._C._set_cudnn_enabled")
    if "cuda" not in device_types or read is None or write is None or not read() or torch.cuda.is_available():
        yield
        return
    write(False)
    try:
        yield
    finally:
        write(True)


def register_node(*args: Any, **kwargs: Any) -> None:
    """Call `torch.utils._pytree.register_pytree_node`; do nothing where torch has no pytrees: captures report that."""
    if not isinstance(_attribute("pytree"), _Missing):
        _attribute("pytree").register_pytree_node(*args, **kwargs)


@contextlib.contextmanager
def stack_lines(keep: Callable[[Any, Any], Any], captured: Any) -> Iterator[None]:
    """Make traced operators keep other lines of their stack, inside the ``with`` block: those that export chooses where
    a version of torch lacks these two names.

    Args:
        keep: ``(tracer, frames) -> frames``, in place of export's own choice.
        captured: in place of the class that finds the stack, and describes every line of it.
    """
    with (
        _replaced("torch.fx.proxy.TracerBase", "_filter_traceback_frames", keep),
        _replaced("torch.fx.proxy", "CapturedTraceback", captured),
    ):
        yield


@contextlib.contextmanager
def _replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """Give a private name of a module another value inside the ``with`` block; nothing happens where torch lacks it."""
    held = _found(module)
    before = getattr(held, name, None)
    if before is not None:
        setattr(held, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(held, name, before)


@contextlib.contextmanager
def attributes_unchecked() -> Iterator[None]:
    """Turn off export's check for attributes that the forward assigned, inside the ``with`` block: the caller checks.

    In torch 2.9 export fails where the forward deleted an attribute, or put a new key into a dict, before the
    caller's own check could report it.
    """
    with _replaced("torch.export._trace", "_detect_attribute_assignment", lambda module: contextlib.nullcontext()):
        yield


@contextlib.contextmanager
def layouts_unrecorded() -> Iterator[None]:
    """Trace operators without ``tensor_meta`` inside the ``with`` block, and make modes of fake tensors without the
    Python stack, which torch keeps for one message.

    torch reads the strides of every result for the former. ``val`` has the traced tensor itself.
    """
    with (
        _replaced("torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", lambda tensor: None),
        _replaced("torch._subclasses.fake_tensor", "traceback", SimpleNamespace(extract_stack=list, format_list=list)),
    ):
        yield


@contextlib.contextmanager
def code_written_late() -> Iterator[None]:
    """Write a traced module's Python code at its first call, inside the ``with`` block.

    Export has the code written six times, a quarter of a capture's time, and never calls it.
    """
    plain = torch.fx.GraphModule.recompile

    def recompile(module: torch.fx.GraphModule) -> Any:
        if type(getattr(module.graph, "_codegen", None)) is not torch.fx.CodeGen:
            return plain(module)

        def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            plain(self)
            return type(self).forward(self, *args, **kwargs)

        type(module).forward = forward  # each GraphModule has a class of its own; `recompile` relies on it too
        module.__dict__.setdefault("_code", "")
        return None

    with _replaced("torch.fx.GraphModule", "recompile", recompile):
        yield


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Set what a model's code sees of an export inside the ``with`` block: ``torch.compiler.is_exporting()`` is true,
    cuDNN, MKLDNN and NNPACK are off."""
    compiling, exporting = (
        _replaced("torch.compiler", f"_is_{name}_flag", True) for name in ("compiling", "exporting")
    )
    with (_found("torch.export._trace._ignore_backend_decomps") or contextlib.nullcontext)(), compiling, exporting:
        yield


def shell(kind: type[Tensor], like: Any, storage_offset: int = 0, parameter: bool = False) -> Any:
    """A tensor of a subclass without elements.

    Args:
        kind: the subclass.
        like: (shape, strides, dtype, device, requires_grad).
        parameter: True where ``isinstance(made, nn.Parameter)`` is to be true.
    """
    shape, strides, dtype, device, requires_grad = like
    made = kind._make_wrapper_subclass(
        kind,
        shape,
        strides=strides,
        storage_offset=storage_offset,
        dtype=dtype,
        device=device,
        requires_grad=requires_grad,
    )
    if parameter:
        setattr(made, PARAMETER, True)
    return made


@contextlib.contextmanager
def called_above_autograd(handle: Callable[..., Any]) -> Iterator[Callable[[], contextlib.ExitStack]]:
    """Call ``handle(operator, args, kwargs)`` in place of every operator that is called inside the ``with`` block.

    The operators are those of an exported program: above autograd and autocast, and not taken apart. Inside of the
    context manager that the yielded function makes, `handle` calls operators itself.
    """
    feature, mode, key = "a captured model at other sizes", _watching()(handle), torch._C.DispatchKey.PreDispatch
    plain = getattr(_found("torch._library.utils"), "handle_dispatch_mode", None)
    pop, put = (_needed(f"torch._ops.{name}_pre_dispatch", feature) for name in ("_pop_mode_from", "_set_mode"))

    def beneath() -> contextlib.ExitStack:
        pop()
        (stack := contextlib.ExitStack()).callback(put, mode)
        return stack

    def at_once(top: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if top is not mode:
            return plain(top, func, *args, **kwargs)  # type: ignore[misc]
        # Later calls of the operator find `handle`: torch takes its mode away, and puts it back, at each call.
        func._dispatch_cache[key] = lambda *args, **kwargs: handle(func, args, kwargs)
        ends.callback(func._dispatch_cache.pop, key, None)
        put(mode)
        with contextlib.ExitStack() as stack:
            stack.callback(pop)
            return handle(func, args, kwargs)

    with (
        contextlib.ExitStack() as ends,
        _needed("torch._dispatch.python.enable_python_dispatcher", feature)(),
        _needed("torch._dispatch.python.enable_pre_dispatch", feature)(),
        _replaced("torch._library.utils", "handle_dispatch_mode", at_once),
        mode,
    ):
        yield beneath


@functools.cache
def _watching() -> type:
    """The class of modes of `called_above_autograd`. Above autograd torch takes its own modes and their subclasses."""
    own: Any = _needed("torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode", "a captured model at other sizes")
    plain: Any = _attribute("TorchDispatchMode")

    class Watching(own):
        __enter__, __exit__ = plain.__enter__, plain.__exit__

        def __init__(self, handle: Callable[..., Any]) -> None:
            plain.__init__(self, torch._C.DispatchKey.PreDispatch)
            self._mode_key, self._handle = torch._C._TorchDispatchModeKey.PROXY, handle

        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            return self._handle(func, args, kwargs or {})

    return Watching


def untraced() -> Any:
    """A context manager that runs operators as if no capture were running."""
    return _needed("torch.utils._python_dispatch._disable_current_modes", "a function that a capture leaves out")()


@contextlib.contextmanager
def recurrent_states() -> Iterator[None]:
    """Correct the shapes of an LSTM's last states on fake tensors, inside the ``with`` block.

    torch 2.9 gives them one dim too many where the batch has more than one row.
    """
    theirs: Any = getattr(_found("torch._decomp.decompositions"), "one_layer_lstm", None)

    def one_layer(*args: Any, **kwargs: Any) -> Any:
        out, states = theirs(*args, **kwargs)
        return out, tuple(x.squeeze(0) if x.dim() == 3 else x for x in states)

    with _replaced("torch._decomp.decompositions", "one_layer_lstm", one_layer):
        yield


class _Weights(list[object]):
    """A list that export does not inspect."""


@contextlib.contextmanager
def recurrent_weights(module: nn.Module) -> Iterator[None]:
    """Make recurrent layers compute with the parameters in their tables, inside the ``with`` block.

    The layers hold a second list of them, which is restored at the end. Export exchanges the tensors of that list;
    torch 2.9 takes this for an assignment by the model where the list is a plain one.
    """
    held = [
        (layer, layer._flat_weights)
        for layer in module.modules()
        if isinstance(layer, nn.RNNBase) and hasattr(layer, "_flat_weights_names")
    ]
    for layer, _ in held:
        layer._flat_weights = _Weights([getattr(layer, name, None) for name in layer._flat_weights_names])
    try:
        yield
    finally:
        for layer, weights in held:
            layer._flat_weights = weights


@contextlib.contextmanager
def in_place_of_checkpoint(ours: Callable[..., Any]) -> Iterator[None]:
    """Redirect calls of `torch.utils.checkpoint.checkpoint` to `ours` inside the ``with`` block, under any name of it.

    The function is a wrapper which calls the attribute ``__dynamo_disable`` of its inner function. Where a version of
    torch has another wrapper, the function is replaced in its module, and a warning says that other names are missed.
    """
    wrapper, name = checkpoint.checkpoint, "__dynamo_disable"
    owner = getattr(wrapper, "__wrapped__", None)
    if owner is None or name not in wrapper.__code__.co_consts:
        warnings.warn(
            f"torch {torch.__version__} calls torch.utils.checkpoint in another way: checkpoints that a model does not "
            "call as torch.utils.checkpoint.checkpoint(...) are not recomputed",
            stacklevel=2,
        )
        owner, name = checkpoint, "checkpoint"
    with contextlib.ExitStack() as stack:
        if name in vars(owner):
            stack.callback(setattr, owner, name, vars(owner)[name])
        else:
            stack.callback(delattr, owner, name)
        setattr(owner, name, ours)
        yield


# Processes


def default_store() -> Any:
    """The store by which the ranks of the default process group met."""
    feature = "watching the ranks, which init(watch=False) does without"
    return _needed("torch.distributed.distributed_c10d._get_default_store", feature)()


def group_timeout(device: torch.device | str) -> timedelta | None:
    """The timeout of collectives of the default process group; None if its backend does not tell."""
    try:
        world: Any = torch.distributed.group.WORLD
        return world._get_backend(torch.device(device)).options._timeout
    except (AttributeError, RuntimeError):
        return None


def gather_flat(group: Any, out: Tensor, x: Tensor) -> Any:
    """A process group's own all-gather of a flat tensor, as work. Torch 2.13 has given it a public name."""
    return (getattr(group, "all_gather_single", None) or group._allgather_base)(out, x)


def scatter_flat(group: Any, out: Tensor, x: Tensor, options: Any) -> Any:
    """A process group's own reduce-scatter of a flat tensor, as work."""
    return (getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base)(out, x, options)


def number_of_groups() -> int:
    """The number of process groups made by this process, as torch uses it in the names of groups of some ranks."""
    d = _needed("torch.distributed.distributed_c10d", "pipelines on ranks")
    return d._world.group_count if "group_count" in d._hash_ranks_to_str.__code__.co_names else len(d._world.pg_names)


def worker_processes(agent: Any) -> Any:
    """The started workers of an elastic agent, None before they start."""
    return _read(agent, "_pcontext", "`shardwright run`")


def computation(action: Any) -> str:
    """The letter of an action of torch's own schedules, F, B, I or W: the value of an enum, in torch 2.9 its text."""
    value = action.computation_type.value
    return value if isinstance(value, str) else str(action.computation_type)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


@functools.cache
def backward_can_start_at_functions() -> bool:
    """True where a backward may start at a torch.autograd.Function, as one to the weights does; False in torch 2.9."""
    with torch.enable_grad():
        node = _Probe.apply(torch.ones(1, device="cpu", requires_grad=True)).grad_fn
    try:
        return node._input_metadata is not None
    except RuntimeError:
        return False


def schedule_without_transfers(base: type) -> type:
    """A schedule class of torch.distributed.pipelining whose constructor only makes the order of computations.

    Its sends and receives follow from a plan, and torch takes seconds to make them for long schedules.
    """
    return type(base.__name__, (base,), {"_prepare_schedule_with_comms": lambda self, order: None})
