"""The zoo: models of several libraries as they are written, small and with random weights. Nothing is downloaded.

Each builder returns a model in float64, inputs, a target, and a loss of what the model returns. The table of results
has the models in the order of these modules.
"""

from __future__ import annotations

# isort: off
import transformer_models  # noqa: F401  (registers its models)
import vision_models  # noqa: F401
import other_models  # noqa: F401

# isort: on
from registry import MODELS, Built, Model

__all__ = ["MODELS", "Built", "Model"]
