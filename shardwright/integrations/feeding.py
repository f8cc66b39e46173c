"""How other libraries hand batches to the processes of a parallel model."""

from __future__ import annotations

from ..errors import SettingError
from ..parallel import AutoParallel

__all__ = ["check_feeding"]


def check_feeding(model: AutoParallel, library: str) -> None:
    """See that the ranks of a pipeline's stages are fed alike.

    Raises:
        SettingError: each process is handed its own part of a batch, of which the stages would get different ones.
    """
    if model._pipeline is not None and model._dataset_strategy == "data_parallel":
        raise SettingError(f"{library} hands each process its own part of a batch, and a pipeline's stages work on the same one",
                           legal='dataset_strategy("full_batch")')
