"""A strategy of Lightning's ``Trainer`` for a `LightningModule` that holds an `AutoParallel`.

    class Task(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = sw.AutoParallel(net, nn.CrossEntropyLoss())
        def training_step(self, batch, index):
            return self.model(*batch)
        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters())

    L.Trainer(strategy=ShardwrightStrategy(), accelerator="cpu", devices=2).fit(Task(), loader)

The model is not wrapped, and losses and gradients are those of the whole batch. Lightning's checkpoints hold whole
tensors of the model and the optimizer, and load on any number of devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from ..capture.annotations import CUT, whole_shape
from ..errors import SettingError
from ..identity_tables import IdentitySet
from ..parallel.auto_parallel import AutoParallel
from ..process_runtime import init
from ..torch_private import pytree
from .monitored_loop import MonitoredLoop, check_feeding

__all__ = ["LightningMonitor", "ShardwrightStrategy"]


def _parallel_models(module: nn.Module) -> list[AutoParallel]:
    """The parallel models of a module, without those inside of others."""
    found = [m for m in module.modules() if isinstance(m, AutoParallel)]
    inside = IdentitySet(sub for m in found for sub in m.net.modules())
    return [m for m in found if m not in inside]


class LightningMonitor(MonitoredLoop, Callback):
    """A callback that drives a `shardwright.Monitor`: ``Trainer(…, callbacks=[LightningMonitor(every=10)])``.

    Lines have the loss that ``training_step`` returns, the samples of a batch (rows of ``input_ids``, or of its first
    tensor) and its tokens (elements of ``input_ids``), beside what a monitor measures itself, of the first parallel
    model of the module. Validations are left out of rates. The monitor is closed at the end, and where training raises.

    Args:
        every, tensorboard, wandb, out: see `shardwright.Monitor`.

    Example:
        >>> from shardwright.integrations.lightning import LightningMonitor
        >>> callbacks = [LightningMonitor(every=10)]  # of a Trainer
    """

    _validation = 0.0  # the time at which it began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(next(iter(_parallel_models(pl_module)), None), trainer.world_size, trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Tensor] | None,
        batch: object,
        batch_idx: int,
    ) -> None:
        self.note(batch, outputs.get("loss") if isinstance(outputs, Mapping) else outputs)
        self._done(trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out(self._validation)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(failed=True)


class ShardwrightStrategy(DDPStrategy):
    """A strategy for parallel models, in processes that Lightning starts, or finds started, as for its own ``"ddp"``.

    Lightning hands each process its own part of a batch (``dataset_strategy("data_parallel")``). With "full_batch"
    the Trainer needs ``use_distributed_sampler=False``. ``accumulate_grad_batches``, ``gradient_clip_val``,
    validation and ``ckpt_path`` work as usual. A checkpoint is loaded before the first call of the model, as
    ``fit(ckpt_path=…)`` does.

    One process (``devices=1``) is this one, also in a notebook; more processes need a script, as Lightning's ``"ddp"``.

    Raises:
        SettingError: a module without an `AutoParallel`, or with trained parameters outside of one.
    """

    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()  # otherwise nothing is launched, which a notebook may do

    def setup_environment(self) -> None:
        super().setup_environment()
        init()

    @property
    def _models(self) -> list[AutoParallel]:
        return _parallel_models(self.lightning_module)

    def setup(self, trainer: Trainer) -> None:
        self._check(trainer)
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _check(self, trainer: Trainer) -> None:
        models = self._models
        if not models:
            raise SettingError(
                f"{type(self.lightning_module).__name__} has no parallel model",
                legal="self.model = sw.AutoParallel(net, …) in its __init__",
            )
        inside = {p for m in models for p in m.parameters()}
        inside |= {p for m in models if isinstance(m.loss_fn, nn.Module) for p in m.loss_fn.parameters()}
        outside = [n for n, p in self.lightning_module.named_parameters() if p.requires_grad and p not in inside]
        if outside and trainer.world_size > 1:
            raise SettingError(
                f"the parameter {outside[0]!r} is trained and lies outside of the parallel model: its gradient "
                "would be each rank's own",
                legal="one AutoParallel around all that is trained",
            )
        keeping = [c for c in trainer.checkpoint_callbacks if not getattr(c, "save_weights_only", True)]
        for model in models:
            if trainer.world_size > 1:
                check_feeding(model, "Lightning")
                if model.settings.pipeline is not None and keeping and trainer.state.fn == TrainerFn.FITTING:
                    raise SettingError(
                        f"{type(keeping[0]).__name__} would save the state of an optimizer that lies in the stages of "
                        "a pipeline",
                        legal="ModelCheckpoint(save_weights_only=True), and sw.save_checkpoint(model, "
                        "optimizer, path, step=…) to go on from; or enable_checkpointing=False",
                    )
            whole = model.settings.dataset_strategy == "full_batch"
            shards = trainer._accelerator_connector.use_distributed_sampler
            if whole and shards and trainer.world_size > 1:
                raise SettingError(
                    "every rank is to feed the whole batch, and Lightning hands each its own part",
                    legal='Trainer(…, use_distributed_sampler=False), or dataset_strategy("data_parallel")',
                )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.no_sync())
            yield

    def teardown(self) -> None:
        """End as Lightning's strategy does, but leave parameters in place: Lightning would move them to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints --

    def lightning_module_state_dict(self) -> dict[str, object]:
        """The whole tensors, on rank 0; empty on other ranks, which save nothing."""
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.whole(rank=0))
            if not self.is_global_zero:
                return {}
            return pytree.tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), self.lightning_module.state_dict())

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.whole())
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        """The whole tensors of an optimizer's state.

        Raises:
            SettingError: a pipeline, whose state lies in stages: `shardwright.save_checkpoint` saves it.
        """
        if any(whole_shape(p) != p.shape for group in optimizer.param_groups for p in group["params"]):
            raise SettingError(
                "Lightning's checkpoint of an optimizer whose state lies in the stages of a pipeline",
                legal="sw.save_checkpoint(model, optimizer, path, step=…), or save_weights_only=True",
            )
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  a second to import

        state = super().optimizer_state(optimizer)
        return pytree.tree_map_only(DTensor, lambda x: x.full_tensor().cpu(), state)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        if any(hasattr(p, CUT) for model in self._models for p in model.parameters()):
            raise SettingError(
                "an optimizer's whole state, for parameters that are cut already",
                legal="fit(…, ckpt_path=…) before the first call of the model, or sw.load_checkpoint",
            )
        super().load_optimizer_state_dict(checkpoint)
