"""GPT-3 (175 billion parameters) planned for a cluster, on a laptop: no process group, no weights, nothing is run.

    shardwright plan examples/gpt3.py:gpt3 --devices 1024 --cluster h200x8x128
    shardwright plan examples/gpt3.py:gpt3 --devices 1024 --cluster h200x8x128 --memory cluster

The plan's summary says what a step takes, what a device holds and which communications cost most; `plan.json` has every
operator's strategy, to be read, changed and loaded again. `shardwright explain plan.json linear_5` says why.
"""

import torch
import torch.nn.functional as F
from gpt import GPT

#: Brown et al. 2020, table 2.1: layers, width and heads of the largest model; its vocabulary is that of GPT-2.
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 96, 12288, 96, 2048, 50257

#: Sequences in a step: about the 3.2 million tokens of the paper.
BATCH = 1536


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt3(layers=LAYERS, batch=BATCH):
    """The arguments of `shardwright.plan`."""
    with torch.device("meta"):
        net = GPT(VOCABULARY, LENGTH, layers, WIDTH, HEADS)
        tokens = torch.zeros(batch, LENGTH, dtype=torch.long)
    return {
        "net": net,
        "inputs": (tokens,),
        "targets": tokens,
        "loss_fn": loss_of,
        "parallel_mode": "dynamic_programming",
        "dataset_strategy": "full_batch",
    }


if __name__ == "__main__":
    import shardwright as sw

    plan = sw.plan(**gpt3(), devices=1024, cluster="h200x8x128")
    print(f"{plan.cost:.1f} s a step, no other plan of the search is priced below {plan.bound:.1f} s")
