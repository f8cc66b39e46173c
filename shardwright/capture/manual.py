"""Rank-local parameters for ``hybrid_parallel``: each rank holds its own slice, created by the user.

With one process per rank, the parameter holds the slice of that rank alone. With all devices in one process, the
parameter holds the slices of all ranks, stacked in a leading dim. A function of the rank creates the parameter in
both cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import SettingError
from ..process import current
from ..torch_private import parameter_table

__all__ = ["check_held", "check_mode", "is_own", "layerwise_parallel", "one_slice", "own_parameters", "stacked"]

_ATTRIBUTE, _STACKED = "layerwise_parallel", "_shardwright_stacked"


def layerwise_parallel(given: nn.Parameter | Callable[[int], torch.Tensor]) -> nn.Parameter:
    """Mark a parameter as rank-local: not broadcast, its gradient not summed over ranks (``hybrid_parallel``).

    The same as ``parameter.layerwise_parallel = True``, an attribute that a deep copy of the parameter does not keep.

    Args:
        given: the parameter of this rank; or a function of the rank that returns its slice, of one shape on all ranks.
            With all devices in one process only the function gives the slices of all ranks, and the parameter holds
            them stacked.

    Returns:
        The parameter.

    Raises:
        SettingError: `given` is neither a parameter nor a function.
    """
    if isinstance(given, nn.Parameter):
        parameter = given
    elif isinstance(given, torch.Tensor) or not callable(given):
        raise SettingError(
            f"layerwise_parallel({type(given).__name__})",
            legal="an nn.Parameter, or a function: rank -> this rank's slice",
        )
    else:
        runtime = current()
        if runtime.processes or runtime.devices is None:
            parameter = nn.Parameter(given(runtime.rank))
        else:
            parameter = nn.Parameter(torch.stack([given(rank).detach() for rank in range(runtime.devices)]))
            setattr(parameter, _STACKED, runtime.devices)
    setattr(parameter, _ATTRIBUTE, True)
    return parameter


def is_own(parameter: torch.Tensor) -> bool:
    """True where a parameter is marked as rank-local."""
    return bool(getattr(parameter, _ATTRIBUTE, False))


def stacked(parameter: torch.Tensor) -> int | None:
    """The number of ranks whose slices a parameter stacks; None: one slice, without a leading dim."""
    return getattr(parameter, _STACKED, None)


def own_parameters(holder: nn.Module) -> frozenset[str]:
    """The names of the rank-local parameters."""
    return frozenset(name for name, parameter in holder.named_parameters() if is_own(parameter))


def check_mode(holder: nn.Module, parallel_mode: str) -> None:
    """Refuse rank-local parameters under a mode that knows whole parameters only.

    Raises:
        SettingError: with the name of the first rank-local parameter.
    """
    names = sorted(own_parameters(holder))
    if names and parallel_mode != "hybrid_parallel":
        raise SettingError(
            f"the parameter {names[0]!r} is layerwise_parallel, a slice of each rank's own, which "
            f"{parallel_mode} does not know",
            legal='parallel_mode="hybrid_parallel", or the whole parameter',
        )


def check_held(holder: nn.Module, devices: int, processes: bool) -> None:
    """Check that a single process holds the slices of all ranks, and each of several processes its own slice.

    Raises:
        SettingError: a rank-local parameter that holds another number of slices.
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
    """Give each stacked parameter the shape of one slice, while a capture is under way."""
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
