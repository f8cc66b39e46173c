"""Seconds of a search within a limit of memory, the host memory that it takes itself, and the quality of the plan.

    python benchmarks/planning_limits.py                      Llama, a mixture of experts and GPT, 96 layers, 64 devices
    python benchmarks/planning_limits.py --layers 12 --models llama --search-memory 512MB

Each case runs in a process of its own, so that the most that it took is its own: seconds on a CPU of the whole plan,
the capture aside; how far the process grew; the plan's gap. A limit is said in bytes a device; 0: none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT
from llama import Attention, Llama, RMSNorm, turns

from shardwright.capture.export import capture
from shardwright.errors import ShardwrightError
from shardwright.planning import make_plan
from shardwright.settings import Settings

#: GB a device, from loose to tight, with float32 weights and Adam. Nothing is known to keep the last of Llama's.
LIMITS = {"llama": (0, 140, 70, 42, 35), "mixtral": (0, 300, 140, 80, 74, 70), "gpt": (0, 141, 78, 70, 50)}


class Experts(nn.Module):
    """All experts of all tokens, weighted by the router's `top` best probabilities: one product for all of them."""

    def __init__(self, width: int, hidden: int, experts: int, top: int = 2) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Linear(width, experts * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(experts * hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        dense = (F.one_hot(chosen, self.experts).to(x.dtype) * weights.unsqueeze(-1)).sum(-2)
        h = (F.silu(self.gate(x)) * self.up(x)).unflatten(-1, (self.experts, -1))
        return self.down((h * dense.unsqueeze(-1)).flatten(-2))


class MixtralBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.experts = Attention(width, heads, kv_heads), Experts(width, hidden, experts)

    def forward(self, x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), turned)
        return x + self.experts(self.norm2(x))


class Mixtral(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        length: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        experts: int,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MixtralBlock(width, heads, kv_heads, hidden, experts) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("turns", turns(length, width // heads), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.turns[: tokens.shape[1]])
        return self.head(self.norm(x))


def model(name: str, layers: int) -> tuple[nn.Module, torch.Tensor]:
    """A model without weights, and its tokens."""
    with torch.device("meta"):
        if name == "gpt":
            return GPT(50257, 2048, layers, 12288, 96), torch.zeros(64, 2048, dtype=torch.long)
        net = (
            Llama(32000, 4096, layers, 8192, 64, 8, 28672)
            if name == "llama"
            else Mixtral(32000, 4096, layers, 4096, 32, 8, 14336, 8)
        )
        return net, torch.zeros(64, 4096, dtype=torch.long)


def measure(name: str, layers: int, mode: str, limit: float, search_memory: str | None) -> dict[str, Any]:
    """One case."""
    net, tokens = model(name, layers)
    graph = capture(
        net, (tokens, tokens), None, loss_fn=lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten())
    )
    out: dict[str, Any] = {"model": name, "layers": layers, "mode": mode, "GB": limit}
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        plan = make_plan(
            graph, 64, Settings(mode, cluster="h100x8x8", memory=limit * 1e9 or None, search_memory=search_memory)
        )
        found = plan.found
        out |= {
            "step": found.cost,
            "gap": None if found.bound is None else (found.cost - found.bound) / found.cost,
            "peak GB": plan.peak / 1e9,
            "notes": list(found.notes),
        }
    except ShardwrightError as error:
        out["error"] = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return out | {"seconds": time.process_time() - begin, "grown MB": grown * 1024 / 1e6}


def apart(*case: Any) -> dict[str, Any]:
    """The same in a process of its own."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(send, "w") as file:
            file.write(json.dumps(measure(*case)))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        text = file.read()
    status = os.waitpid(child, 0)[1]
    return (
        json.loads(text)
        if text
        else dict(zip(("model", "layers", "mode", "GB"), case)) | {"error": f"ended by {status}"}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--models", nargs="+", choices=tuple(LIMITS), default=tuple(LIMITS))
    parser.add_argument("--modes", nargs="+", default=("dynamic_programming", "recursive_programming"))
    parser.add_argument("--limits", nargs="+", type=float, help="GB a device; 0: none (default: those of each model)")
    parser.add_argument("--search-memory", metavar="SIZE")
    parser.add_argument("--output", type=Path, default=Path("planning_limits.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        for mode in arguments.modes:
            for limit in arguments.limits or LIMITS[name]:
                rows.append(apart(name, arguments.layers, mode, limit, arguments.search_memory))
                print(json.dumps(rows[-1]), flush=True)
                arguments.output.write_text(json.dumps(rows, indent=1))
    return int(any("error" in row and "ended by" in row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
