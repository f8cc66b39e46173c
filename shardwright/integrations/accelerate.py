"""accelerate around a parallel model: ``Accelerator().prepare(model, optimizer, loader)``.

accelerate wraps a model into DistributedDataParallel when there are several processes. This `Accelerator` leaves an
`AutoParallel` unwrapped, except for autocast. The model's ``dataset_strategy`` decides the batches:

    "data_parallel"     each process gets its own part, as accelerate hands batches out
    "full_batch"        each process gets the whole batch, in one order

Example, batches of 8 rows on 2 processes: with "full_batch" both get the same 8 rows.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from torch import nn

from ..errors import SettingError
from ..parallel.auto_parallel import AutoParallel
from ..torch_private import pytree
from .monitored_loop import check_feeding

__all__ = ["Accelerator"]

_CHECKPOINTS = (
    "sw.save_checkpoint(model, optimizer, path, step=…) and sw.load_checkpoint; for weights model.save_pretrained(path)"
)


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that takes an `AutoParallel` for a model that is distributed already.

    ``prepare``, ``backward``, ``accumulate``, ``no_sync``, ``clip_grad_norm_``, ``gather_for_metrics`` and
    ``mixed_precision`` work as usual. ``save_state`` and ``load_state`` raise errors that name the functions for
    slices. Prepare the model before its loaders, or together with them.

    Raises:
        SettingError: a loader was prepared before a model that is fed the whole batch by every process; or each
            process of a pipeline feeds its own part.

    Example:
        >>> from shardwright.integrations.accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(x, y))
        >>> optimizer.step()
    """

    #: True: every process is fed the whole batch; None: no parallel model has been prepared.
    _whole_batches: bool | None = None

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        for model in args:
            if isinstance(model, AutoParallel):
                self.feed(model)
        return super().prepare(*args, device_placement=device_placement)

    def feed(self, model: AutoParallel) -> None:
        """Hand out batches by the model's ``dataset_strategy`` from now on.

        Args:
            model: the parallel model.

        Raises:
            SettingError: a loader prepared before hands them out in another way; the strategy is given by cuts; or a
                pipeline is not fed the whole batch.
        """
        strategy = model.settings.dataset_strategy
        if self.num_processes > 1:
            check_feeding(model, "accelerate")
        if not isinstance(strategy, str):
            raise SettingError(
                f"accelerate cannot hand out slices of batches as dataset_strategy({strategy!r}) has it",
                legal='"data_parallel" or "full_batch", or a loader of your own that is not prepared',
            )
        whole = strategy == "full_batch" and self.num_processes > 1
        if self._dataloaders and whole != bool(self._whole_batches):
            raise SettingError(
                "a loader was prepared before the model, and hands out batches in another way than its "
                f"dataset_strategy({strategy!r})",
                legal="accelerator.prepare(model, optimizer, loader)",
            )
        self._whole_batches = whole

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        if not isinstance(model, AutoParallel):
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(self, data_loader: object, *args: object, **kwargs: object) -> Any:
        made = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self._whole_batches:
            shards: tuple[Any, ...] = (getattr(made, "batch_sampler", None), getattr(made, "dataset", None))
            for shard in shards:
                if hasattr(shard, "process_index") and hasattr(shard, "num_processes"):
                    shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
                    break
            else:
                raise SettingError(
                    f"{type(made).__name__} does not hand out whole batches",
                    legal='dispatch_batches=False, or dataset_strategy("data_parallel")',
                )
        return made

    def gather_for_metrics(self, input_data: object, *args: object, **kwargs: object) -> Any:
        if not self._whole_batches:
            return super().gather_for_metrics(input_data, *args, **kwargs)
        state = self.gradient_state
        last = (
            state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        )  # number of rows of a last, smaller batch
        return pytree.tree_map_only(torch.Tensor, lambda x: x[:last], input_data)

    def get_state_dict(self, model: nn.Module, *args: object, **kwargs: object) -> Any:
        if not isinstance(model, AutoParallel):
            return super().get_state_dict(model, *args, **kwargs)
        with model.whole(rank=0) as net, torch.no_grad():
            return (
                None
                if net is None
                else {
                    k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v
                    for k, v in net.state_dict().items()
                }
            )

    def save_state(self, *args: object, **kwargs: object) -> Any:
        self._refuse("save_state")
        return super().save_state(*args, **kwargs)

    def load_state(self, *args: object, **kwargs: object) -> Any:
        self._refuse("load_state")
        return super().load_state(*args, **kwargs)

    def save_model(self, model: nn.Module, *args: object, **kwargs: object) -> Any:
        if isinstance(model, AutoParallel):
            raise SettingError("accelerator.save_model of a parallel model", legal=_CHECKPOINTS)
        return super().save_model(model, *args, **kwargs)

    def _refuse(self, what: str) -> None:
        if any(isinstance(model, AutoParallel) for model in self._models) and self.num_processes > 1:
            raise SettingError(
                f"accelerator.{what}() of a parallel model, whose parameters and optimizer state are slices",
                legal=_CHECKPOINTS,
            )
