"""Attributes of a wrapper: which are its own, and which are those of the model that it wraps.

    model.beta              read from the model: the wrapper has no such attribute
    model.beta = 5.0        written where a read finds it: to the model. A name that neither has is new in the model,
                            as on one device
    model.head = layer      the model's submodule
    del model.beta          deleted from the model
    model.training = False  of both
    model.loss_fn = f       the wrapper's: the next call plans anew
    model.net = other       an error: a wrapper keeps its model

The wrapper's own are its settings, methods and properties, and those of every `nn.Module` (``forward``). A method of
the wrapper under a new name stays on the wrapper: accelerate keeps ``_original_forward`` so. In a step function, which
may have several models, all other names are the wrapper's own too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType

import torch
from torch import nn

from ..errors import SettingError
from ..process_runtime import current
from ..torch_private import MODULE_TABLES
from .foreign_wrappers import refuse_class
from .setting_methods import MODEL_KEYWORDS, SettingMethods
from .whole_model import WholeModel

__all__ = ["assigned", "attribute_of_net", "deleted", "signed_as_net"]

#: Methods of a model that need whole parameters: on every rank, or on rank 0 alone, which writes files.
_ON_ALL, _ON_FIRST = frozenset({"generate"}), frozenset({"save_pretrained", "push_to_hub"})


def attribute_of_net(model: SettingMethods, name: str) -> object:
    """An attribute of the wrapped model. ``generate`` runs under `whole` on every rank; ``save_pretrained`` and
    ``push_to_hub`` run under `whole` on rank 0, and the other ranks wait for it.

    Args:
        model: the wrapper.
        name: the attribute.

    Raises:
        AttributeError: the wrapped model has no such attribute.
    """
    value = getattr(model.__dict__["net"], name)
    if name not in _ON_ALL | _ON_FIRST or not callable(value):
        return value

    @functools.wraps(value)
    def called(*args: object, **kwargs: object) -> object:
        outer = model._whole
        if outer is not None:
            if outer.rank not in (None, current().rank) and current().processes:
                raise SettingError(
                    f"{name}() inside of whole(rank={outer.rank}), on rank {current().rank}, which has slices",
                    legal=f"net.{name}() where `as net` is not None",
                )
            if name in _ON_FIRST and outer.rank is None and current().rank:
                return None
            return getattr(model.net, name)(*args, **kwargs)
        first = name in _ON_FIRST and current().processes
        with WholeModel(model, 0 if first else None, torch.device("cpu") if first else None) as net:
            return getattr(net, name)(*args, **kwargs) if net is not None else None

    return called


class signed_as_net:
    """Decorator of the wrapper's ``forward``: `inspect.signature` returns the signature of the wrapped model, from
    which trainers tell which columns of the data the model takes."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __get__(self, model: SettingMethods | None, kind: type | None = None) -> Callable[..., object]:
        if model is None:
            return self.function
        if model.loss_fn is not None:  # the target comes last
            return MethodType(self.function, model)
        return _Bound(self.function, model)


class _Bound(functools.partial[object]):
    """A wrapper's ``forward`` with the signature of the wrapped model."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.args[0].net.forward)


def assigned(model: SettingMethods, name: str, value: object) -> bool:
    """Assign an attribute of the wrapped model.

    Args:
        model: the wrapper on which the attribute is assigned.
        name, value: the attribute.

    Returns:
        False where the attribute is the wrapper's own, which the caller assigns.

    Raises:
        SettingError: another model, another library's wrapper in the place of this one, a setting that is no
            attribute, or a name that both the wrapper and the model have.
    """
    if name == "__class__" and isinstance(value, type):
        refuse_class(value)
    if name == "full_batch":
        raise SettingError(f"full_batch={value!r} is no attribute of the model", legal=MODEL_KEYWORDS[name])
    net = _net(model)
    if net is None:
        return False
    if name == "net":
        raise SettingError(
            f"model.net is assigned: a {type(value).__name__} in the place of the {type(net).__name__}",
            legal="a new AutoParallel of the other model; a submodule by its name, model.head = …",
        )
    if not _is_own(model, name):
        if _is_method_of(model, value):
            return False
        setattr(net, name, value)
        return True
    if name == "training":
        net.training = bool(value)
        return False
    if not name.startswith("_") and not hasattr(nn.Module, name) and _has(net, name):
        raise SettingError(
            f"model.{name} is assigned, and both AutoParallel and the {type(net).__name__} that it wraps have {name!r}",
            legal=f"model.net.{name} = …",
        )
    if name == "loss_fn":
        _assign_loss(model, value)
        return True
    return False


def deleted(model: SettingMethods, name: str) -> bool:
    """Delete an attribute of the wrapped model; False where it is the wrapper's own, which the caller deletes."""
    net = _net(model)
    if net is None or _is_own(model, name):
        return False
    delattr(net, name)
    return True


def _net(model: SettingMethods) -> nn.Module | None:
    """The one model that a wrapper wraps; None for a step function, and while the wrapper is made."""
    attributes = vars(model)
    return None if attributes.get("_step") is not None else attributes.get("net")


def _is_own(model: SettingMethods, name: str) -> bool:
    return name in vars(model) or hasattr(type(model), name)


def _has(net: nn.Module, name: str) -> bool:
    attributes = vars(net)
    return name in attributes or hasattr(type(net), name) or any(name in attributes[table] for table in MODULE_TABLES)


def _is_method_of(model: SettingMethods, value: object) -> bool:
    """True for a method that is bound to the wrapper."""
    bound = value.args if isinstance(value, functools.partial) else (getattr(value, "__self__", None),)
    return any(x is model for x in bound)


def _assign_loss(model: SettingMethods, loss_fn: object) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise SettingError(f"the loss_fn {loss_fn!r} cannot be called", legal="nn.CrossEntropyLoss(), or a function")
    if model._programs:
        model.replan()
    vars(model)["loss_fn"] = loss_fn
    model._loss_trains = isinstance(loss_fn, nn.Module)
    model._note_parameters()
