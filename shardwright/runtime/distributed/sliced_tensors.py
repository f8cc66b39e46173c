"""Tensors of which this rank has a slice, in a script's own code: each function of torch gives what one device gives.

Parameters of a parallel model are such tensors in several processes, and so is what a script computes of them.

    p.norm(), p.abs().sum(), p[2:5]    computed on slices by DTensor; where DTensor cannot, on the whole
    p + whole, x @ p.T, loss + p.sum() a plain tensor beside it: on the whole, and the result is a plain tensor
    p.add_(whole), p[0] = 0            each rank changes its slice
    p[0].zero_()                       an error where the row is a gathered copy: the parameter would not change
    p.normal_(), torch.rand_like(p)    the numbers that rank 0 would draw alone, of the whole
    p.norm().item(), p.numpy()         read by all ranks together, or an error on all of them
    print(p)                           this rank's slice; nothing is sent

Gradients of a plain result are averaged over the ranks on their way back: each rank may have computed its loss of its
own part of the batch. Equal gradients stay as they are.

    whole value of p, forward     w = all_gather(slices)
    backward                      gradient of a slice = the rank's part of Σ_r g_r / ranks,   g_r: that on rank r

A rank that reads alone (``if rank == 0: p.norm().item()``) waits at a wait point that the watchdog's verdict names.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...capture.annotations import CUT, whole_shape
from ...capture.source_lines import user_frame
from ...errors import SettingError, ShardwrightError
from ...partition.padded_dims import true_slice
from ...torch_private import PARAMETER, DisableTorchFunctionSubclass, local_tensor, pytree, set_local_tensor, spec_of
from . import dtensors
from .dtensors import ELSEWHERE, gathered_as, layout_of, padded_slice, with_values
from .gradient_edits import VIEWS, changes, drawing, is_copy, part_of, put
from .parameter_hooks import in_step_or_hook
from .rank_messages import ProcessRanks, ranks_of_now
from .rank_positions import WaitPoint, waiting
from .requested_gradients import reached

__all__ = ["ELEMENTWISE", "READS", "PartCopy", "SlicedTensor", "locals_of", "whole_value"]

#: Functions that optimizers apply in place, element by element, to a tensor with other tensors.
ELEMENTWISE = frozenset(
    {
        Tensor.add_,
        Tensor.sub_,
        Tensor.mul_,
        Tensor.div_,
        Tensor.lerp_,
        Tensor.addcmul_,
        Tensor.addcdiv_,
        Tensor.copy_,
        Tensor.masked_fill_,
        Tensor.__iadd__,
        Tensor.__isub__,
        Tensor.__imul__,
        Tensor.__itruediv__,
    }
)

#: Names of functions that return values to Python.
READS = frozenset(
    "item __float__ __int__ __bool__ __index__ __complex__ tolist numpy __array__ __format__ __contains__".split()
)

#: Names of functions that compute nothing.
_PLAIN = frozenset(
    "__get__ __set__ __delete__ dim ndimension size stride numel nelement element_size is_contiguous is_floating_point "
    "is_complex data_ptr get_device detach requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad "
    "untyped_storage storage_offset __len__ __hash__ is_same_size grad".split()
)

#: Functions that read only the shape, or the dtype, of their second argument -> those that take this.
_SHAPES = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand", "type_as": "to"}

#: Names of functions that draw random numbers: in place, of a tensor's shape, and others.
_DRAWN_IN_PLACE = frozenset(
    "uniform_ normal_ bernoulli_ random_ exponential_ geometric_ log_normal_ cauchy_ trunc_normal_ kaiming_uniform_ "
    "kaiming_normal_ xavier_uniform_ xavier_normal_".split()
)
_DRAWN_LIKE = frozenset("rand_like randn_like randint_like".split())
_DRAWN = frozenset(
    "bernoulli dropout alpha_dropout feature_alpha_dropout multinomial normal poisson binomial rrelu "
    "gumbel_softmax".split()
)

#: Attribute of a parameter: references to the tensors that share its memory.
_ALIASES = "_shardwright_aliases"

#: Errors of DTensor's where it has no way to compute a function on slices. It raises them before it computes, so the
#: function is then computed of the whole; what is wrong for the whole too raises there, in torch's own words.
_FAILURES = (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, IndexError, KeyError)

#: Gloo's errors of a closed connection and of a timeout are plain RuntimeErrors; each names the file of Gloo's.
_GLOO = "gloo/"

_ON_ALL = "`with model.whole() as net:`, which has whole parameters on every rank"

#: The wait point of the gathers and sums of this module.
_COMPUTING = WaitPoint("a function of a parameter, outside of the model, which every rank calls")


class SlicedTensor(DTensor):
    """A parameter of which this rank has a slice, or a value that was computed of one."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _PLAIN:
            with DisableTorchFunctionSubclass():
                result = _marked(function(*args, **(kwargs or {})))
            if name == "detach" and hasattr(args[0], CUT):
                present = [ref for ref in getattr(args[0], _ALIASES, ()) if ref() is not None]
                setattr(args[0], _ALIASES, [*present, weakref.ref(result)])
            return result
        return _called(function, name, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        """The values without autograd, as of any tensor."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        """Write the values into the slice. A tensor that was read as `data` before keeps the earlier values, as on one
        device: ``backup = p.data; p.data = average; …; p.data = backup``."""
        shape = tuple(self.shape if isinstance(values, DTensor) else whole_shape(self))
        if tuple(values.shape) != shape or values.dtype != self.dtype:
            raise SettingError(
                f"data of shape {tuple(values.shape)} and {values.dtype} is assigned to the parameter "
                f"{getattr(self, CUT, '')!r} of shape {shape} and {self.dtype}, of which this rank has a "
                "slice",
                legal="values of the same shape and dtype; net.bfloat16() before AutoParallel(net); "
                "AutoParallel(net, mixed_precision=…)",
            )
        if isinstance(values, DTensor) and local_tensor(values).data_ptr() == local_tensor(self).data_ptr():
            return
        own = local_tensor(self).detach().clone()
        for alias in [ref() for ref in getattr(self, _ALIASES, ())]:
            if alias is not None:
                set_local_tensor(alias, own)
        vars(self).pop(_ALIASES, None)
        with torch.no_grad():
            self.copy_(values)

    def backward(
        self, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """A backward, as of any tensor; hooks run with the functions of this class."""
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    @property
    def __tensor_flatten__(self) -> Any:
        """Nothing: ``net.to(…)`` assigns `data` of a tensor without it, and would exchange the objects of others."""
        raise AttributeError("__tensor_flatten__")

    def storage(self) -> Any:
        """Refuse: the memory of this rank is not that of the tensor. Libraries that write files ask for it."""
        raise SettingError(
            f"the memory of {_named(self)}, of which this rank has a slice, is asked for",
            source=_line(),
            legal="sw.save_checkpoint; net.state_dict() inside of `with model.whole(rank=0) as net:`",
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a parametrization of a parameter gives it other memory."""
        raise SettingError(
            f"set_ of {_named(self)}, of which this rank has a slice",
            source=_line(),
            legal="p.data = values of the same shape; parametrizations of the model before AutoParallel",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = type(self)
        self.__class__ = DTensor  # type: ignore[assignment]  # its copy is of its own class
        try:
            made = copy.deepcopy(self, memo)
        finally:
            self.__class__ = kind
        made.__class__ = kind
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A DTensor, which torch itself reads."""
        dtensors.warn_of_slice(self, getattr(self, CUT, ""))
        made = DTensor(local_tensor(self), spec_of(self), requires_grad=self.requires_grad)
        if hasattr(self, PARAMETER):
            setattr(made, PARAMETER, True)
        return made.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch asks so
        """The number of a tensor without dims; this rank's slice of any other. A slice is printed without the other
        ranks, so that one rank may print, and so may a debugger."""
        if not self.dim():
            return repr(whole_value(self, "print"))
        local = local_tensor(self).detach()
        layout = layout_of(self)
        if layout is None or layout.is_replicated:
            part = "" if layout is not None else f"a part of {tuple(whole_shape(self))}: "
        else:
            own = true_slice(layout, tuple(self.shape), dist.get_rank() - int(self.device_mesh.mesh.min()))
            dims = ", ".join(
                ":" if s.start in (0, None) and s.stop in (size, None) else f"{s.start}:{s.stop}"
                for s, size in zip(own, self.shape)
            )
            part = f"[{dims}] of {tuple(self.shape)}, on rank {dist.get_rank()}: "
        head = "Parameter containing:\n" if hasattr(self, PARAMETER) else ""
        return f"{head}{part}{local.requires_grad_(self.requires_grad)!r}"


class PartCopy(SlicedTensor):
    """A part of a parameter that was gathered from several ranks: read-only."""

    __slots__ = ()


def _marked(result: Any, kind: type[SlicedTensor] = SlicedTensor) -> Any:
    """A result in which DTensors are of a class of this module."""
    if type(result) is DTensor:
        result.__class__ = kind
    elif isinstance(result, (tuple, list)):
        for each in result:
            _marked(each, kind)
    return result


def _line() -> str | None:
    """The user's line, outside of other libraries where there is one."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack()]
    return user_frame([f for f in frames if "site-packages" not in f[0]]) or user_frame(frames) or None


def _named(x: Tensor) -> str:
    name = getattr(x, CUT, None)
    return f"the parameter {name!r}" if name else f"a tensor of shape {list(x.shape)} that was computed of parameters"


# -- the call of a function


def _called(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in READS:
        return _read(function, name, args, kwargs)
    if function is torch.autograd.backward:
        return _backward(*args, **kwargs)
    if isinstance(kwargs.get("out"), DTensor):
        out = kwargs.pop("out")
        with torch.no_grad():
            return out.copy_(_on_whole(function, args, kwargs))
    first: Any = args[0] if args else kwargs.get("tensor", kwargs.get("input", kwargs.get("self")))
    if changes(function):
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and getattr(function, "__module__", "") != nn.init.__name__
        ):
            return _changed(function, name, first, args, kwargs)
    if name in _SHAPES and len(args) == 2:
        if not isinstance(first, DTensor):
            return function(first, _same_shape(args[1]))
        return getattr(first, _SHAPES[name])(args[1].dtype if name == "type_as" else args[1].shape)
    if name.startswith("new_") and (name == "new_empty" or not _as_shape(args[1:], first.shape)):
        return function(torch.empty((), dtype=first.dtype, device=first.device), *args[1:], **kwargs)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in _DRAWN_LIKE:
        return _drawn_like(function, first, args[1:], kwargs)
    if name in _DRAWN:
        with drawing(first.device, kwargs):
            return _on_whole(function, args, kwargs)
    is_view = function in VIEWS and isinstance(first, DTensor)
    plain = [x for x in tensors if not isinstance(x, DTensor)]
    graded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    args, kwargs = pytree.tree_map_only(DTensor, _summable, (args, kwargs))
    specs = [spec_of(x) for x in tensors if isinstance(x, DTensor)]
    if (
        (plain and (graded or any(x.dim() for x in plain)))
        or any(spec.mesh != specs[0].mesh for spec in specs)
        or any(map(_is_irregular, specs))
    ):
        return _on_whole(function, args, kwargs)
    own_args, own_kwargs = pytree.tree_map_only(DTensor, _entered, (args, kwargs)) if graded else (args, kwargs)
    try:
        with waiting(_COMPUTING, _is_broken), DisableTorchFunctionSubclass():
            result = function(*own_args, **own_kwargs)
    except _FAILURES as error:
        if _is_broken(error):
            raise
        if not is_view or len(tensors) > 1 or any(isinstance(x, list) for x in args):
            return _on_whole(function, args, kwargs)
        with DisableTorchFunctionSubclass():  # a view of a copy that each rank has whole
            whole = DTensor.from_local(_whole(first), spec_of(first).mesh, _replicas(first), run_check=False)
            return _marked(function(whole, *args[1:], **kwargs), PartCopy)
    if is_view and len(tensors) == 1:
        for part in pytree.tree_leaves(result):
            if isinstance(part, DTensor):
                copied = isinstance(first, PartCopy) or is_copy(first, part, function, args)
                _marked(part, PartCopy if copied else SlicedTensor)
        return result
    return _marked(result)


def _is_broken(error: Exception) -> bool:
    """True where messages between ranks have failed, and the error is none of DTensor's about a function."""
    return isinstance(error, (dist.DistError, ShardwrightError)) or _GLOO in str(error)


def _backward(
    results: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """``torch.autograd.backward`` from plain results, so that hooks run with the functions of `SlicedTensor`."""
    results, grad_tensors = pytree.tree_map_only(DTensor, _whole, (results, grad_tensors))
    further: dict[str, Any] = {"retain_graph": retain_graph, "create_graph": create_graph}
    if inputs is None:
        return torch.autograd.backward(results, grad_tensors, **further)
    several = [results] if isinstance(results, Tensor) else list(results)
    leaves = reached(several, [inputs] if isinstance(inputs, Tensor) else list(inputs))
    if leaves:
        with DisableTorchFunctionSubclass():
            torch.autograd.backward(results, grad_tensors, inputs=leaves, **further)
    return None


def _as_shape(arguments: Sequence[Any], shape: torch.Size) -> bool:
    """True where the arguments of ``new_zeros`` say the shape."""
    if not arguments:
        return False
    sizes = arguments[0] if isinstance(arguments[0], (tuple, list)) else arguments
    return list(sizes) == list(shape)


def _same_shape(x: Any) -> Any:
    """A plain tensor of the shape, dtype and device of `x`, on the memory of one element."""
    if not isinstance(x, DTensor):
        return x
    return torch.empty((), dtype=x.dtype, device=x.device).expand(whole_shape(x))


def _is_irregular(spec: Any) -> bool:
    """True where several digits cut a dim that they do not divide: DTensor has other slices then."""
    for dim, size in enumerate(spec.shape):
        cuts = [spec.mesh.size(i) for i, p in enumerate(spec.placements) if isinstance(p, Shard) and p.dim == dim]
        parts = 1
        for cut in cuts:
            parts *= cut
        if len(cuts) > 1 and size % parts:
            return True
    return False


def _summable(x: DTensor) -> DTensor:
    """The tensor, completed where its partial values are no terms of a sum: DTensor joins and adds partial norms."""
    if not any(isinstance(p, Partial) and (type(p) is not Partial or p.reduce_op != "sum") for p in x.placements):
        return x
    with waiting(_COMPUTING, _is_broken), DisableTorchFunctionSubclass():
        return _marked(x.redistribute(placements=_replicas(x)))


def _replicas(x: DTensor) -> list[Replicate]:
    return [Replicate()] * len(x.placements)


def _on_whole(function: Any, args: Any, kwargs: Any) -> Any:
    """The function on whole tensors, with their gradients."""
    args, kwargs = pytree.tree_map_only(DTensor, _whole, (args, kwargs))
    return function(*args, **kwargs)


# -- whole values


def _whole(x: DTensor) -> Tensor:
    """The whole value on every rank, as a plain tensor, with a gradient back to the slices."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Whole.apply(_entered(x))
    return _gathered(x)


def _gathered(x: DTensor) -> Tensor:
    """The whole value on every rank of the mesh, in memory that may be that of `x`."""
    if x.device_mesh.mesh_dim_names == ELSEWHERE:
        raise _is_elsewhere(x)
    with waiting(_COMPUTING, _is_broken), torch.no_grad(), DisableTorchFunctionSubclass():
        if all(isinstance(p, Replicate) for p in x.placements):
            return local_tensor(x).detach()
        if layout_of(x) is not None:
            return gathered_as(x, padded_slice(x, local_tensor(x)))
        return x.redistribute(placements=_replicas(x)).to_local()


def _is_elsewhere(x: Tensor) -> SettingError:
    return SettingError(
        f"{_named(x)} is on the ranks of another stage of the pipeline, and its value is used outside of the model",
        source=_line(),
        legal=_ON_ALL,
    )


class _Entry(torch.autograd.Function):
    """A parameter on its way into a script's own computation: its gradient is brought to the parameter's slices."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.spec = spec_of(x)
        with DisableTorchFunctionSubclass():
            return _marked(x.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _laid_out(gradient, ctx.spec)


def _entered(x: DTensor) -> DTensor:
    return _Entry.apply(x) if x.requires_grad and x.is_leaf else x


def _laid_out(gradient: Tensor, spec: Any) -> Tensor:
    """A gradient on the mesh and in the placements of a parameter."""
    with DisableTorchFunctionSubclass(), torch.no_grad():
        if isinstance(gradient, DTensor):
            if gradient.placements == spec.placements:
                return gradient
            if not all(isinstance(p, Replicate) for p in gradient.placements):
                if not _is_irregular(spec):
                    with waiting(_COMPUTING, _is_broken):
                        return gradient.redistribute(placements=spec.placements)
                gradient = DTensor(_gathered(gradient), spec, requires_grad=False)
            gradient = local_tensor(gradient)
        like = DTensor(torch.empty(0), spec, requires_grad=False)
        layout = layout_of(like)
        part = gradient if layout is None else gradient[true_slice(layout, tuple(spec.shape), _own_rank(spec))]
        return DTensor(part.contiguous(), spec, requires_grad=False)


def _own_rank(spec: Any) -> int:
    """This rank's number among those of the layout."""
    return dist.get_rank() - int(spec.mesh.mesh.min())


class _Whole(torch.autograd.Function):
    """A whole plain value of slices; its gradient is averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.spec = spec_of(x)
        value = _gathered(x)
        return value.view_as(value) if value is local_tensor(x) else value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mesh = ctx.spec.mesh
        with DisableTorchFunctionSubclass(), waiting(_COMPUTING, _is_broken):
            mean = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone(
                memory_format=torch.contiguous_format
            )
            for axis in range(mesh.ndim):
                if mesh.size(axis) > 1:
                    dist.all_reduce(mean, group=mesh.get_group(axis))
            mean /= mesh.size()
            return DTensor.from_local(mean, mesh, [Replicate()] * mesh.ndim, run_check=False)


# -- values for Python


def _read(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if name == "__format__" and x.dim():
        return format(repr(x), *args[1:])
    if name in ("numpy", "__array__") and x.requires_grad and not kwargs.get("force"):
        return function(torch.empty(0).requires_grad_(), *args[1:], **kwargs)  # torch's own error
    if name == "__contains__":
        return _on_whole(function, args, kwargs)
    return function(whole_value(x, name.strip("_")), *args[1:], **kwargs)


def whole_value(x: Any, name: str) -> Tensor:
    """The whole value of a tensor that all ranks read together.

    Args:
        x: the tensor.
        name: of the function that reads it.

    Raises:
        SettingError: on all ranks, where they read different tensors, or where ranks do not have the tensor.
    """
    if not isinstance(x, DTensor):
        return x.detach()
    elsewhere = x.device_mesh.mesh_dim_names == ELSEWHERE
    if (
        not elsewhere
        and all(isinstance(p, Replicate) for p in x.placements)
        and x.device_mesh.size() == dist.get_world_size()
    ):
        return local_tensor(x).detach()
    if in_step_or_hook():
        return local_tensor(x).detach() if elsewhere else _gathered(x)
    asked = [name, getattr(x, CUT, ""), list(whole_shape(x)), str(x.dtype), elsewhere]
    digest = int.from_bytes(hashlib.blake2b(repr(asked).encode(), digest_size=7).digest(), "big")
    place = WaitPoint(
        f"{name}() of {_named(x)}, which every rank calls (one rank alone reads inside of `with model.whole(rank=0)`)"
    )
    with waiting(place):
        ranks = ranks_of_now("values of parameters")
        assert isinstance(ranks, ProcessRanks)
        ends = torch.tensor([digest, -digest], device="cpu")
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=ranks.group)
        if int(ends.sum()):
            _refuse(ranks.exchanged([*asked, _line() or ""]))
    if elsewhere:
        raise _is_elsewhere(x)
    return _gathered(x)


def _refuse(asked: Sequence[Any]) -> NoReturn:
    """Raise the error of ranks that read different values, or of values that some ranks do not have."""
    if any(elsewhere for *_, elsewhere, _ in asked):
        raise SettingError(f"{_asked_text(asked[0])}, which one stage of a pipeline has alone, is read", legal=_ON_ALL)
    rank = next(rank for rank, other in enumerate(asked) if other[:-1] != asked[0][:-1])
    raise SettingError(
        f"rank 0 reads {_asked_text(asked[0])}, and rank {rank} reads {_asked_text(asked[rank])}",
        legal="the same on every rank; `with model.whole(rank=0)` for one rank alone",
    )


def _asked_text(asked: Sequence[Any]) -> str:
    name, of, shape, dtype, _, line = asked
    where = f" ({line})" if line else ""
    return f"{name}() of {of or 'a value of parameters'} {dtype.removeprefix('torch.')}{shape}{where}"


# -- changes


def _changed(function: Any, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that writes to `target`, its first argument."""
    if isinstance(target, (list, tuple)):
        return _list_changed(function, name, target, args, kwargs)
    if not isinstance(target, DTensor):
        return _on_whole(function, args, kwargs)
    if isinstance(target, PartCopy):
        raise SettingError(
            f"{name.strip('_')} of a part of a parameter that is cut over several ranks: the part is a copy, and the "
            "parameter would stay as it is",
            source=_line(),
            legal="p[:2] = 0 or p.mul_(mask) with a mask of the parameter's whole shape, under torch.no_grad()",
        )
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dtensors.refuse_slices_of_others(tensors, target, getattr(target, CUT, ""))
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        if name.startswith("__i") and not target.is_leaf:  # Python gives the name to the result
            return _on_whole(getattr(torch.Tensor, f"__{name[3:]}"), args, kwargs)
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)  # torch's own error of a leaf
    if name in _DRAWN_IN_PLACE:
        with drawing(target.device, kwargs):
            return _changed_on_whole(function, target, args, kwargs, reads=False)
    if name == "__setitem__":
        with waiting(_COMPUTING, _is_broken), DisableTorchFunctionSubclass():
            put(target, *args[1:])
        return _written(target)
    if function in ELEMENTWISE:
        local = locals_of(args)
        if local is not None and not any(isinstance(x, Tensor) for x in kwargs.values()):
            if local[0].numel():
                function(*local, **kwargs)
            return _written(target)
    if all(isinstance(x, DTensor) or not x.dim() for x in tensors):
        try:
            with waiting(_COMPUTING, _is_broken), DisableTorchFunctionSubclass():
                return _marked(function(*args, **kwargs))
        except _FAILURES as error:
            if _is_broken(error):
                raise
    return _changed_on_whole(function, target, args, kwargs)


def _written(target: DTensor) -> DTensor:
    torch.autograd.graph.increment_version(target)
    return target


def _changed_on_whole(function: Any, target: DTensor, args: Any, kwargs: Any, reads: bool = True) -> Any:
    """A change of the whole tensor, of which each rank writes its part.

    Args:
        function, args, kwargs: the call.
        target: its first argument.
        reads: False where the present values do not matter.
    """
    shape = whole_shape(target)
    elsewhere = target.device_mesh.mesh_dim_names == ELSEWHERE
    if elsewhere and reads:
        return target
    whole = _gathered(target).clone() if reads else torch.empty(shape, dtype=target.dtype, device=target.device)
    args, kwargs = pytree.tree_map_only(DTensor, lambda x: whole if x is target else _whole(x), (args, kwargs))
    with torch.no_grad():
        function(*args, **kwargs)
    if whole.shape != shape:
        raise SettingError(
            f"{getattr(function, '__name__', function)} changes the shape of {_named(target)}, of which this rank has "
            "a slice",
            source=_line(),
            legal="the function that returns a new tensor",
        )
    if elsewhere:
        return target
    if layout_of(target) is not None or all(isinstance(p, Replicate) for p in target.placements):
        return with_values(target, whole)
    with DisableTorchFunctionSubclass(), torch.no_grad():
        part = DTensor.from_local(whole, target.device_mesh, _replicas(target), run_check=False)
        local_tensor(target).copy_(part.redistribute(placements=target.placements).to_local())
    return _written(target)


def _list_changed(function: Any, name: str, targets: Sequence[Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """A function of lists that writes to the first list, element by element."""
    if not name.startswith("_foreach_"):
        with waiting(_COMPUTING, _is_broken), DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    arguments = [
        [_beside(x, target) for x, target in zip(a, targets)] if isinstance(a, (list, tuple)) else a for a in args[1:]
    ]
    local = [local_tensor(x) if isinstance(x, DTensor) else x for x in targets]
    function(local, *arguments, **kwargs)
    for x in targets:
        torch.autograd.graph.increment_version(x)
    return None


def _beside(x: Any, target: Any) -> Any:
    """The elements of `x` that stand beside those of `target` on this rank."""
    if not isinstance(target, DTensor):
        return _whole(x) if isinstance(x, DTensor) else x
    if isinstance(x, DTensor):
        if (x.device_mesh, x.placements, x.shape) == (target.device_mesh, target.placements, target.shape):
            return local_tensor(x)
        x = _gathered(x)
    return part_of(target, x) if isinstance(x, Tensor) and x.dim() else x


def locals_of(args: Sequence[Any]) -> list[Any] | None:
    """The slices of DTensors of one placement, this rank's parts of plain tensors beside them, and numbers unchanged;
    None where an argument is none of these."""
    spec = spec_of(args[0])
    if spec is None:
        return None
    out = []
    for a in args:
        if isinstance(a, Tensor):
            theirs = spec_of(a)
            if theirs is None and a.dim():
                a = part_of(args[0], a) if local_tensor(args[0]).numel() else a
                if a is None:
                    return None
            elif (
                theirs is not None
                and theirs is not spec
                and (
                    (
                        a.dim()
                        and (theirs.mesh, theirs.placements, theirs.shape) != (spec.mesh, spec.placements, spec.shape)
                    )
                    or (not a.dim() and not all(isinstance(p, Replicate) for p in theirs.placements))
                )
            ):
                return None
            a = a if theirs is None else local_tensor(a)
        out.append(a)
    return out


# -- random numbers


def _drawn_like(function: Callable[..., Tensor], x: DTensor, args: Any, kwargs: Any) -> Tensor:
    """This rank's part of the random numbers that one device would draw."""
    dtype = kwargs.get("dtype") or x.dtype
    with drawing(x.device, kwargs):
        drawn = function(torch.empty(whole_shape(x), dtype=x.dtype, device=x.device), *args, **kwargs)
    made = SlicedTensor(torch.empty_like(local_tensor(x), dtype=dtype), spec_of(x), requires_grad=False)
    if made.dtype != x.dtype or any(isinstance(p, Partial) for p in x.placements):
        return drawn
    if x.device_mesh.mesh_dim_names != ELSEWHERE:
        with torch.no_grad():
            made.copy_(drawn)
    return made
