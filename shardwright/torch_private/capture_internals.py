"""Private names of torch.export, fake tensors and torch.compile.

1. Names of torch's modules, attributes and loggers (`EXPORTER`, `COMPILED`, `NOISY_LOGGERS`).
2. Context managers that replace a private function or a setting of torch, and restore it at their end
   (`attributes_unchecked`, `stack_lines`, `without_cudnn`).
3. `called_above_autograd`, which has every operator handled by a function of the package.

Example: inside of ``called_above_autograd(handle)`` the call ``torch.add(x, 1)`` calls
``handle(aten.add.Tensor, (x, 1), {})``, and the result of ``handle`` is the result of the call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from . import version_lookup

__all__ = [
    "CHECKPOINT_LOGGER",
    "COMPILED",
    "COMPILER",
    "EXPORTER",
    "NOISY_LOGGERS",
    "VMAP_ENDS",
    "attributes_unchecked",
    "called_above_autograd",
    "code_written_late",
    "exporting",
    "in_place_of_checkpoint",
    "layouts_unrecorded",
    "recurrent_states",
    "recurrent_weights",
    "register_node",
    "stack_lines",
    "untraced",
    "vmap_function",
    "without_cudnn",
]

#: The package of ``torch.compile``, and an attribute of functions that it has compiled.
COMPILER, COMPILED = "torch._dynamo", "_torchdynamo_orig_callable"
EXPORTER = "torch.export._trace"  # the module that torch.export imports at its first call
CHECKPOINT_LOGGER = "torch._higher_order_ops.wrap"  # warns of operators in place in a compiled checkpoint

#: Loggers, below ``torch.``, that export fills beside the error that it raises.
NOISY_LOGGERS = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")

#: Functions between which a captured torch.vmap lies -> what they add to the depth.
VMAP_ENDS = {"_vmap_increment_nesting": 1, "_vmap_decrement_nesting": -1}


def vmap_function(target: Any) -> str:
    """The name of a functorch function that a captured torch.vmap calls; "" for any other target."""
    return target.__name__ if getattr(target, "__module__", "") == "torch._functorch.predispatch" else ""


@contextlib.contextmanager
def without_cudnn(device_types: Collection[str]) -> Iterator[None]:
    """Turn cuDNN off inside the ``with`` block, for operators on fake tensors of GPUs that this machine does not have.

    A CUDA build of torch asks cuDNN, and so the driver, for the layout of a convolution's result.
    """
    read, write = (
        version_lookup.lookup("torch._C._get_cudnn_enabled"),
        version_lookup.lookup("torch._C._set_cudnn_enabled"),
    )
    if "cuda" not in device_types or read is None or write is None or not read() or torch.cuda.is_available():
        yield
        return
    write(False)
    try:
        yield
    finally:
        write(True)


def register_node(*args: object, **kwargs: object) -> None:
    """Call `torch.utils._pytree.register_pytree_node`; do nothing where torch has no pytrees: captures report that."""
    if not isinstance(version_lookup.name_of_torch("pytree"), version_lookup.Missing):
        version_lookup.name_of_torch("pytree").register_pytree_node(*args, **kwargs)


@contextlib.contextmanager
def stack_lines(keep: Callable[[Any, Any], object], captured: object) -> Iterator[None]:
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
def _replaced(module: str, name: str, value: object) -> Iterator[None]:
    """Give a private name of a module another value inside the ``with`` block; nothing happens where torch lacks it."""
    owner = version_lookup.lookup(module)
    before = getattr(owner, name, None)
    if before is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, name, before)


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

    def recompile(module: torch.fx.GraphModule) -> object:
        if type(getattr(module.graph, "_codegen", None)) is not torch.fx.CodeGen:
            return plain(module)

        def forward(self: torch.fx.GraphModule, *args: object, **kwargs: object) -> Any:
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
    with (
        (version_lookup.lookup("torch.export._trace._ignore_backend_decomps") or contextlib.nullcontext)(),
        compiling,
        exporting,
    ):
        yield


@contextlib.contextmanager
def called_above_autograd(
    handle: Callable[..., Any], expected: Iterable[Any] = ()
) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Call ``handle(operator, args, kwargs)`` in place of every operator that is called inside the ``with`` block.

    The operators are those of an exported program: above autograd and autocast, and not taken apart. Inside of the
    context manager that the yielded function makes, `handle` calls operators itself. A function of ``sys.settrace``
    does not see what `handle` calls.

    Args:
        handle: the function that is called.
        expected: the operators that will be called, as far as they are known: their first calls take less time.
    """
    handle = _out_of_sight(handle)
    feature, mode, key = "a captured model at other sizes", _watching()(handle), torch._C.DispatchKey.PreDispatch
    plain = getattr(version_lookup.lookup("torch._library.utils"), "handle_dispatch_mode", None)
    pop, put = (
        version_lookup.required(f"torch._ops.{name}_pre_dispatch", feature) for name in ("_pop_mode_from", "_set_mode")
    )

    def found_by(func: Any) -> None:
        """Let calls of an operator find `handle`: torch takes its mode away, and puts it back, at any other call."""
        func._dispatch_cache[key] = lambda *args, **kwargs: handle(func, args, kwargs)
        ends.callback(func._dispatch_cache.pop, key, None)

    def at_once(top: Any, func: Any, *args: object, **kwargs: object) -> Any:
        if top is not mode:
            return plain(top, func, *args, **kwargs)  # type: ignore[misc]
        found_by(func)
        put(mode)
        with contextlib.ExitStack() as stack:
            stack.callback(pop)
            return handle(func, args, kwargs)

    with (
        contextlib.ExitStack() as ends,
        version_lookup.required("torch._dispatch.python.enable_python_dispatcher", feature)(),
        version_lookup.required("torch._dispatch.python.enable_pre_dispatch", feature)(),
        _replaced("torch._library.utils", "handle_dispatch_mode", at_once),
        mode,
    ):
        for func in expected:
            found_by(func)
        yield functools.partial(_Beneath, pop, put, mode)


