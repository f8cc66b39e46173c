"""A step function: `sw.AutoParallel` around the function of one step, in place of a model.

The function is plain Python. It runs as it is written in each step; the model that it calls is parallel meanwhile. Here
`sw.value_and_grad` gives loss and gradients of a forward function, which is planned together with its model, and the
optimizer is called with the gradients. `plain_step` says the same in PyTorch's own words.

    python examples/train_step.py                         eight devices inside this one process
    shardwright run --worker_num 8 examples/train_step.py   eight processes
    torchrun --nproc-per-node 8 examples/train_step.py    the same, by PyTorch's own launcher
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments
from data import digits

import shardwright as sw


class Network(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(784, 512, dtype=dtype) * 0.01)
        self.w2 = nn.Parameter(torch.randn(512, 512, dtype=dtype) * 0.01)
        self.w3 = nn.Parameter(torch.randn(512, 10, dtype=dtype) * 0.01)
        self.matmul1 = sw.shard(torch.matmul, in_strategy=((2, 4), (4, 1)))  # rows by 2, the contracted dim by 4
        self.relu1 = sw.shard(torch.relu, in_strategy=((4, 1),))  # rows by 4, each part on two devices
        self.matmul2 = sw.shard(torch.matmul, in_strategy=((1, 8), (8, 1)))  # the contracted dim by 8

    def forward(self, x):
        x = self.relu1(self.matmul1(x.flatten(1), self.w1))
        return torch.relu(self.matmul2(x, self.w2)) @ self.w3  # no mark: data-parallel


def functional_step(net, optimizer):
    loss_fn, optimizer = nn.CrossEntropyLoss(), sw.optimizer(optimizer)

    def forward_fn(image, label):
        logits = net(image)
        return loss_fn(logits, label), logits

    grad_fn = sw.value_and_grad(forward_fn, None, optimizer.parameters, has_aux=True)

    def train_step(image, label):
        (loss, _logits), grads = grad_fn(image, label)
        optimizer(grads)
        return loss  # of the whole batch, on every process

    return train_step


def plain_step(net, optimizer):
    def train_step(image, label):
        loss = F.cross_entropy(net(image), label)  # of the rows that this process feeds
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step


def main(argv=None, form=functional_step):
    args = arguments(argv, __doc__)
    sw.init(devices=8)  # the world that a launcher started, or eight devices in this process
    torch.manual_seed(0)
    with sw.no_init_parameters():  # nothing is allocated here
        net = Network(args.dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, fused=True)

    step = sw.AutoParallel(form(net, optimizer), parallel_mode="semi_auto")
    shard = sw.data_shard(step)  # which part of a batch this process reads

    losses = []
    for epoch in range(args.epochs):
        loader = digits(args.batch_size, shuffle_seed=epoch, dtype=args.dtype, limit=args.steps)
        for number, (image, label) in enumerate(loader):
            losses.append(step(*shard(image, label)).item())
            if number % 10 == 0:
                print(f"epoch: {epoch}, step: {number}, loss is {losses[-1]}", flush=True)
    return losses


if __name__ == "__main__":
    main()
