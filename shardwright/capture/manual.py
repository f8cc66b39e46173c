"""Parameters that are each rank's own slice, as a user makes them for ``hybrid_parallel``.

In processes such a parameter is this rank's slice and nothing else. Where all devices are in one process it holds the
slices
of all ranks, stacked: it is built by a function of the rank, which serves both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SettingError
from ..torch_private import parameter_table

__all__ = ["check_held", "check_mode", "is_own", "layerwise_parallel", "one_slice", "own_parameters", "stacked"]

_ATTRIBUTE, _STACKED = "layerwise_parallel", "_shardwright_stacked"


def layerwise_parallel(given: nn.Parameter | Callable[[int], torch.Tensor]) -> nn.Parameter:
    """A parameter that is each rank's own slice: in ``hybrid_parallel`` its gradient is not summed over ranks, and it
    is not broadcast. The same as ``parameter.layerwise_parallel = True``, which a deep copy of the parameter does not
    keep.

    Args:
        given: this rank's parameter; or a function of the rank that returns its slice, of one shape on all ranks. Where
            all
            devices are in one process only the function tells the slices of all: the parameter then holds them stacked.

    Returns:
        The parameter.

    Raises:
        SettingError: neither.
    """
    if isinstance(given, nn.Parameter):
        parameter = given
    elif isinstance(given, torch.Tensor) or not callable(given):
        raise SettingError(
            f"layerwise_parallel({type(given).__name__})",
            legal="an nn.Parameter, or a function: rank -> this rank's slice",
        )
    else:
        from ..process import current  # above this room; a user's call, not an import of ours

        runtime = current()
        if runtime.processes or runtime.devices is None:
            parameter = nn.Parameter(given(runtime.rank))
        else:
            parameter = nn.Parameter(torch.stack([given(rank).detach() for rank in range(runtime.devices)]))
            setattr(parameter, _STACKED, runtime.devices)
    setattr(parameter, _ATTRIBUTE, True)
    return parameter


def is_own(parameter: torch.Tensor) -> bool:
    """Whether a parameter is marked as each rank's own slice."""
    return bool(getattr(parameter, _ATTRIBUTE, False))


def stacked(parameter: torch.Tensor) -> int | None:
    """How many ranks' slices a parameter holds; None: one, without a dim for them."""
    return getattr(parameter, _STACKED, None)


def own_parameters(holder: nn.Module) -> frozenset[str]:
    """The names of the parameters that are each rank's own slice."""
    return frozenset(name for name, parameter in holder.named_parameters() if is_own(parameter))


def check_mode(holder: nn.Module, parallel_mode: str) -> None:
    """See that no parameter is a rank's own slice under a mode that knows only whole ones.

    Raises:
        SettingError: with its name.
    """
    names = sorted(own_parameters(holder))
    if names and parallel_mode != "hybrid_parallel":
        raise SettingError(
            f"the parameter {names[0]!r} is layerwise_parallel, a slice of each rank's own, which "
            f"{parallel_mode} does not know",
            legal='parallel_mode="hybrid_parallel", or the whole parameter',
        )


def check_held(holder: nn.Module, devices: int, processes: bool) -> None:
    """See that one process holds all ranks' slices of each such parameter, and each of several its own.

    Raises:
        SettingError: a parameter of which that is not so.
    """
    for name, parameter in holder.named_parameters():
        held = stacked(parameter)
        if is_own(parameter) and held != (None if processes else devices) and not (devices == 1 and held is None):
            raise SettingError(
                f"the parameter {name!r} is layerwise_parallel and holds the slices of {held or 1} ranks; "
                f"{'a process' if processes else 'one process'} needs those of {1 if processes else devices}",
                legal="sw.layerwise_parallel(lambda rank: this rank's slice), after sw.init",
            )


@contextlib.contextmanager
def one_slice(holder: nn.Module) -> Iterator[None]:
    """While active, a parameter that holds the slices of several ranks has the shape of one; for a capture."""
    saved: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for module in holder.modules():
        for name, parameter in parameter_table(module).items():
            if parameter is not None and stacked(parameter) is not None:
                saved.append((parameter_table(module), name, parameter))
    try:
        for table, name, parameter in saved:
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach()[0], requires_grad=parameter.requires_grad)
            table[name] = made[id(parameter)]
        yield
    finally:
        for table, name, parameter in saved:
            table[name] = parameter