class _Beneath:
    """A context in which operators are called beneath a mode.

    Args:
        pop, put: take the mode away, and put it back.
        mode: the mode.
    """

    __slots__ = ("_mode", "_pop", "_put")

    def __init__(self, pop: Callable[[], object], put: Callable[[object], object], mode: object) -> None:
        self._pop, self._put, self._mode = pop, put, mode

    def __enter__(self) -> None:
        self._pop()

    def __exit__(self, *_: object) -> None:
        self._put(self._mode)


def _out_of_sight(handle: Callable[..., object]) -> Callable[..., Any]:
    """A function that calls `handle` with Python's tracing off."""

    def call(func: object, args: object, kwargs: object) -> Any:
        traced = sys.gettrace()
        if traced is None:
            return handle(func, args, kwargs)
        sys.settrace(None)
        try:
            return handle(func, args, kwargs)
        finally:
            sys.settrace(traced)

    return call


@functools.cache
def _watching() -> type:
    """The class of modes of `called_above_autograd`. Above autograd torch takes its own modes and their subclasses."""
    base: Any = version_lookup.required(
        "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode", "a captured model at other sizes"
    )
    plain: Any = version_lookup.name_of_torch("TorchDispatchMode")

    class Watching(base):
        __enter__, __exit__ = plain.__enter__, plain.__exit__

        def __init__(self, handle: Callable[..., object]) -> None:
            plain.__init__(self, torch._C.DispatchKey.PreDispatch)
            self._mode_key, self._handle = torch._C._TorchDispatchModeKey.PROXY, handle

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            return self._handle(func, args, kwargs or {})

    return Watching


def untraced() -> Any:
    """A context manager that runs operators as if no capture were running."""
    return version_lookup.required(
        "torch.utils._python_dispatch._disable_current_modes", "a function that a capture leaves out"
    )()


@contextlib.contextmanager
def recurrent_states() -> Iterator[None]:
    """Correct the shapes of an LSTM's last states on fake tensors, inside the ``with`` block.

    torch 2.9 gives them one dim too many where the batch has more than one row.
    """
    theirs: Any = getattr(version_lookup.lookup("torch._decomp.decompositions"), "one_layer_lstm", None)

    def one_layer(*args: object, **kwargs: object) -> object:
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
    layers = [
        (layer, layer._flat_weights)
        for layer in module.modules()
        if isinstance(layer, nn.RNNBase) and hasattr(layer, "_flat_weights_names")
    ]
    for layer, _ in layers:
        layer._flat_weights = _Weights([getattr(layer, name, None) for name in layer._flat_weights_names])
    try:
        yield
    finally:
        for layer, weights in layers:
            layer._flat_weights = weights


@contextlib.contextmanager
def in_place_of_checkpoint(ours: Callable[..., object]) -> Iterator[None]:
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
