"""ResNet: the example's network in data_parallel and semi_auto, equal to one device; ResNet-50 itself once."""

import copy

import pytest
import resnet50
import torch
from data_parallel_by_hand import assert_as_copies
from one_device import assert_as_one_device, close, parallel
from ranks import run_ranks
from resnet50 import ResNet, split
from torch import nn

import shardwright as sw

DEVICES = 4
CROSS_ENTROPY = nn.CrossEntropyLoss()


def small(**settings) -> ResNet:
    torch.manual_seed(0)
    return ResNet((1, 1, 1, 1), 4, **settings).double()


def marked(net: ResNet) -> ResNet:
    """The stem by channels, one convolution inside by channels, the last layer by classes, all beside the batch; and a
    batch norm by places."""
    split(net, DEVICES)
    sw.shard(net.blocks[1].conv2, in_strategy=((2, 1, 1, 1), (2, 1, 1, 1)))
    sw.shard(net.blocks[2].conv3, in_strategy=((1, 4, 1, 1), (1, 4, 1, 1)))
    return net


def batches(count: int, size: int = 8, side: int = 16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images whose brightness differs along the batch, so that parts of it have other statistics."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (
            torch.randn(size, 3, side, side, dtype=torch.float64, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(count)
    ]
    return [(x + torch.linspace(-1, 1, size, dtype=torch.float64).reshape(-1, 1, 1, 1), label) for x, label in made]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize("stem", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
def test_semi_auto(stem: bool, dataset: str) -> None:
    """Losses over three steps, gradients, running statistics."""
    net = marked(small(small=stem))
    model = assert_as_one_device(
        net,
        *batches(3, side=16 if stem else 64),
        loss_fn=CROSS_ENTROPY,
        optimizer=sgd,
        devices=DEVICES,
        dataset=dataset,
    )
    plan = model.plan
    assert plan.parameters["fc.weight"].layout.cuts == (2, 1) and plan.parameters["conv1.weight"].layout.cuts[0] == 2
    assert plan.parameters["blocks.2.conv3.weight"].layout.cuts == (1, 4, 1, 1)


def test_data_parallel_with_statistics_of_the_whole_batch() -> None:
    assert_as_one_device(
        small(),
        *batches(3),
        loss_fn=CROSS_ENTROPY,
        optimizer=sgd,
        devices=DEVICES,
        mode="data_parallel",
        dataset="data_parallel",
        sync_batch_norm=True,
    )


def test_data_parallel_with_statistics_of_each_part() -> None:
    assert_as_copies(small(), batches(3), CROSS_ENTROPY, DEVICES, rate=0.01)


@pytest.mark.parametrize(("mode", "options"), [("semi_auto", {}), ("data_parallel", {"sync_batch_norm": True})])
def test_train_and_eval(mode: str, options: dict) -> None:
    net = marked(small())
    one = copy.deepcopy(net)
    model = parallel(net, devices=DEVICES, mode=mode, **options)
    for step, (x, _) in enumerate(batches(4)):
        training = step % 2 == 0
        got, expected = model.train(training)(x), one.train(training)(x)
        close(got, expected, f"outputs of step {step}")
        got.square().sum().backward(), expected.square().sum().backward()
        close([p.grad for p in net.parameters()], [p.grad for p in one.parameters()], f"gradients of step {step}")
        close(dict(net.state_dict()), dict(one.state_dict()), f"state after step {step}")
    assert net.bn1.num_batches_tracked == 2


@pytest.mark.long
def test_resnet50() -> None:
    """The whole network on two images of 32 by 32, one step: the loss, gradients and running statistics."""
    torch.manual_seed(0)
    net = split(ResNet().double(), 2)
    one = copy.deepcopy(net)
    assert sum(p.numel() for p in net.parameters()) == 23_520_842
    ((x, label),) = batches(1, size=2, side=32)
    model = parallel(net, CROSS_ENTROPY, devices=2)
    got, expected = model(x, label), CROSS_ENTROPY(one(x), label)
    close(got, expected, "loss")
    got.backward(), expected.backward()
    for (name, ours), theirs in zip(net.named_parameters(), one.parameters()):
        scale = theirs.grad.abs().max()  # fifty layers of sums in another order
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=float(scale) * 1e-6, msg=name)
    close(dict(net.named_buffers()), dict(one.named_buffers()), "running statistics")


def on_a_rank(rank: int, world: int, options: dict) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    sw.init()
    net = small()
    model = sw.AutoParallel(net, CROSS_ENTROPY, **options)
    optimizer = sgd(net.parameters())
    losses = []
    for x, label in batches(2):
        loss = model(x.chunk(world)[rank], label.chunk(world)[rank])
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    sent = [c.op for c in model.plan.collectives(rank) if c.phase == "forward"]
    return losses, {n: b.clone() for n, b in net.named_buffers()}, sent


@pytest.mark.parametrize("options", [{"parallel_mode": "data_parallel"}, {"parallel_mode": "semi_auto"}], ids=str)
def test_processes_do_as_one_process_does(options: dict) -> None:
    """Running statistics are equal on all ranks, and those of the local runtime."""
    ranks = run_ranks(on_a_rank, 2, options)
    net = small()
    model = parallel(net, CROSS_ENTROPY, devices=2, mode=options["parallel_mode"], dataset="data_parallel")
    optimizer = sgd(net.parameters())
    losses = []
    for x, label in batches(2):
        loss = model(x, label)
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    for rank, (mine, buffers, sent) in enumerate(ranks):
        torch.testing.assert_close(mine, losses, rtol=1e-7, atol=0)
        close(buffers, dict(net.named_buffers()), f"running statistics of rank {rank}")
        # One sum for the statistics of all layers and one for the loss; or an exchange for each layer.
        assert sorted(set(sent)) == (
            ["all_reduce"] if options["parallel_mode"] == "data_parallel" else ["all_gather", "all_reduce"]
        )
        assert len(sent) == (2 if options["parallel_mode"] == "data_parallel" else 1 + 17)


# -- the example -------------------------------------------------------------------------------------------------------

REDUCED = ["--width", "4", "--blocks", "1", "1", "1", "1", "--batch", "8", "--steps", "6", "--dtype", "float64"]


def test_the_example_trains(capsys) -> None:
    """The same losses in every mode that sees the whole batch; lower ones in the end."""
    one = resnet50.main([*REDUCED, "--parallel_mode", "stand_alone"])
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"epoch: 0, step: {step}, loss is {one[step]}" for step in (0, 5)]
    for options in (["semi_auto"], ["data_parallel", "--sync_batch_norm"]):
        losses = resnet50.main([*REDUCED, "--devices", "4", "--parallel_mode", *options])
        torch.testing.assert_close(losses, one, rtol=1e-7, atol=0)
    own = resnet50.main([*REDUCED, "--devices", "4"])
    assert len(own) == 6 and abs(own[0] - one[0]) > 1e-6
