"""One rank of a plan, played alone, beside what the plan promises: seconds of operators, and the peak of memory.

    python benchmarks/rehearse.py              GPT and ResNet under several plans, a minute on a CPU
    python benchmarks/rehearse.py --quick      fewer steps

Plans are priced for this device, of which a product and a copy are timed first. What counts is the rank correlation of
the operators' seconds with the promised ones, above 0.9, and the peak, within a tenth of the plan's. Writes
rehearse.json. On an accelerator the same runs there, with larger models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "support")]
from gpt import GPT, mark
from resnet_like import ResNetLike

import shardwright as sw

LEAST_CORRELATION, TENTH = 0.9, 0.1


class TokenLoss(nn.Module):
    """Cross entropy of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.cross_entropy(logits.flatten(0, 1), target.flatten())


def seconds(run: Callable[[], Any], device: torch.device, rounds: int = 7) -> float:
    """The median of a function's seconds."""
    wait = torch.get_device_module(device).synchronize if device.type != "cpu" else lambda: None
    times = []
    for _ in range(rounds + 2):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def cluster_of(device: torch.device, devices: int) -> sw.Cluster:
    """A cluster of devices like this one, between links of an H100's."""
    size, copied = (1024, 1 << 24) if device.type == "cpu" else (8192, 1 << 29)
    figures = sw.Cluster.of(f"h100x{devices}").to_dict()
    x = torch.randn(size, size, device=device)
    figures["peak"] = {"float32": 2 * size**3 / seconds(lambda: x @ x, device)}
    y = torch.randn(copied, device=device)
    z = torch.empty_like(y)
    figures["memory_bandwidth"] = 8 * copied / seconds(lambda: z.copy_(y), device)
    small = torch.randn(8, device=device)
    figures["overhead"] = seconds(lambda: [small + small for _ in range(100)], device) / 100
    return sw.Cluster.from_dict(figures | {"name": f"8 x this {device.type}"})


def gpt(big: bool, marks: tuple[int, int] | None = None, **settings: Any) -> Any:
    """A GPT's plan for eight devices."""
    length, width, batch, vocabulary = (1024, 2048, 16, 32768) if big else (256, 256, 16, 2048)
    with torch.device("meta"):
        net, loss = GPT(vocabulary, length, 2, width, heads=8), TokenLoss()
        tokens = torch.zeros(batch, length, dtype=torch.long)
    if marks is not None:
        mark(net, loss, *marks)
    return sw.plan(net, (tokens,), loss, tokens, devices=8, **settings)


def resnet(big: bool, **settings: Any) -> Any:
    """A ResNet's plan for eight devices."""
    batch, size = (512, 224) if big else (64, 96)
    with torch.device("meta"):
        net, x, y = ResNetLike(), torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    return sw.plan(net, (x,), nn.CrossEntropyLoss(), y, devices=8, **settings)


PARTS = {"parallel_mode": "data_parallel", "dataset_strategy": "data_parallel"}
PLANS: dict[str, Callable[..., Any]] = {
    "GPT, data_parallel": lambda big, **more: gpt(big, **PARTS, **more),
    "GPT, dp2 x tp4": lambda big, **more: gpt(big, (2, 4), **more),
    "GPT, hsdp level3": lambda big, **more: gpt(
        big, **PARTS, hsdp={"threshold": 0, "optimizer_level": "level3"}, **more
    ),
    "ResNet, data_parallel": lambda big, **more: resnet(big, **PARTS, **more),
    "ResNet, searched": lambda big, **more: resnet(big, parallel_mode="dynamic_programming", **more),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 steps")
    parser.add_argument("--device", help="default: the accelerator, if any")
    parser.add_argument("--output", type=Path, default=Path("rehearse.json"), help="default: rehearse.json")
    arguments = parser.parse_args(argv)
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    device = torch.device(arguments.device or there or "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # threads that wait for one another on a shared machine make any operator long
    cluster = cluster_of(device, 8)
    out: dict[str, Any] = {"device": str(device), "load": os.getloadavg(), "cluster": cluster.to_dict(), "plans": {}}
    good = True
    for name, make in PLANS.items():
        plan = make(device.type != "cpu", cluster=cluster)
        made = sw.rehearse(plan, rank=3, device=device, steps=3 if arguments.quick else arguments.steps)
        ratio, correlation = made.peak_accumulating / made.promised_peak, made.correlation() or 0.0
        good &= correlation > LEAST_CORRELATION and abs(ratio - 1) <= TENTH
        out["plans"][name] = made.to_dict()
        print(
            f"{name:<22} correlation {correlation:.3f}  computing {made.ratios()['computing']:.2f} of the plan's  "
            f"peak {made.ratios()['peak']:.3f}, accumulating {ratio:.3f}  step {made.step:.3f} s",
            flush=True,
        )
    arguments.output.write_text(json.dumps(out, indent=1), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
