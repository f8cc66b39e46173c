"""The two networks on DTensor, eager: the same placements, redistributed to the same layouts where ours convert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
import torch.nn.functional as F
from networks import MLP, TUTORIAL, Network
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

__all__ = ["ON_DTENSORS"]

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


class OnDTensors(nn.Module):
    """The common part of both.

    Args:
        network: its parameters are distributed as `placements` says.
        flattened: whether the mesh knows its axes flattened into one too; several collectives of one kind that follow
            one another then become one. (It asks for ``_flatten``, and not every user knows to ask.)
    """

    sizes: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]

    def __init__(self, network: Network, flattened: bool) -> None:
        super().__init__()
        self.mesh = _mesh(self.sizes, flattened)
        for (name, whole), placements in zip(network.make().named_parameters(), self.placements, strict=True):
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole.detach(), self.mesh, placements)))

    def spread(self, x: Tensor, *placements: Placement) -> DTensor:
        """A tensor that every rank holds whole, in slices."""
        whole = DTensor.from_local(x, self.mesh, [WHOLE] * self.mesh.ndim, run_check=False)
        return whole.redistribute(placements=placements)

    def whole(self, loss: DTensor) -> Tensor:
        """The loss of the whole batch, on every rank."""
        return loss.redistribute(placements=[WHOLE] * self.mesh.ndim).to_local()


class TutorialOnDTensors(OnDTensors):
    sizes = (2, 2, 2)
    placements = ((WHOLE, ROWS, ROWS), (ROWS, ROWS, ROWS), (WHOLE, WHOLE, WHOLE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.spread(x.flatten(1), ROWS, COLUMNS, COLUMNS)
        x = torch.relu((x @ self.w1).redistribute(placements=(ROWS, ROWS, WHOLE)))
        x = x.redistribute(placements=(COLUMNS, COLUMNS, COLUMNS))
        x = torch.relu((x @ self.w2).redistribute(placements=(ROWS, ROWS, ROWS)))
        return self.whole(F.cross_entropy(x @ self.w3, self.spread(y, ROWS, ROWS, ROWS)))


class MlpOnDTensors(OnDTensors):
    sizes = (2, 4)
    placements = ((WHOLE, COLUMNS), (WHOLE, ROWS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.relu(self.spread(x, ROWS, WHOLE) @ self.w1)
        x = (x @ self.w2).redistribute(placements=(ROWS, ROWS))
        # With reduction="mean" the gradients of torch 2.13 are those of the sum of the ranks' means.
        return self.whole(F.mse_loss(x, self.spread(y, ROWS, ROWS), reduction="sum") / y.numel())


def _mesh(sizes: Sequence[int], flattened: bool) -> DeviceMesh:
    names = tuple("abc"[: len(sizes)])
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    if flattened:
        for count in range(2, len(names) + 1):
            for axes in combinations(names, count):
                mesh[axes]._flatten()
    return mesh


#: Network -> (network, flattened) -> module; called with the batch, it gives the loss.
ON_DTENSORS = {TUTORIAL.name: TutorialOnDTensors, MLP.name: MlpOnDTensors}
