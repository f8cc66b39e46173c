"""Models that a user writes for ``hybrid_parallel``: parameters of each rank's own, and collectives.

With one process per rank, the parameter holds the slice of that rank alone. With all devices in one process, the
parameter holds the slices of all ranks, stacked in a leading dim. A function of the rank creates the parameter in
both cases.

Collectives are those of `sw.ops`. `refused_collective` names the one that is meant where a forward calls
``torch.distributed`` itself.

Example: ``weight = layerwise_parallel(lambda rank: torch.full((4, 4), float(rank)))`` on 8 devices. In one process the
parameter is [8, 4, 4]. With one process per rank it is [4, 4], and that of rank 3 is full of 3.0.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..errors import CaptureError, SettingError
from ..process_runtime import current
from ..torch_private import parameter_table
from .annotations import check_not_planned
from .source_lines import user_frame

__all__ = [
    "check_held",
    "check_mode",
    "is_own",
    "layerwise_parallel",
    "one_slice",
    "own_parameters",
    "refused_collective",
    "stacked",
]

_ATTRIBUTE, _STACKED = "layerwise_parallel", "_shardwright_stacked"


def layerwise_parallel(values: nn.Parameter | Callable[[int], torch.Tensor]) -> nn.Parameter:
    """Mark a parameter as rank-local: not broadcast, its gradient not summed over ranks (``hybrid_parallel``).

    The same as ``parameter.layerwise_parallel = True``, an attribute that a deep copy of the parameter does not keep.

    Args:
        values: the parameter of this rank; or a function of the rank that returns its slice, of one shape on all ranks.
            With all devices in one process only the function gives the slices of all ranks, and the parameter holds
            them stacked.

    Returns:
        The parameter.

    Raises:
        SettingError: `values` is neither a parameter nor a function; its model has been planned.

    Example:
        >>> weight = sw.layerwise_parallel(lambda rank: torch.full((4, 4), float(rank)))  # one slice a rank
        >>> isinstance(weight, nn.Parameter)
        True
    """
    if isinstance(values, nn.Parameter):
        check_not_planned("layerwise_parallel()", values)
        parameter = values
    elif isinstance(values, torch.Tensor) or not callable(values):
        raise SettingError(
            f"layerwise_parallel({type(values).__name__})",
            legal="an nn.Parameter, or a function: rank -> this rank's slice",
        )
    else:
        runtime = current()
        if runtime.processes or runtime.devices is None:
            parameter = nn.Parameter(values(runtime.rank))
        else:
            parameter = nn.Parameter(torch.stack([values(rank).detach() for rank in range(runtime.devices)]))
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
        slices = stacked(parameter)
        if is_own(parameter) and slices != (None if processes else devices) and not (devices == 1 and slices is None):
            raise SettingError(
                f"the parameter {name!r} is layerwise_parallel and holds the slices of {slices or 1} ranks; "
                f"{'a process' if processes else 'one process'} needs those of {1 if processes else devices}",
                legal="sw.layerwise_parallel(lambda rank: this rank's slice), after sw.init",
            )


@contextlib.contextmanager
def one_slice(holder: nn.Module) -> Iterator[None]:
    """Give each stacked parameter the shape of one slice, while a capture is under way."""
    saved: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in holder.modules():
        for name, parameter in parameter_table(module).items():
            if parameter is not None and stacked(parameter) is not None:
                saved.append((parameter_table(module), name, parameter))
    try:
        for table, name, parameter in saved:
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach()[0], requires_grad=parameter.requires_grad)
            table[name] = made[parameter]
        yield
    finally:
        for table, name, parameter in saved:
            table[name] = parameter


# -- collectives of torch.distributed ----------------------------------------------------------------------------------

_DISTRIBUTED = torch.__file__.rsplit("/", 1)[0] + "/distributed/"

#: The beginning of a name in torch.distributed -> the way to write it here; the first that fits counts.
_ALTERNATIVES = {
    "all_reduce": "sw.ops.all_reduce(x)",
    "allreduce": "sw.ops.all_reduce(x)",
    "all_gather": "sw.ops.all_gather(x, dim)",
    "allgather": "sw.ops.all_gather(x, dim)",
    "reduce_scatter": "sw.ops.reduce_scatter(x, dim)",
    "all_to_all": "sw.ops.all_to_all(x, split_dim, concat_dim)",
    "alltoall": "sw.ops.all_to_all(x, split_dim, concat_dim)",
    "broadcast": "sw.ops.broadcast(x, root)",
    "scatter": "sw.ops.broadcast(x, root), and this rank's part of it by sw.ops.reduce_scatter or all_to_all",
    "gather": "sw.ops.all_gather(x, dim)",
    "reduce": "sw.ops.all_reduce(x)",
    "get_rank": "sw.layerwise_parallel(lambda rank: ...), a parameter that differs from rank to rank",
    "get_world_size": "sw.world_size()",
    "barrier": "no barrier: ranks meet at their collectives",
    "send": "model.pipeline(...), which sends between stages, or sw.ops.all_to_all",
    "recv": "model.pipeline(...), which sends between stages, or sw.ops.all_to_all",
    "isend": "model.pipeline(...), which sends between stages, or sw.ops.all_to_all",
    "irecv": "model.pipeline(...), which sends between stages, or sw.ops.all_to_all",
    "batch_isend_irecv": "model.pipeline(...), which sends between stages, or sw.ops.all_to_all",
}


def refused_collective(called: BaseException | str, source: str | None = None) -> CaptureError | None:
    """The error of a forward that calls a collective of torch.distributed.

    Args:
        called: the operator's name in the captured program, or the error that the call has raised.
        source: the line of the call; None: it is found in the traceback.

    Returns:
        None where no collective was called.
    """
    names = [called] if isinstance(called, str) else []
    if isinstance(called, BaseException):
        frames = [(f.f_code.co_filename, f.f_code.co_name, line) for f, line in traceback.walk_tb(called.__traceback__)]
        names = [name for file, name, _ in frames if file.startswith(_DISTRIBUTED)]
        first = next((i for i, (file, _, _) in enumerate(frames) if file.startswith(_DISTRIBUTED)), 0)
        source = user_frame([(file, line) for file, _, line in frames[:first] if "/site-packages/" not in file]) or None
    for name in names:
        alternative = next((text for start, text in _ALTERNATIVES.items() if name.lstrip("_").startswith(start)), None)
        if alternative is not None:
            return CaptureError(
                f"the forward calls {name} of torch.distributed; the ranks of a parallel model meet in sw.ops alone, "
                "which have their gradients and are in the plan",
                source=source,
                legal=f'{alternative}, in parallel_mode="hybrid_parallel"; in the other modes the plan joins the ranks',
            )
    return None
