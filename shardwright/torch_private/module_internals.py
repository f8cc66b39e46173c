"""Private names of modules: the tables of their parts and of their hooks.

1. Parts of one module: `parameter_table`, `buffer_table`, `module_table`, and all three by kind (`part_tables`).
2. Hooks of one module (`hooks_of`), and those that every module runs (`hooks_of_all_modules`).

Example: of ``nn.Sequential(nn.Linear(4, 2))`` the table of submodules has "0", and that of parameters is empty. The
table of parameters of the submodule has "weight" and "bias".
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from . import version_lookup

__all__ = [
    "CALLED_INSTEAD",
    "MODULE_TABLES",
    "HooksOfAllModules",
    "ModuleHooks",
    "buffer_table",
    "forward_hook_tables",
    "hook_tables",
    "hooks_of",
    "hooks_of_all_modules",
    "is_part",
    "module_table",
    "parameter_table",
    "part_tables",
]

#: Tables of an nn.Module: parameters, buffers, submodules, names of buffers that no state dict holds.
MODULE_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")

#: Kind of the parts of a module -> the table that holds them.
_PARTS = {"parameters": "_parameters", "buffers": "_buffers", "submodules": "_modules"}

#: Kind of the hooks of a module -> the table that holds them.
_HOOKS = {
    "forward-pre hooks": "_forward_pre_hooks",
    "forward hooks": "_forward_hooks",
    "backward hooks": "_backward_hooks",
    "backward-pre hooks": "_backward_pre_hooks",
}

#: Tables of forward hooks, and of what is noted of such hooks: a hook that removes itself is taken out of all of them.
_FORWARD = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

#: Attribute of a module: the function that is called in place of its own ``__call__``, such as by ``module.compile()``.
CALLED_INSTEAD = "_compiled_call_impl"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module. ``module.__dict__`` takes three times as long while a capture watches reads."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _table(module: nn.Module, name: str, feature: str) -> Any:
    found = _attributes(module).get(name)
    return version_lookup.read_private(module, name, feature) if found is None else found


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, by their names."""
    return _table(module, "_parameters", "capturing a model")


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by their names."""
    return _table(module, "_buffers", "capturing a model")


def module_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The direct submodules of a module, by their names."""
    return _table(module, "_modules", "running a planned program")


#: Number of a hook -> the hook.
_Hooks = dict[int, Any]


class ModuleHooks(NamedTuple):
    """The tables of a module's hooks: number of a hook -> the hook."""

    forward_pre: _Hooks
    forward: _Hooks
    backward_pre: _Hooks
    backward: _Hooks
    forward_pre_with_kwargs: dict[int, bool]
    forward_with_kwargs: dict[int, bool]


class HooksOfAllModules(NamedTuple):
    """The tables of the global hooks, which every module runs: number of a hook -> the hook."""

    forward_pre: _Hooks
    forward: _Hooks
    backward_pre: _Hooks
    backward: _Hooks
    forward_with_kwargs: dict[int, bool]
    buffer_registration: _Hooks


def hooks_of(module: nn.Module) -> ModuleHooks:
    """The hooks of a module itself."""
    attributes = _attributes(module)
    return ModuleHooks(
        attributes["_forward_pre_hooks"],
        attributes["_forward_hooks"],
        attributes["_backward_pre_hooks"],
        attributes["_backward_hooks"],
        attributes["_forward_pre_hooks_with_kwargs"],
        attributes["_forward_hooks_with_kwargs"],
    )


def hooks_of_all_modules() -> HooksOfAllModules:
    """The global hooks of modules."""
    owner = nn.modules.module
    return HooksOfAllModules(
        owner._global_forward_pre_hooks,
        owner._global_forward_hooks,
        owner._global_backward_pre_hooks,
        owner._global_backward_hooks,
        owner._global_forward_hooks_with_kwargs,
        owner._global_buffer_registration_hooks,
    )


def part_tables(module: nn.Module) -> dict[str, dict[object, object]]:
    """The tables of a module's parts, by kind: "parameters", "buffers", "submodules"."""
    attributes = _attributes(module)
    try:
        return {kind: attributes[table] for kind, table in _PARTS.items()}
    except KeyError as error:
        raise _without(error) from None


def is_part(attributes: dict[str, Any], name: str) -> bool:
    """True for the name of a parameter, buffer or submodule of the module that has these attributes."""
    return name in attributes["_modules"] or name in attributes["_parameters"] or name in attributes["_buffers"]


def hook_tables(module: nn.Module | None) -> dict[str, dict[object, object]]:
    """The tables of a module's hooks, by kind: "forward-pre hooks", "forward hooks", "backward hooks", "backward-pre
    hooks"; None: those of all modules."""
    if module is None:
        return {kind: getattr(nn.modules.module, f"_global{table}") for kind, table in _HOOKS.items()}
    attributes = _attributes(module)
    try:
        return {kind: attributes[table] for kind, table in _HOOKS.items()}
    except KeyError as error:
        raise _without(error) from None


def forward_hook_tables(module: nn.Module | None) -> list[dict[object, object]]:
    """The tables from which a forward hook of a module is removed; None: those of all modules."""
    found, prefix = (vars(nn.modules.module), "_global") if module is None else (_attributes(module), "")
    tables = [found.get(prefix + table) for table in _FORWARD]
    return [table for table in tables if table is not None]


def _without(error: KeyError) -> Exception:
    return version_lookup.missing_error(f"torch.nn.Module.{error.args[0]}", "noticing a changed model")
