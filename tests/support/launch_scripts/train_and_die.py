"""Trains on all workers; worker 1 dies in the third step, without a word."""

import os

import torch
from torch import nn

import shardwright as sw

runtime = sw.init()
torch.manual_seed(0)
with sw.no_init_parameters():
    net = nn.Sequential(
        sw.shard(nn.Linear(12, 12), ((1, runtime.devices), (1, runtime.devices), (1,))), nn.ReLU(), nn.Linear(12, 6)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
for step in range(1000):
    if runtime.rank == 1 and step == 2:
        os._exit(3)
    loss = model(torch.randn(12, 12), torch.arange(12) % 6)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}", flush=True)
