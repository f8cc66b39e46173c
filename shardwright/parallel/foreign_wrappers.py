"""Errors for other libraries' wrappers around a parallel model, inside it, or in its place, with the alternative.

around     DDP(model), nn.DataParallel(model), FSDP(model), torch.compile(model): each registers the model as a
           submodule of its own, which torch's hook for registrations sees; fully_shard(model) puts a hook on the
           model and changes its class
inside     AutoParallel(DDP(net)), torch.compile on a block, fully_shard(net), net.compile(): `check_inside` looks
           for them when the model is wrapped, and before each planning

Example: after ``net[0].compile()`` the call ``AutoParallel(net)`` is an error: "the module '0' of the model is wrapped
by torch.compile". The alternative is ``AutoParallel(net, …, compile=True)`` of the plain net.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ..capture.annotations import CUT
from ..errors import SettingError
from ..torch_private import CALLED_INSTEAD, COMPILER

__all__ = ["check_inside", "compile_instead", "refuse_class", "watch_wrapping"]

_COMPILE = "AutoParallel(net, …, compile=True) of the plain net: the planned program is compiled"
_REPLICAS = (
    'AutoParallel alone, of the plain net: parallel_mode="data_parallel" has a replica on each rank and sums gradients'
)
_SHARDS = (
    'AutoParallel alone, of the plain net: model.hsdp(optimizer_level="level3") stores parameters, gradients and the '
    "optimizer's state in parts"
)
_ACCELERATE = "; in HF Trainer, accelerate or Lightning: see shardwright.integrations"

#: The module that defines a wrapper's class -> the wrapper's name, and the alternative.
_KINDS = {
    COMPILER: ("torch.compile", _COMPILE),
    "torch.nn.parallel.distributed": ("DistributedDataParallel", _REPLICAS + _ACCELERATE),
    "torch.nn.parallel.data_parallel": ("nn.DataParallel", _REPLICAS + _ACCELERATE),
    "torch.distributed.fsdp": ("FSDP", _SHARDS + _ACCELERATE),
    "deepspeed": ("DeepSpeed", _SHARDS + _ACCELERATE),
}


#: Class -> what `_kind` has found.
_FOUND: weakref.WeakKeyDictionary[type, tuple[str, str] | None] = weakref.WeakKeyDictionary()


def _kind(cls: type) -> tuple[str, str] | None:
    """The known wrapper that a class is or inherits from, and the alternative to it; None: none."""
    if cls not in _FOUND:
        names = [base.__module__ for base in cls.__mro__]
        kinds = (k for n in names for module, k in _KINDS.items() if n == module or n.startswith(f"{module}."))
        _FOUND[cls] = next(kinds, None)
    return _FOUND[cls]


def check_inside(net: nn.Module) -> None:
    """Check that no module of a model is wrapped by another library.

    Args:
        net: the model.

    Raises:
        SettingError: a module is wrapped; the error names its path.
    """
    for path, module in net.named_modules():
        kind = _kind(type(module))
        if kind is None and _is_compiled(module):
            kind = _KINDS[COMPILER]
        if kind is not None:
            where = f"the module {path!r} of the model is" if path else "the model is"
            raise SettingError(f"{where} wrapped by {kind[0]}", legal=kind[1])


def _is_compiled(module: nn.Module) -> bool:
    """True where ``module.compile()`` was called."""
    return getattr(module, CALLED_INSTEAD, None) is not None


def refuse_class(cls: type) -> None:
    """Check that a class is no other library's wrapper: the new class of a parallel model, or the class of a hook's
    owner.

    Args:
        cls: the class.

    Raises:
        SettingError: the class is such a wrapper.
    """
    kind = _kind(cls)
    if kind is not None:
        raise SettingError(f"{'fully_shard' if kind[0] == 'FSDP' else kind[0]} around a parallel model", legal=kind[1])


def compile_instead(*args: object, **kwargs: object) -> None:
    """Refuse ``Module.compile``, in its place.

    Raises:
        SettingError: always.
    """
    raise SettingError("compile() of a parallel model", legal=_COMPILE)


_watching: list[object] = []


def watch_wrapping(kind: type[nn.Module]) -> None:
    """Refuse, from now on, other libraries' wrappers around a module of a class, around a module that contains one,
    or around a model whose parameters are slices.

    Args:
        kind: the class of parallel models. Only the first call of this function has an effect.
    """
    if _watching:
        return

    def look(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        wrapper = _kind(type(module)) if submodule is not None else None
        if (
            submodule is not None
            and wrapper is not None
            and (
                any(isinstance(m, kind) for m in submodule.modules())
                or any(hasattr(p, CUT) for p in submodule.parameters())
            )
        ):
            raise SettingError(f"{wrapper[0]} around a parallel model", legal=wrapper[1])

    _watching.append(register_module_module_registration_hook(look))
