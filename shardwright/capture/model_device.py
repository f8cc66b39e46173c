"""The inputs of a call against the model: on one device, with values, and as many as the forward and the loss take.

A capture puts every fake parameter, buffer and input on this one device. `torch.arange(n, device=x.device)` in a
forward is then captured for it, and so are the casts of its autocast.

    parameters have values     their device
    parameters have none       that of the first input with values, else torch's default device, else the CPU

Processes take the device of the process instead, and move there a model or an input that is elsewhere. A model on
several devices is an error in processes too.

Example: a model on the meta device, with its input on "cuda:1", is captured for cuda:1. A model with ``fc.weight`` on
the CPU and ``out.weight`` on "cuda:0" is refused with both names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..accelerators import default_device
from ..errors import CaptureError, SettingError
from ..launch.device_choice import asked_device
from ..pytree_objects import opened
from ..torch_private import buffer_table, parameter_table, pytree
from .annotations import is_collecting
from .module_calls import LossFunction
from .source_lines import calling_line

__all__ = ["TensorTable", "check_call", "check_inputs", "check_values", "device_of", "place_of", "usable"]


def device_of(net: nn.Module, loss_fn: LossFunction | None = None, inputs: object = ()) -> torch.device:
    """The device of a model.

    Args:
        net, loss_fn: the model and its loss.
        inputs: the arguments of a call, which decide where no parameter or buffer has values.

    Raises:
        SettingError: parameters or buffers on several devices, with two of their names.
    """
    found: dict[torch.device, str] = {}
    for prefix, part in (("", net), ("loss_fn.", loss_fn)):
        if isinstance(part, nn.Module):
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                if tensor.device.type != "meta":
                    found.setdefault(tensor.device, prefix + name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise SettingError(
            f"the model is on several devices: {first} is on {one}, {second} on {other}",
            legal=f'one device for the whole model, such as model.to("{one}")',
        )
    for device in found:
        return device
    places = (*(x.device for x in _tensors(inputs)), default_device())
    return next((device for device in places if device.type != "meta"), torch.device("cpu"))


#: The parameters or buffers of a module, by their names.
TensorTable = dict[str, nn.Parameter | None] | dict[str, Tensor | None]


def place_of(module: nn.Module) -> tuple[TensorTable, str, torch.device] | None:
    """The table and the name of the first parameter, or else buffer, and its device; None: there is none."""
    tables: Iterator[TensorTable]
    tables = (table(part) for table in (parameter_table, buffer_table) for part in module.modules())
    return next(((t, name, tensor.device) for t in tables for name, tensor in t.items() if tensor is not None), None)


def usable(device: torch.device | str, *modules: object) -> torch.device:
    """A device for which models can be captured. Where nothing takes gradients, the device need not be there.

    Raises:
        SettingError: a device that is not there, where torch's autograd would end the process.
    """
    made = torch.device(device)
    trained = any(p.requires_grad for module in modules if isinstance(module, nn.Module) for p in module.parameters())
    if trained and made.type != "meta":
        asked_device(str(made), "capture")
    return made


def check_inputs(device: torch.device, inputs: object) -> None:
    """Check that the inputs of a call are on the device of the model, in a single process.

    Numbers (tensors without dims) may be on the CPU, as for any operator of torch.

    Raises:
        SettingError: an input that is elsewhere, with its place among the tensors.
    """
    for index, x in enumerate(_tensors(inputs)):
        if x.device != device and x.dim() and x.device.type != "meta":
            raise SettingError(f"input {index} is on {x.device}, the model on {device}", legal=f'input.to("{device}")')


def check_values(inputs: object, heard: Callable[[SettingError], SettingError] = lambda error: error) -> None:
    """Check that the inputs of a call that is to run have values.

    Args:
        inputs: of the call.
        heard: called with the error before it is raised.

    Raises:
        SettingError: an input on the meta device, with its place among the tensors.
    """
    for index, x in enumerate(_tensors(inputs)):
        if x.device.type == "meta":
            message = f"input {index} is on the meta device: it has no values"
            raise heard(SettingError(message, legal="shardwright.plan(net, inputs, …)"))


def check_call(
    net: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], loss_fn: LossFunction | None
) -> None:
    """Check that a call has the target that its loss needs, and none where there is no loss.

    Args:
        args: with `loss_fn` the last one is the target.

    Raises:
        CaptureError: the target is missing, or is one argument more than the forward takes; the call is made by the
            forward of a model that is captured.
    """
    if is_collecting():
        raise CaptureError(
            f"a parallel {type(net).__name__} is called inside of the model that is captured",
            legal="the plain model inside, and AutoParallel around the outermost model",
        )
    try:
        forward = inspect.signature(net.forward)
    except (TypeError, ValueError):  # a forward without a signature
        return

    def problem(arguments: tuple[object, ...]) -> str:
        try:
            forward.bind(*arguments, **kwargs)
        except TypeError as error:
            return f"TypeError: {error}"
        return ""

    called, loss = f"{type(net).__name__}.forward{forward}", getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if loss_fn is not None and (not args or (problem(args[:-1]) and not problem(args))):
        raise CaptureError(
            f"the target is missing: the arguments of the call are those of {called}, and none is left for {loss} "
            f"({problem(args[:-1]) or 'the target is the last positional argument'})",
            source=calling_line(),
            legal="the target as the last argument: model(x, target); without loss_fn the call returns the outputs",
        )
    if loss_fn is None and args and problem(args) and not problem(args[:-1]):
        raise CaptureError(
            f"{called} does not take the last of the {len(args)} arguments ({problem(args)}); if it is a target, there "
            "is no loss_fn to take it",
            source=calling_line(),
            legal="AutoParallel(net, loss_fn=nn.CrossEntropyLoss()), or the call without it",
        )


def _tensors(inputs: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(opened(inputs)) if isinstance(x, Tensor)]
