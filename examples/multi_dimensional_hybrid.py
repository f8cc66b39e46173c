"""Everything at once: pipeline stages, strategies that a search finds in each of them, optimizer parallel,
recomputation.

Eight devices make two stages of four. A batch goes through them in four micro-batches; of the layers' strategies on a
stage's four devices nothing is said here. Losses and gradients are those of the whole batch on one device.

    python examples/multi_dimensional_hybrid.py                         eight devices inside this one process
    shardwright run --worker_num 8 examples/multi_dimensional_hybrid.py   eight processes
    torchrun --nproc-per-node 8 examples/multi_dimensional_hybrid.py    the same, by PyTorch's own launcher
"""

import torch
import torch.nn as nn
from common import arguments
from data import digits

import shardwright as sw


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.layer1, self.relu1 = nn.Linear(784, 512, dtype=dtype), nn.ReLU()
        self.layer2, self.relu2 = nn.Linear(512, 512, dtype=dtype), nn.ReLU()
        self.layer3 = nn.Linear(512, 1, dtype=dtype)

    def forward(self, x):
        x = self.relu1(self.layer1(x.flatten(1)))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


STAGES = {"layer1": 0, "relu1": 0, "layer2": 1, "relu2": 1, "layer3": 1}


def main(argv=None):
    args = arguments(argv, __doc__)
    sw.init(devices=8)  # the world that a launcher started, or eight devices in this process
    torch.manual_seed(0)
    with sw.no_init_parameters():  # nothing is allocated here; no process ever has another stage's parameters
        net = Network(args.dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, fused=True)
    sw.recompute(net.relu1)  # what they make is dropped, and made again in the backward
    sw.recompute(net.relu2)

    model = sw.AutoParallel(net, loss_fn=nn.L1Loss(), parallel_mode="recursive_programming")
    model.pipeline(stages=2, micro_batches=4, stage_config=STAGES)  # or sw.set_stage(net.layer1, 0), and so on
    model.hsdp()  # what a stage's devices hold alike, they store in parts
    model.dataset_strategy("full_batch")  # every process feeds the same whole batch

    losses = []
    for epoch in range(args.epochs):  # from here on: the loop of a one-device program
        loader = digits(args.batch_size, shuffle_seed=epoch, dtype=args.dtype, limit=args.steps)
        for step, (image, label) in enumerate(loader):
            loss = model(image, label.to(args.dtype).unsqueeze(1))  # the digit as a number: mean absolute error
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 10 == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {losses[-1]}", flush=True)
    return losses


if __name__ == "__main__":
    main()
