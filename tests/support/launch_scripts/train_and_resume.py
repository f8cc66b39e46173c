"""Trains from the last checkpoint on, with a checkpoint after every fourth step: rank 1 of the first attempt dies in
the eighth; later ones train for ever."""

import os
import signal
import sys
import time

import torch
from torch import nn

import shardwright as sw

runtime = sw.init()
torch.manual_seed(0)
net = nn.Sequential(
    sw.shard(nn.Linear(12, 12), ((1, runtime.devices), (1, runtime.devices), (1,))),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(12, 6),
)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch")
callback = sw.CheckpointCallback(sw.CheckpointConfig(sys.argv[1], every_n_steps=4), model, optimizer)
restored = sw.load_checkpoint(model, optimizer, sys.argv[1], missing_ok=True)
step = restored.step if restored else 0
print(f"from step {step}", flush=True)
while True:
    step += 1
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and (runtime.rank, step) == (1, 8):
        os.kill(os.getpid(), signal.SIGKILL)
    loss = model(torch.randn(12, 12, generator=torch.Generator().manual_seed(step)), torch.arange(12) % 6)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} {loss.item().hex()}", flush=True)
    callback.step(step)
    if step > 7:
        time.sleep(0.05)
