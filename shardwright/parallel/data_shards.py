"""The part of the data that each process reads: `data_shard` and `sampler`, and a look at the first batch.

The ``dataset_strategy`` of a model says which part of a batch a process feeds. Example, 8 processes and 32 rows:

    "data_parallel"          process r reads rows 4r to 4r + 3 of each batch
    "full_batch"             each process reads all 32 rows
    ((4, 1), (4,))           the rows in 4 parts of 8: processes 0 and 1 read the first part
    pipeline of 2 stages     processes at one position in their stages read the same part: 4 parts

In one process the model is fed the whole batch, and the part is the whole: one script is right in both.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ..capture.source_lines import stack_level
from ..errors import SettingError
from ..graph import Graph, Value
from ..layout import Digits, Layout
from ..partition.local_program import place_inputs
from ..planners.planning_problem import global_inputs
from ..pytree_objects import opened
from ..torch_private import pytree
from .setting_methods import SettingMethods

__all__ = ["DataShard", "ShardSampler", "data_shard", "digest_of_parts", "sampler", "warn_of_parts"]


class DataShard:
    """The part of each batch that this process reads.

    Args:
        model: the `AutoParallel`, whose ``dataset_strategy`` and pipeline hold at the time of reading.
    """

    def __init__(self, model: SettingMethods) -> None:
        self._model = model

    def __repr__(self) -> str:
        return f"DataShard(index={self.index}, count={self.count})"

    @property
    def count(self) -> int:
        """The number of parts of the rows of a batch.

        Raises:
            SettingError: the inputs are not all cut along their rows alone, and alike.
        """
        return self._rows()[1]

    @property
    def index(self) -> int:
        """The number of the part that this process reads, from 0.

        Raises:
            SettingError: as `count`.
        """
        return self._rows()[0]

    def __call__(self, *batch: object) -> Any:
        """This process's part of a whole batch, in the order of the model's inputs.

            loss = model(*shard(image, label))

        Args:
            batch: tensors or numpy arrays, also in lists and dicts; anything else is returned as it is.

        Returns:
            The parts: of one argument its part, of several a tuple.

        Raises:
            SettingError, LayoutError: the ``dataset_strategy`` does not fit the batch.
        """
        leaves, spec = pytree.tree_flatten(batch)
        arrays = [x for x in leaves if _is_array(x)]
        position, positions = _place(self._model)
        if positions > 1:
            layouts = _layouts(self._model, positions, [tuple(x.shape) for x in arrays])
            parts = (x[layout.slice(tuple(x.shape), position)] for x, layout in zip(arrays, layouts))
            leaves = [next(parts) if _is_array(x) else x for x in leaves]
        made = pytree.tree_unflatten(leaves, spec)
        return made[0] if len(batch) == 1 else made

    def _rows(self) -> tuple[int, int]:
        position, positions = _place(self._model)
        strategy = self._model.settings.dataset_strategy
        if positions == 1 or strategy == "full_batch":
            return 0, 1
        if strategy == "data_parallel":
            return position, positions
        entries = [entry for entry in strategy if entry is not None and (isinstance(entry, Layout) or len(entry))]
        layouts = [entry if isinstance(entry, Layout) else Layout.from_cuts(positions, entry) for entry in entries]
        rows = {_rows_of(layout) for layout in layouts}
        if len(rows) != 1 or None in rows or any(layout.devices != positions for layout in layouts):
            raise SettingError(
                f"a part of the rows under dataset_strategy({strategy!r}), which does not cut all inputs along their "
                "rows alone, and alike",
                legal="sw.data_shard(model)(*batch) of whole batches",
            )
        return layouts[0].position(0, position), layouts[0].cuts[0]


def _rows_of(layout: Layout) -> Digits | None:
    """The digits that cut dim 0; None where other dims are cut too."""
    dims = layout.dims or ((),)
    return None if any(dims[1:]) else dims[0]


def _is_array(x: object) -> bool:
    numpy = sys.modules.get("numpy")
    return isinstance(x, Tensor) or (numpy is not None and isinstance(x, numpy.ndarray))


def _place(model: SettingMethods) -> tuple[int, int]:
    """The position of this process among those that may feed different parts, and the number of positions."""
    runtime, settings = model._runtime(), model.settings
    if not runtime.processes or settings.parallel_mode == "stand_alone":
        return 0, 1
    stages = 1 if settings.pipeline is None else settings.pipeline.stages
    if not isinstance(stages, int):
        if settings.dataset_strategy != "full_batch":
            raise SettingError(
                f"a part of the batch of a pipeline with stages={stages!r}", legal='dataset_strategy("full_batch")'
            )
        stages = 1
    devices = runtime.devices or 1
    positions = devices // stages if devices % stages == 0 else devices
    return runtime.rank % positions, positions


def _layouts(model: SettingMethods, positions: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Layout, ...]:
    values = tuple(Value(f"input {i}", shape, torch.float32) for i, shape in enumerate(shapes))
    graph = Graph(values, {}, {}, {}, (), ())
    return place_inputs(graph, positions, model.settings.dataset_strategy).inputs


def data_shard(model: object) -> DataShard:
    """The part of each batch that this process is to read.

        shard = sw.data_shard(model)
        dataset = dataset.shard(num_shards=shard.count, index=shard.index)   # readers that take a part of the rows
        loss = model(*shard(image, label))                                   # or a part of a whole batch

    Args:
        model: the `AutoParallel`, after its settings.

    Returns:
        The part: `count` parts there are, of which this process reads number `index`, from 0. A call cuts the rows of
        tensors: ``shard(x, y)`` has this process's rows of each.

    Raises:
        SettingError: no `AutoParallel`.

    Example:
        >>> part = sw.data_shard(sw.AutoParallel(net, loss_fn).dataset_strategy("full_batch"))
        >>> part.index, part.count
        (0, 1)
    """
    if not isinstance(model, SettingMethods):
        raise SettingError(f"data_shard({type(model).__name__})", legal="the AutoParallel that is fed")
    return DataShard(model)


class ShardSampler(Sampler[Any]):
    """The result of `sampler`. Each ``iter`` begins the next epoch; `set_epoch` says which one is the next."""

    def __init__(
        self, length: int, shard: DataShard, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self._length, self._shard, self._batch_size = length, shard, batch_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._epoch = 0
        self._check()

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter`` be that of an epoch, from 0: the order of the rows is a function of seed and epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        """The number of rows, or with `batch_size` of batches, that this process reads in an epoch."""
        if self._batch_size is None:
            return self._length // self._shard.count
        return self._length // self._batch_size if self._drop_last else -(-self._length // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        index, count = self._shard.index, self._shard.count
        order = torch.arange(self._length, device="cpu")
        if self._shuffle:
            generator = torch.Generator("cpu").manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._length, generator=generator, device="cpu")
        self._epoch += 1
        if self._batch_size is None:
            yield from order[index : len(self) * count : count].tolist()
            return
        for batch in order.split(self._batch_size)[: len(self)]:
            yield batch.chunk(count)[index].tolist()

    def _check(self) -> None:
        """Check that each batch, and the last one, has a part for each process."""
        count, size = self._shard.count, self._batch_size
        last = self._length % (count if size is None else size)
        if size is not None and size % count:
            raise SettingError(
                f"sampler: batches of {size} rows, which {count} parts do not divide",
                legal=f"batch_size={max(1, size // count) * count} or {-(-size // count) * count}",
            )
        if not self._drop_last and last % count:
            raise SettingError(
                f"sampler: {last} of {self._length} rows are left for a last batch, which {count} parts do not divide",
                legal="drop_last=True",
            )


def sampler(
    dataset: Sized | int,
    model: object,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = True,
) -> ShardSampler:
    """The rows of a dataset that this process is to read, as a torch ``Sampler``.

        loader = DataLoader(dataset, batch_sampler=sw.sampler(dataset, model, batch_size=32, shuffle=True))

    With `batch_size` it yields this process's part of each batch, a list: the whole batch has the same rows in the
    same order on any number of processes. Without it it yields rows one by one, every `count`-th of them, for
    ``DataLoader(dataset, batch_size=32 // sw.data_shard(model).count, sampler=…)``: the batch has the same rows in
    another order.

    Args:
        dataset: the dataset, or the number of its rows.
        model: the `AutoParallel`, after its settings.
        batch_size: the number of rows of a whole batch; None: rows one by one.
        shuffle: True: another order in each epoch, alike on all processes; torch's own generator is left alone.
        seed: of the order.
        drop_last: leave out the rows at the end that do not fill a batch, or that the parts do not divide.

    Returns:
        The sampler; ``set_epoch(n)`` chooses the order of an epoch.

    Raises:
        SettingError: a dataset without a length; rows of a batch, or of the last one, that the parts do not divide;
            inputs that are not all cut along their rows alone, and alike.

    Example:
        >>> model = sw.AutoParallel(net, loss_fn).dataset_strategy("full_batch")
        >>> list(sw.sampler(10, model, batch_size=4))
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    length = dataset if isinstance(dataset, int) else len(dataset) if hasattr(dataset, "__len__") else None
    if length is None or isinstance(dataset, bool) or length < 0:
        raise SettingError(
            f"sampler({type(dataset).__name__}): it has no length",
            legal="a dataset with __len__; sw.data_shard(model).index and .count for one that is iterated",
        )
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise SettingError(f"sampler: batch_size={batch_size!r}", legal="a whole number from 1, or None")
    return ShardSampler(length, data_shard(model), batch_size, bool(shuffle), seed, bool(drop_last))


# -- the first batch


def digest_of_parts(inputs: object) -> str:
    """A digest of the values that a process feeds; "" where all of them are constant, as in benchmarks."""
    digest, constant = hashlib.blake2b(digest_size=16), True
    for x in pytree.tree_leaves(opened(inputs)):
        if isinstance(x, Tensor) and x.numel() and x.layout is torch.strided:
            flat = x.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
            constant = constant and bool((flat == flat[0]).all())
    return "" if constant else digest.hexdigest()


def warn_of_parts(
    model: SettingMethods, inputs: tuple[tuple[object, ...], dict[str, object]], digests: Sequence[str]
) -> None:
    """Warn where ranks feed the same values as different parts of the batch, or different values as one part.

    Args:
        model: the model.
        inputs: the arguments of this rank's call.
        digests: `digest_of_parts` of each rank.
    """
    if not all(digests):
        return
    strategy = model.settings.dataset_strategy
    _, positions = _place(model)
    whole = pytree.tree_leaves(global_inputs(*inputs, positions, strategy))
    shapes = [tuple(x.shape) for x in whole if isinstance(x, Tensor)]
    layouts = _layouts(model, positions, shapes)
    by_rows: dict[tuple[object, ...], dict[str, list[int]]] = {}
    for rank, digest in enumerate(digests):
        part = tuple(
            tuple(layout.position(dim, rank % positions) for dim in range(len(shape)))
            for layout, shape in zip(layouts, shapes)
        )
        by_rows.setdefault(part, {}).setdefault(digest, []).append(rank)
    if len(by_rows) > 1 and len(set(digests)) == 1:
        warnings.warn(
            f"all {len(digests)} ranks feed the same values as their parts of the batch, under "
            f"dataset_strategy({strategy!r}): the batch has the same rows {len(by_rows)} times. If each rank reads "
            'the whole batch, it is dataset_strategy("full_batch"); otherwise sw.sampler or sw.data_shard gives each '
            "its part",
            stacklevel=stack_level(),
        )
    apart = next((ranks for ranks in by_rows.values() if len(ranks) > 1), None)
    if apart is not None:
        one, other, *_ = (ranks[0] for ranks in apart.values())
        warnings.warn(
            f"ranks {one} and {other} feed different values as one part of the batch, under "
            f"dataset_strategy({strategy!r}){_of_stages(model)}: sw.sampler or sw.data_shard gives each its part",
            stacklevel=stack_level(),
        )


def _of_stages(model: SettingMethods) -> str:
    return "" if model.settings.pipeline is None else ", at one position in their stages of the pipeline"
