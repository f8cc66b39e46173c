"""`sw.verify` of real models: no false alarm, though most of them compute a part in float32, and an alarm for a real
fault."""

from __future__ import annotations

import sys

import pytest
import torch
from models import MODELS

import shardwright as sw
from shardwright.runtime.local import local_executor

pytestmark = pytest.mark.filterwarnings("ignore")

#: Model -> the mode in which it is verified: the searches take turns.
VERIFIED = {
    name: ("recursive_programming", "semi_auto")[i % 2]
    for i, name in enumerate(
        (
            "gpt2",
            "llama",
            "qwen3",
            "gemma2",
            "gemma3",
            "phi3",
            "t5",
            "bert",
            "whisper",
            "vit",
            "clip",
            "mamba",
            "mamba2",
            "resnet",
            "convnext",
            "timm_mixer",
            "unet",
            "dit",
            "gcn",
            "dlrm",
        )
    )
}


def verified(name: str, mode: str, **given) -> sw.VerifyReport:
    torch.manual_seed(0)
    built = MODELS[name].build()
    return sw.verify(
        built.net,
        built.inputs,
        built.target,
        loss_fn=built.loss,
        kwargs=built.kwargs,
        devices=4,
        parallel_mode=mode,
        cut=True,
        **given,
    )


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode"), VERIFIED.items(), ids=VERIFIED)
def test_no_false_alarm(name: str, mode: str) -> None:
    if MODELS[name].library != "torch":
        pytest.importorskip(MODELS[name].library, exc_type=ImportError)
    report = verified(name, mode, steps=2)
    assert report.proved and report.first_difference is None, report.summary()
    double, single = report.differences
    assert double.tolerance == 1e-10 and single.tolerance == 1e-4
    for (
        what,
        precision,
    ) in double.coarser:  # an operator is named, be it one that a gradient went through in the first step
        assert precision.dtype == torch.float32 and precision.operator and precision.source, (what, precision)


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_an_error_of_a_thousandth_is_found_in_a_model_with_parts_in_float32(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    right, wrongs = local_executor.convert_shards, []

    def wrong(redistribution, shards, how):
        result = right(redistribution, shards, how)
        sums = any(step.kind in ("all_reduce", "reduce_scatter") for step in redistribution.steps)
        if not sums or (sys._getframe(1).f_code.co_name == "transpose") != (part == "backward"):
            return result
        wrongs.append(redistribution)
        ramp = torch.linspace(0, 1e-3, result.shape[-1], dtype=torch.float64).to(result.dtype) if result.dim() else 1e-3
        return result * (1 + ramp)

    monkeypatch.setattr(local_executor, "convert_shards", wrong)
    report = verified("llama", "recursive_programming", steps=1, dtypes=(torch.float64,))
    assert wrongs and not report.ok, report.summary()
    assert report.first_difference is not None and report.first_difference.tolerance <= 1e-4
