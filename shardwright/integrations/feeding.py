"""A check of the batches that other libraries hand to the processes of a parallel model."""

from __future__ import annotations

from ..parallel.auto_parallel import AutoParallel

__all__ = ["check_feeding"]


def check_feeding(model: AutoParallel, library: str) -> None:
    """Check that all ranks of a pipeline's stages are fed the same batch.

    The check runs now, and again when a call of the model is planned, because settings may still change until then.

    Args:
        model: the parallel model.
        library: the library's name, for errors.

    Raises:
        SettingError: each process is handed its own part of a batch, so that the stages would get different ones.
    """
    wrapper = library, model.settings.dataset_strategy
    model._check_wrapper(wrapper)
    model._wrapper = wrapper
