"""Parameters of the processes runtime: DTensors at the border, plain local tensors inside.

Optimizers, ``clip_grad_norm_`` and checkpoints see a DTensor whose local tensor is this rank's slice. Each program
computes on plain leaves that share the DTensor's storage, since dispatching on a DTensor costs ten times as much.
`gradient_sums` brings the leaves' gradients back to the parameters; `dtensors` has the functions of a single tensor.

Example: a weight [32, 16], stored in 4 slices. ``net.weight`` is a DTensor of the shape [32, 16] with a local tensor
[8, 16]. The leaf of the program is a plain tensor [8, 16] in the same memory, which an optimizer's step changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ...capture.annotations import CUT, be_elsewhere, whole_shape
from ...capture.hybrid_models import is_own
from ...errors import SettingError
from ...layout import Layout
from ...partition.padded_dims import true_slice
from ...pipeline.pipeline_plan import PipelinePlan, StageParameter
from ...sharded_plan import Plan
from ..deferred_init import materialize, substitute
from ..optimizer_guard import step_through
from ..replaced_parameters import replace_noted, stand_for_successor
from .dtensors import (
    ELSEWHERE,
    SUBCLASSES_HAVE_VIEWS,
    as_dtensor,
    gathered,
    layout_of,
    refuse_slices_of_others,
    slice_in_buffer,
    to_dtensor,
)
from .gradient_sums import GradientSums
from .optimizer_steps import stand_in
from .parameter_hooks import carry_over, leaf_of_slice
from .process_groups import ProcessGroups, group_of_ranks
from .sliced_tensors import SlicedTensor

__all__ = ["ParameterPlacement", "ShardedState", "check_stages", "note_plan", "stored_layouts", "used_layouts"]

#: Attribute of a parameter that a plan has placed: a `_Planned`.
_PLANNED = "_shardwright_planned"


class _Planned(NamedTuple):
    """The place of a parameter in a plan, the same on every rank.

    Attributes:
        storage: the layout in which it is stored.
        used: the layout in which its operators consume it.
        first_rank: the first rank of its stage in a pipeline; None: all ranks have it.
    """

    storage: Layout
    used: Layout
    first_rank: int | None


def note_plan(holder: nn.Module, plan: Plan | PipelinePlan) -> None:
    """Note the places of sharded parameters, for a later plan of a model that has changed: it may call them by other
    names."""
    for name, parameter in holder.named_parameters():
        place = plan.parameters.get(name)
        if place is not None and isinstance(parameter, DTensor):
            first = place.ranks.start if isinstance(place, StageParameter) else None
            setattr(parameter, _PLANNED, _Planned(place.storage, place.layout, first))


def used_layouts(holder: nn.Module) -> dict[str, Layout] | None:
    """The layouts in which the latest plan's operators consume parameters that are sharded already, by name; None: no
    parameter is."""
    planned = {name: getattr(p, _PLANNED) for name, p in holder.named_parameters() if hasattr(p, _PLANNED)}
    return {name: place.used for name, place in planned.items()} or None


def check_stages(holder: nn.Module, plan: PipelinePlan) -> None:
    """Check that a pipeline of a changed model keeps the parameters that it had on their ranks.

    Raises:
        SettingError: on every rank alike, a parameter that would move to another stage's ranks.
    """
    for name, parameter in holder.named_parameters():
        before, now = getattr(parameter, _PLANNED, None), plan.parameters.get(name)
        if before is None or now is None or before.first_rank is None or before.first_rank == now.ranks.start:
            continue
        raise SettingError(
            f"the parameter {name!r} was planned on the ranks from {before.first_rank} on, and in the changed model "
            f"its stage {now.stage} runs on those from {now.ranks.start} on: its slices and optimizer state would "
            "have to move to other ranks",
            legal="set_stage or stage_config with the stages that its modules had; save_checkpoint, and "
            "load_checkpoint into the changed model in a new run",
        )


def stored_layouts(holder: nn.Module) -> dict[str, Layout]:
    """The layouts of parameters that an earlier plan of the model, or another wrapper, has cut already, by name.

    Raises:
        SettingError: a parameter is a DTensor that some other library made, or a value that was computed of slices.
    """
    out = {}
    for name, parameter in holder.named_parameters():
        if isinstance(parameter, DTensor):
            planned: _Planned | None = getattr(parameter, _PLANNED, None)
            layout = layout_of(parameter) if planned is None else planned.storage
            if isinstance(parameter, SlicedTensor) and not isinstance(parameter, nn.Parameter):
                raise SettingError(
                    f"the parameter {name!r} is a value that was computed of slices, as by torch.func.functional_call "
                    "without torch.func.grad around it",
                    legal="torch.func.functional_call(net, …) inside of `with model.whole() as net:`; values that are "
                    "written into the parameters, under torch.no_grad()",
                )
            if layout is None or not (isinstance(parameter, SlicedTensor) or hasattr(parameter, CUT)):
                raise SettingError(
                    f"the parameter {name!r} is a DTensor already: {parameter.placements}",
                    legal="a model that nothing else has distributed",
                )
            out[name] = layout
    return out


def _of_rank_0(whole: Tensor, device: torch.device) -> Tensor:
    """A tensor that all ranks have, with the values of rank 0; on `device`."""
    whole = whole.to(device, copy=True, memory_format=torch.contiguous_format)
    dist.broadcast(whole, 0)
    # A clone: a worker of the process group may still hold the received tensor, which then cannot be replaced.
    return whole.clone()


class ParameterPlacement(NamedTuple):
    """The placement of a parameter: its layout, and the process groups of the ranks that the layout refers to."""

    layout: Layout
    groups: ProcessGroups


class ShardedState:
    """A model's parameters and buffers on one rank.

    Args:
        places: (name, a tensor of the whole's shape) -> the parameter's placement; None: not on this rank.
        holder: has ``named_parameters`` and ``named_buffers`` under the graph's names. Its parameters become
            DTensors, in the model and in every optimizer that holds them.
        groups: this rank's process groups.
        device: of the slices.
        broadcast: True where parameters and buffers begin with the values of rank 0.

    Attributes:
        groups: as the caller gives them, for the model's next program.
        absent: the parameters that are not on this rank, by name: each an empty tensor.
        buffers: the model's buffers, by name.
    """

    def __init__(
        self,
        places: Callable[[str, Tensor], ParameterPlacement | None],
        holder: nn.Module,
        groups: ProcessGroups,
        device: torch.device,
        broadcast: bool = False,
    ) -> None:
        step_through(stand_in)
        self.groups = groups
        self.absent: dict[str, nn.Parameter] = {}
        self._elsewhere: DeviceMesh | None = None
        parameters = {name for name, _ in holder.named_parameters()}

        olds: list[Tensor] = []
        successors: dict[Tensor, nn.Parameter] = {}
        placements: dict[Tensor, ParameterPlacement | None] = {}  # of each old, whole parameter

        def cut(old: Tensor, whole: Tensor) -> DTensor:
            place = placements[old]
            if place is None:
                return self._nothing(whole, device)
            local = slice_in_buffer(whole, place.layout, place.groups.rank, device)
            return to_dtensor(local, place.layout, tuple(whole.shape), place.groups)

        def cut_state(old: Tensor, state: Tensor) -> Tensor | None:
            if placements[old] is not None:
                if state.shape != old.shape:
                    return None
                if isinstance(state, DTensor):  # of another parallel model
                    refuse_slices_of_others([state], as_dtensor(successors[old]), getattr(successors[old], CUT))
                    state = gathered(state)
            return cut(old, state)

        def keep(name: str, old: Tensor, whole: Tensor) -> Tensor | None:
            if isinstance(old, DTensor):  # an earlier plan, or another wrapper of the model, has cut it
                if whole_shape(old) != old.shape:
                    assert isinstance(old, nn.Parameter)
                    self.absent[name] = old
                return None
            if is_own(old):
                return whole.to(device) if old.is_meta else None
            if broadcast:
                whole = _of_rank_0(whole, device)
            if name not in parameters:
                return whole.to(device)
            placements[old] = places(name, whole)
            made = successors[old] = nn.Parameter(cut(old, whole), requires_grad=old.requires_grad)
            if SUBCLASSES_HAVE_VIEWS:  # nn.Parameter(...) of a DTensor is of DTensor's own class
                made.__class__ = SlicedTensor  # type: ignore[assignment]  # has the same slots
            olds.append(old)
            setattr(made, CUT, name)
            if placements[old] is None:
                self.absent[name] = made
                be_elsewhere(made, whole.shape)
            replace_noted(old, name, made)
            return None

        def part(name: str, old: Tensor) -> tuple[slice, ...] | None:
            if broadcast or name not in parameters or is_own(old) or not old.dim():
                return None
            place = places(name, old)
            if place is None:
                return (slice(0, 0),) * old.dim()
            return true_slice(place.layout, tuple(old.shape), place.groups.rank)

        materialize(holder, keep, "cpu", part=part)
        carry_over(olds, successors)
        substitute(holder, successors, cut_state)
        for old in olds:
            stand_for_successor(old)
        self.buffers = dict(holder.named_buffers())

    def _nothing(self, whole: Tensor, device: torch.device) -> DTensor:
        """The empty tensor of a parameter that is on other ranks: a DTensor, since optimizers do not mix plain tensors
        with those."""
        if self._elsewhere is None:
            alone = group_of_ranks((dist.get_rank(),))
            self._elsewhere = DeviceMesh.from_group(alone, device.type, mesh_dim_names=ELSEWHERE)
        nothing = torch.empty(0, dtype=whole.dtype, device=device)
        return DTensor.from_local(nothing, self._elsewhere, [Replicate()], run_check=False)

    def take_buffers(self, holder: nn.Module, device: torch.device) -> None:
        """Take the model's present buffers, some of which may have been replaced since the first program."""
        self.buffers = dict(holder.named_buffers())
        for buffer in self.buffers.values():
            if buffer.device.type != device.type:
                buffer.data = buffer.data.to(device)

    def leaves(self, holder: nn.Module, sums: GradientSums, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Leaves of parameters for one program, by name.

        Args:
            holder: has ``named_parameters`` under the graph's names.
            sums: receives the gradients of the leaves.
            names: of the parameters; None: all.

        Raises:
            SettingError: a parameter that was put into the model after the first call.
        """
        parameters = {n: p for n, p in holder.named_parameters() if names is None or n in names}
        for name, parameter in parameters.items():
            if not isinstance(parameter, DTensor) and not is_own(parameter):
                raise SettingError(
                    f"the parameter {name!r} is another one than at the first call",
                    legal="changes of its values, or a new AutoParallel of the changed model",
                )
        per_rank = {name: leaf_of_slice(parameter) for name, parameter in parameters.items() if is_own(parameter)}
        return (
            sums.leaves({name: parameter for name, parameter in parameters.items() if name not in per_rank}) | per_rank
        )
