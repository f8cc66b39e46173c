"""Split single operators of a network: functions, each marked with `sw.shard` and Layouts.

A Layout names the axes of a device matrix; called, it says for each dim of a tensor which axes cut it. In a tuple
of axes the first is the major one, and "None" leaves a dim whole. Tuple strategies and Layouts may stand side by side.

    python examples/layout_functional.py                         eight devices inside this one process
    shardwright run --worker_num 8 examples/layout_functional.py   eight processes
    torchrun --nproc-per-node 8 examples/layout_functional.py    the same, by PyTorch's own launcher
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments
from data import digits

import shardwright as sw

layout = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))
tp = sw.Layout((8,), ("tp",))


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(784, 512, dtype=dtype) * 0.01)
        self.w2 = nn.Parameter(torch.randn(512, 512, dtype=dtype) * 0.01)
        self.w3 = nn.Parameter(torch.randn(512, 10, dtype=dtype) * 0.01)
        self.matmul1 = sw.shard(torch.matmul, in_strategy=(layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
        self.relu1 = sw.shard(torch.relu, in_strategy=((4, 1),))
        self.matmul2 = sw.shard(torch.matmul, in_strategy=(tp("None", "tp"), tp("tp", "None")))
        self.relu2 = sw.shard(F.relu, in_strategy=((8, 1),))

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
