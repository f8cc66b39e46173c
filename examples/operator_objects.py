"""Split single operators of a network: operator objects, each marked by its `shard` method with a tuple strategy.

A strategy has one tuple for each input of the operator, with one number for each dim: into how many equal parts
that dim is cut.

    python examples/operator_objects.py                         eight devices inside this one process
    shardwright run --worker_num 8 examples/operator_objects.py   eight processes
    torchrun --nproc-per-node 8 examples/operator_objects.py    the same, by PyTorch's own launcher
"""

import torch
import torch.nn as nn
from common import arguments
from data import digits

import shardwright as sw


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(784, 512, dtype=dtype) * 0.01)
        self.w2 = nn.Parameter(torch.randn(512, 512, dtype=dtype) * 0.01)
        self.w3 = nn.Parameter(torch.randn(512, 10, dtype=dtype) * 0.01)
        self.matmul1 = sw.Operator(torch.matmul).shard(((2, 4), (4, 1)))  # rows by 2, the contracted dim by 4
        self.relu1 = sw.shard(nn.ReLU(), ((4, 1),))  # rows by 4, each part on two devices
        self.matmul2 = sw.Operator(torch.matmul)
        self.relu2 = sw.shard(nn.ReLU(), ((8, 1),))  # rows by 8
        # A mark may come later, from outside too (net.matmul2.shard(...)): the last one before the first step holds.
        self.matmul2.shard(((1, 8), (8, 1)))  # the contracted dim by 8

    def forward(self, x):
        x = self.relu1(self.matmul1(x.flatten(1), self.w1))
        x = self.relu2(self.matmul2(x, self.w2))
        return x @ self.w3  # no mark: data-parallel


def main(argv=None):
    args = arguments(argv, __doc__)
    sw.init(devices=8)  # the world that a launcher started, or eight devices in this process
    torch.manual_seed(0)
    with sw.no_init_parameters():  # nothing is allocated here
        net = Network(args.dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, fused=True)

    model = sw.AutoParallel(net, loss_fn=nn.CrossEntropyLoss(), parallel_mode="semi_auto")
    model.dataset_strategy("full_batch")  # every process feeds the same whole batch

    losses = []
    for epoch in range(args.epochs):  # from here on: the loop of a one-device program
        loader = digits(args.batch_size, shuffle_seed=epoch, dtype=args.dtype, limit=args.steps)
        for step, (image, label) in enumerate(loader):
            loss = model(image, label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 10 == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {losses[-1]}", flush=True)
    return losses


if __name__ == "__main__":
    main()
