"""``Trainer`` of Hugging Face's transformers around a parallel model.

    from shardwright.integrations.hugging_face import Trainer

    trainer = Trainer(model=sw.AutoParallel(net), args=TrainingArguments(…), train_dataset=…)
    trainer.train(resume_from_checkpoint=…)

The differences from `transformers.Trainer` follow from the `AutoParallel`: the model is not wrapped, its loss and
gradients are those of the whole batch, parameters and optimizer state are slices. Checkpoints hold the model in the
form that ``from_pretrained`` reads, and in ``shardwright/`` each rank's part of the model and the optimizer, from
which any number of devices can resume.

Example: ``per_device_train_batch_size=8`` in 4 processes. With ``dataset_strategy("full_batch")`` a step has the same 8
rows in every process. With "data_parallel" a step has 32 rows, 8 of each process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.utils.generic import can_return_loss, find_labels

from ..capture.annotations import CUT
from ..checkpoint.load import load_checkpoint
from ..checkpoint.save import save_checkpoint
from ..errors import CheckpointError, SettingError
from ..parallel.auto_parallel import AutoParallel
from .accelerate import Accelerator
from .monitored_loop import MonitoredLoop

__all__ = ["Accelerator", "HuggingFaceMonitor", "Seq2SeqTrainer", "Trainer", "TrainerMixin"]

#: Folder in a Trainer's checkpoint with the state a run resumes from, and the file of the schedule beside it.
_PARTS, _SCHEDULE = "shardwright", "scheduler.pt"


class HuggingFaceMonitor(MonitoredLoop, transformers.TrainerCallback):
    """A callback that drives a `shardwright.Monitor`: ``Trainer(model=…, callbacks=[HuggingFaceMonitor(every=10)])``.

    Lines have the loss of a step, its samples and its tokens (elements of ``input_ids``), beside what a monitor
    measures itself. Evaluations and checkpoints are left out of rates. The monitor is closed at the end, and where
    training raises. The Trainer of transformers itself tells its callbacks no loss and no batch: its lines lack them.

    Args:
        every, tensorboard, wandb, out: see `shardwright.Monitor`.

    Example:
        >>> from shardwright.integrations.hugging_face import HuggingFaceMonitor
        >>> callbacks = [HuggingFaceMonitor(every=10)]  # of a Trainer
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: object,
    ) -> None:
        self._begin(model, args.world_size, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._done(state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._leave_out()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._leave_out()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._close()

    def training_failed(self) -> None:
        """Close the monitor: training has raised."""
        self._close(failed=True)


if TYPE_CHECKING:
    from transformers import Trainer as _Trainer, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import TrainOutput
else:
    _Trainer = object


class TrainerMixin(_Trainer):
    """The differences, for any subclass of `transformers.Trainer`: ``class MyTrainer(TrainerMixin, SFTTrainer): …``.

    Args:
        model: an `AutoParallel` without ``loss_fn``: the model computes its loss from ``labels``. With
            ``dataset_strategy("full_batch")`` each process feeds the same batches of ``per_device_train_batch_size``
            rows, the last of which may be smaller. With "data_parallel" each process feeds its own batches, the last
            of which is filled up.

    Raises:
        SettingError: another model, or a setting that a parallel model cannot follow.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from shardwright.integrations.hugging_face import Trainer
        >>> tiny = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=8, n_layer=1, n_head=2))
        >>> rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
        >>> settings = TrainingArguments("out", max_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True)
        >>> trainer = Trainer(sw.AutoParallel(tiny).dataset_strategy("full_batch"), settings, train_dataset=rows)
        >>> trained = trainer.train()
        {'train_runtime': ...}
    """

    model: Any  #: the `AutoParallel`; inside `_save` and the like the plain model

    def __init__(
        self, model: AutoParallel | None = None, args: TrainingArguments | None = None, *more: object, **kwargs: object
    ) -> None:
        if not isinstance(model, AutoParallel):
            raise SettingError(f"Trainer(model={type(model).__name__})", legal="Trainer(model=sw.AutoParallel(net), …)")
        if model.loss_fn is not None:
            raise SettingError(
                "Trainer hands the labels to the model, by name, and the AutoParallel has a loss_fn",
                legal="sw.AutoParallel(net) of a model that computes its loss from labels",
            )
        super().__init__(model, args, *more, **kwargs)
        self._check()
        self.accelerator.feed(model)
        net = (
            transformers.trainer.unwrap_peft_model(model.net)
            if hasattr(transformers.trainer, "unwrap_peft_model")
            else model.net
        )
        if self.args.label_names is None:
            self.label_names = find_labels(type(net))
        self.can_return_loss = can_return_loss(type(net))

    def _check(self) -> None:
        apart = self.model.settings.dataset_strategy != "full_batch" and self.args.world_size > 1
        if apart and (self.compute_loss_func is not None or self.args.label_smoothing_factor):
            raise SettingError(
                "a loss outside of the model, of each rank's own part of the batch",
                legal='dataset_strategy("full_batch"), or a loss inside of the model',
            )
        if apart and self.model_accepts_loss_kwargs and not getattr(self.args, "average_tokens_across_devices", True):
            raise SettingError(
                "average_tokens_across_devices=False: the loss is that of the whole batch",
                legal="average_tokens_across_devices=True",
            )

    @property
    def _whole_batches(self) -> bool:
        return self.model.settings.dataset_strategy == "full_batch"

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # the subclass has no state of its own to set up
        if hasattr(self, "gather_function"):
            self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the first call brings each rank's slices to its device."""

    def get_tp_size(self) -> int:
        """The number of processes that are fed the same batch."""
        return self.args.world_size if self._whole_batches else super().get_tp_size()

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # `clip_grad_norm_` takes gradients on several meshes

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, object],
        return_outputs: bool = False,
        num_items_in_batch: object = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """The loss of the whole batch, not scaled by the number of processes; else as in `transformers.Trainer`."""
        if (
            self.model_accepts_loss_kwargs
            and num_items_in_batch is not None
            and self.compute_loss_func is None
            and self.label_smoother is None
        ):
            inputs, num_items_in_batch = {**inputs, "num_items_in_batch": num_items_in_batch}, None
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    # -- monitors --

    def _monitors(self) -> list[HuggingFaceMonitor]:
        return [found for found in self.callback_handler.callbacks if isinstance(found, HuggingFaceMonitor)]

    def train(self, *args: object, **kwargs: object) -> TrainOutput:
        """Train as `transformers.Trainer` does; monitors are closed where it raises."""
        try:
            return super().train(*args, **kwargs)
        except BaseException:  # of any kind: raised again
            for monitor in self._monitors():
                monitor.training_failed()
            raise

    def training_step(
        self, model: nn.Module, inputs: dict[str, object], *args: object, **kwargs: object
    ) -> torch.Tensor:
        """Do a step of `transformers.Trainer`; monitors note the batch and its loss."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        for monitor in self._monitors():
            monitor.note(inputs, loss)
        return loss

    # -- checkpoints --

    def _save(self, output_dir: str | None = None, state_dict: dict[str, object] | None = None) -> None:
        with self.model.whole(rank=None if self.args.save_on_each_node else 0) as net:
            if net is not None:
                model, self.model = self.model, net
                try:
                    super()._save(output_dir, state_dict)
                finally:
                    self.model = model

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            self.model,
            _plain(self.optimizer),
            Path(output_dir) / _PARTS,
            step=self.state.global_step,
            integrated_save=False,
            keep_checkpoint_max=None,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        parallel: Any = self.model if model is None else model
        with parallel.whole() as net:
            super()._load_from_checkpoint(resume_from_checkpoint, net)

    def _load_best_model(self) -> None:
        model = self.model
        with model.whole() as net:
            self.model = net
            try:
                super()._load_best_model()
            finally:
                self.model = model

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _PARTS
        if not folder.exists():
            if any(hasattr(p, CUT) for p in self.model.parameters()) and (Path(checkpoint) / "optimizer.pt").exists():
                raise SettingError(
                    f"{checkpoint}: the optimizer's state of one device, for parameters that are cut already",
                    legal="train(resume_from_checkpoint=…) before the first call of the model",
                )
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_checkpoint(self.model, _plain(self.optimizer), folder)
        file = Path(checkpoint) / _SCHEDULE
        try:
            state = torch.load(file, weights_only=True)
        except Exception as error:  # of any kind: torch's reader has many
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise CheckpointError(
                f"the state of the schedule cannot be read: {reason}",
                source=str(file),
                legal="a checkpoint of a Trainer that is whole",
            ) from error
        self.lr_scheduler.load_state_dict(state)


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class Trainer(TrainerMixin, transformers.Trainer):
    __doc__ = TrainerMixin.__doc__


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    __doc__ = TrainerMixin.__doc__
