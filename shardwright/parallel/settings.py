"""The settings of a wrapped model: methods of `parallel.AutoParallel`, called before its first call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..capture.annotations import pipelining
from ..errors import SettingError
from ..partition.local_program import MODES
from ..partition.parameter_sharding import OptimizerParallel
from ..pipeline.pipeline_plan import PipelinePlan
from ..planfile.load_save import read_document
from ..planfile.parameter_file import ParameterStrategies
from ..runtime.distributed.gradient_fusion import Fusion, fusion_of
from ..sharded_plan import Plan
from ..torch_private import gradient_hooks
from .sequence_buckets import SequenceBuckets

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Settings"]


class Settings:
    """What `AutoParallel` may be told."""

    #: The library that hands batches to the processes, and the dataset_strategy by which it does; None: the user's own
    #: loop.
    _handed: tuple[str, Any] | None = None

    def dataset_strategy(self, strategy: str | tuple) -> Self:
        """How the batch is fed.

        Args:
            strategy: "data_parallel" (default): each process feeds its own part, the whole batch is their
                concatenation in the order of the ranks. "full_batch": every process feeds the same whole batch. A
                tuple with one entry per tensor input, a tuple of cuts or a `Layout`: each feeds the slice that this
                gives it. In the local runtime the one process feeds the whole batch in every case.

        Raises:
            SettingError: after the first call, or an unknown word.
        """
        if isinstance(strategy, str) and strategy not in ("data_parallel", "full_batch"):
            raise SettingError(
                f"unknown dataset_strategy {strategy!r}",
                legal='"data_parallel", "full_batch", or a tuple with one entry per tensor input',
            )
        self._dataset_strategy = self._before_first_call("dataset_strategy", strategy)
        return self

    def enable_gradients_mean(self, enabled: bool = True) -> Self:
        """With the loss outside and each rank feeding its own part: whether gradients are those of the mean of the
        ranks' losses (True; the default of data_parallel) or of their sum. With `loss_fn` it makes no difference.

        Raises:
            SettingError: after the first call.
        """
        self._gradients_mean = self._before_first_call("enable_gradients_mean", bool(enabled))
        return self

    def parameter_broadcast(self, enabled: bool = True) -> Self:
        """In processes, whether parameters and buffers begin with the values that they have on rank 0; otherwise (the
        default) they must begin alike, and ranks that differ are named in an error. In one process it changes nothing.

        Raises:
            SettingError: after the first call.
        """
        self._broadcast = self._before_first_call("parameter_broadcast", bool(enabled))
        return self

    def comm_fusion(
        self, config: dict[str, Any] | None = None, *, allreduce: Any = None, openstate: bool = True
    ) -> Self:
        """Which gradients are summed over ranks in one collective: they wait for one another, and travel while the
        backward goes on.

        Args:
            config: the arguments below as a dict.
            allreduce: ``{"mode": "auto"}`` (the default): buckets of a size that suits. ``{"mode": "size", "config":
                25}``, or 25: a bucket is full at 25 MB. ``{"mode": "index", "config": [10, 20]}``, or the list: buckets
                begin before the parameters of these indices, counted in the order of ``model.parameters()`` among those
                that are trained.
            openstate: False: each gradient by itself.

        In one process it changes nothing but what is refused.

        Raises:
            SettingError: after the first call, an unknown mode or key, or a config that does not fit the mode.
        """
        if config is not None:
            known = {"openstate", "allreduce"}
            if not isinstance(config, dict) or set(config) - known or allreduce is not None:
                raise SettingError(
                    f"comm_fusion: unknown config {config!r}",
                    legal='{"openstate": True, "allreduce": {"mode": "auto"}}: sums of gradients are what is fused',
                )
            openstate, allreduce = config.get("openstate", openstate), config.get("allreduce")
        if not isinstance(openstate, bool):
            raise SettingError(f"comm_fusion: openstate={openstate!r}", legal="True or False")
        fusion = Fusion() if allreduce is None else fusion_of(allreduce)
        self._fusion = self._before_first_call("comm_fusion", fusion if openstate else Fusion(limit=0))
        return self

    def hsdp(self, shard_size: int = -1, threshold: float = 64, optimizer_level: str = "level1") -> Self:
        """Optimizer parallel: parameters that several devices hold alike are stored in parts, on top of what operators'
        own strategies cut; gathered before use, their gradients summed and scattered. What is computed stays the same.

        Args:
            shard_size: over how many of its replicas a parameter is cut, neighbouring ones; -1: all. The gradient is
                then summed over the rest.
            threshold: KB (1024 bytes) of the whole parameter from which on it is cut. One whose slices' dim 0 does not
                divide stays whole, and the plan says so; so does what `shardwright.no_optimizer_parallel` names.
            optimizer_level: "level1": parameters and the optimizer's state are cut; under `no_sync` gradients are held
                whole. "level2": they are cut as well. "level3": weights are not kept from the forward for the backward
                either, but gathered again. (With `compile` the compiler decides what is kept, and gradients are cut.)

        Raises:
            SettingError: after the first call, or an unknown value. At the first call: a `shard_size` that does not
                divide the replicas of a parameter.
        """
        self._hsdp = self._before_first_call("hsdp", OptimizerParallel(shard_size, threshold, optimizer_level))
        return self

    def pipeline(
        self,
        stages: int | str = 2,
        scheduler: str = "1f1b",
        micro_batches: int | str | None = None,
        stage_config: Mapping[str, int] | None = None,
        chunks: int | None = None,
    ) -> Self:
        """Put parts of the model on different devices, and batches through them in pieces.

        Of N devices, stage s has the ranks from s·N/S to (s+1)·N/S; strategies and layouts inside of it speak of these
        N/S. With ``dataset_strategy("data_parallel")`` ranks at one position in their stages feed the same part of the
        batch. The batch, the first dim of every tensor input whose first dim is as long as the first's, is split;
        losses and gradients are those of the whole batch. Batch norms train by the statistics of each micro-batch.

        A pipeline runs forward and backward together: the model needs its loss, by `loss_fn` or in itself, and
        ``loss.backward()`` hands over gradients that are there already. Under ``torch.no_grad()`` it runs the forward
        alone, and returns what the model returns.

        Args:
            stages: how many groups the devices are cut into, or "auto": a search decides where the model is cut, how
                many devices each stage has, and what is computed again (see `PipelinePlan.alternatives`). Processes
                then feed the whole batch.
            scheduler: "1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", or a CSV file with a row for each group of
                devices and an action in each cell, such as 2F3 (stage 2, forward, micro-batch 3).
            micro_batches: into how many pieces a batch is split, at least `stages`; with stages="auto" also "auto".
                None: 4, or "auto".
            stage_config: path of a module -> its stage, besides what `shardwright.set_stage` says.
            chunks: how many stages each group of devices has: `stages` · `chunks` in all. None: 2 for "interleaved" and
                "zbv", else 1.

        Raises:
            SettingError: after the first call, or a value that there is not. At the first call: stages that the model
                or the devices cannot have.
        """
        if micro_batches is None:
            micro_batches = "auto" if stages == "auto" else 4
        given = dict(
            stages=stages, scheduler=scheduler, micro_batches=micro_batches, stage_config=stage_config, chunks=chunks
        )
        self._pipeline = self._before_first_call("pipeline", pipelining(given))
        return self

    def buckets(
        self,
        seq: Sequence[int],
        dim: int = 1,
        fill: Mapping[str, float] | None = None,
        mask: str | None = "attention_mask",
    ) -> Self:
        """Pad sequences to one of a few lengths, so that a language model fed with many lengths has few programs.

        Each call is padded on the right to the shortest bucket that holds it. Padding is masked, its labels are ignored
        by the loss, and results are cut back to the sequence's own length. Where each process feeds its own part of the
        batch, all processes take the longest bucket that one of them needs. With several buckets the first
        call captures the model for all of them (``varying``).

            model.buckets(seq=[512, 1024, 2048])

        Args:
            seq: the lengths, ascending.
            dim: the dim of the inputs that is the sequence.
            fill: name of an input of the model -> the value that fills it up, besides the names that models of Hugging
                Face transformers use; "target" is the input of the loss, by default its ``ignore_index``.
            mask: the input of the model that is 1 where there is a token and 0 in padding; made where a call gives
                none.
                None: the model needs no mask, because its earlier positions do not depend on later ones.

        Raises:
            SettingError: after the first call, or lengths that make no sense. At a call: a sequence longer than the
                longest bucket, an input whose padding is not known, a model without such a mask.
        """
        value = SequenceBuckets(tuple(seq), dim, dict(fill or {}), mask)
        self._buckets = self._before_first_call("buckets", value)
        return self

    def load_operator_strategy_file(self, path: str | Path) -> Self:
        """Split operators as a plan says that was saved: each line is a mark, over what the model's own marks say.
        Operators without a line are left to the mode; where each has one, the plan is that of the file.

        Args:
            path: a file that `save_operator_strategy_file` or `Plan.save` wrote, edited or not.

        Raises:
            SettingError: after the first call, or in a mode that runs operators as they stand.
            PlanError: no such file, not a plan. At the first call: a plan for another model, other shapes or another
                number of devices, with the line.
        """
        if self.parallel_mode in ("stand_alone", "hybrid_parallel"):
            raise SettingError(
                f"load_operator_strategy_file: {self.parallel_mode} runs operators as they stand",
                legal=", ".join(m for m in MODES if m not in ("stand_alone", "hybrid_parallel")),
            )
        self._before_first_call("load_operator_strategy_file", path)
        self._strategies = read_document(path)
        return self

    def save_operator_strategy_file(self, path: str | Path) -> Self:
        """Write the plan as a document (`Plan.save`): now, or when it is made, at the first call or by `infer_layout`.
        In processes the first rank writes.

        Raises:
            SettingError: there is no such folder.
            OSError: the file cannot be written.
        """
        self._save_when_planned("save_operator_strategy_file", path, lambda plan: plan.save(path))
        return self

    def load_param_strategy_file(self, path: str | Path) -> Self:
        """Store parameters as a file says. Operators are split as marks and the mode say; what brings a parameter from
        there to its use is part of the plan, and searches reckon with it. Parameters without a line are stored as the
        mode and `hsdp` say.

        Args:
            path: a file that `save_param_strategy_file` wrote, edited or not, or a plan that was saved.

        Raises:
            SettingError: after the first call, or in a mode in which parameters are stored as they are.
            PlanError: no such file, or none of this kind. At the first call: a line of a parameter that the model has
                not, or of another shape or type; another number of devices.
            LayoutError: a line that no layout of the parameter follows.
        """
        if self.parallel_mode in ("stand_alone", "hybrid_parallel"):
            raise SettingError(
                f"load_param_strategy_file: {self.parallel_mode} stores parameters as they are",
                legal=", ".join(m for m in MODES if m not in ("stand_alone", "hybrid_parallel")),
            )
        self._before_first_call("load_param_strategy_file", path)
        self._parameter_strategies = ParameterStrategies.read(path)
        return self

    def save_param_strategy_file(self, path: str | Path) -> Self:
        """Write how each parameter is stored, a line for each (`ParameterStrategies`): now, or when the plan is made,
        at the first call or by `infer_layout`. In processes the first rank writes. Checkpoints are transformed by it.

        Raises:
            SettingError: there is no such folder.
            OSError: the file cannot be written.
        """
        self._save_when_planned("save_param_strategy_file", path, lambda plan: ParameterStrategies.of(plan).save(path))
        return self

    def _save_when_planned(self, name: str, path: str | Path, save: Callable[[Plan | PipelinePlan], None]) -> None:
        if not Path(path).absolute().parent.is_dir():
            raise SettingError(
                f"{name}: there is no folder {Path(path).parent}", legal="a file in a folder that is there"
            )
        if not self._programs:
            self._strategy_files.append(save)
        elif self._runtime().rank == 0:
            save(self.plan)

    def _write_strategies(self, plan: Plan | PipelinePlan) -> None:
        """Write the files that wait for a plan."""
        if self._runtime().rank == 0:
            for save in self._strategy_files:
                save(plan)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave the gradients as each rank has them; the next backward outside sums them together with
        its own, once: as cheap as one backward, and the same gradients as without.

        Between the two they are no gradients yet: an optimizer's step and ``clip_grad_norm_`` are refused
            (`SettingError`),
        ``zero_grad`` drops them. Sums that lie inside of the program, such as those of a cut parameter's activations,
        are taken as ever. In one process, where gradients are whole, it changes nothing; nor where parameters have
        hooks, which are to see the gradient of each backward.
        """
        trained = [*self.parameters(), *(self.loss_fn.parameters() if isinstance(self.loss_fn, nn.Module) else ())]
        before, self._accumulation.open = self._accumulation.open, not any(any(gradient_hooks(p)) for p in trained)
        try:
            yield
        finally:
            self._accumulation.open = before

    def _before_first_call(self, name: str, value: Any) -> Any:
        if self._programs or self._stored is not None:
            raise SettingError(
                f"{name}() comes too late: the model has been called and planned",
                legal=f"{name}() before the first call",
            )
        return value

    def _check_handed(self, handed: tuple[str, Any] | None) -> None:
        """See that the settings fit the way in which a library hands out batches.

        Args:
            handed: as of `_handed`.

        Raises:
            SettingError: a pipeline whose stages would get different parts of a batch; another `dataset_strategy` than
                the library was told.
        """
        if handed is None:
            return
        library, strategy = handed
        if self._pipeline is not None and strategy == "data_parallel":
            raise SettingError(
                f"{library} hands each process its own part of a batch, and a pipeline's stages work on the same one",
                legal='dataset_strategy("full_batch")'
                + (f" before {library} is given the model" if self._handed is handed else ""),
            )
        if self._dataset_strategy != strategy:
            raise SettingError(
                f"{library} hands out batches by dataset_strategy({strategy!r}), and the model has been given "
                f"dataset_strategy({self._dataset_strategy!r}) since",
                legal=f"dataset_strategy before {library} is given the model",
            )

    def plan_settings(self) -> dict[str, Any]:
        """What of the settings decides a plan, as `shardwright.plan` takes it."""
        return {
            "parallel_mode": self.parallel_mode,
            "dataset_strategy": self._dataset_strategy,
            "on_missing_rule": self.on_missing_rule,
            "sync_batch_norm": self.sync_batch_norm,
            "hsdp": self._hsdp,
            "pipeline": self._pipeline,
            "recompute": self.recompute,
            "uneven": self.uneven,
            "strategies": self._strategies,
            "param_strategies": self._parameter_strategies,
            "cluster": self._cluster,
            "memory": self._memory,
            "optimizer": self._optimizer,
            "mixed_precision": self.mixed_precision,
            "search_memory": self._search_memory,
            "search_progress": self._search_progress,
        }
