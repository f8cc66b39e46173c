"""How other libraries hand batches to the processes of a parallel model."""

from __future__ import annotations

from ..parallel.auto_parallel import AutoParallel

__all__ = ["check_feeding"]


def check_feeding(model: AutoParallel, library: str) -> None:
    """See that the ranks of a pipeline's stages are fed alike: now, and again when a call of the model is planned,
    because settings may still change until then.

    Raises:
        SettingError: each process is handed its own part of a batch, of which the stages would get different ones.
    """
    handed = library, model._dataset_strategy
    model._check_handed(handed)
    model._handed = handed
