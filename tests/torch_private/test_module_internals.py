"""Walks over modules beside those of torch."""

import random

import pytest
from torch import nn

from shardwright.capture.module_calls import FunctionOfModels, ModelAndLoss
from shardwright.torch_private import modules_of, named_modules_of


class Named(nn.Module):
    """A module with a walk of its own."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix + "!", self


def tree(seed, own):
    """A random module, in which some modules occur several times and some places are empty."""
    pick = random.Random(seed)
    made = [nn.Linear(2, 2) for _ in range(3)]
    for _ in range(12):
        parent = nn.Module()
        for i in range(pick.randrange(4)):
            parent.add_module(f"part{i}", pick.choice([*made, None, Named() if own else nn.ReLU()]))
        made.append(parent)
    root = nn.Sequential(*made)
    root.more = nn.ModuleDict({"a": made[-1], "b": made[0]})
    return root


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_walks_are_those_of_torch(seed, own):
    root = tree(seed, own)
    for one, other in (
        (named_modules_of(root), root.named_modules()),
        (named_modules_of(root, remove_duplicate=False), root.named_modules(remove_duplicate=False)),
    ):
        assert [(path, id(m)) for path, m in one] == [(path, id(m)) for path, m in other]
    assert list(map(id, modules_of(root))) == list(map(id, root.modules()))


def test_modules_with_walks_of_their_own():
    net, loss = tree(0, False), nn.Sequential(nn.ReLU())
    holder, function = ModelAndLoss(net, loss), FunctionOfModels(lambda x: net(x), net)
    assert modules_of(holder) == [*net.modules(), *loss.modules()]
    assert modules_of(function) == list(net.modules()) and function not in modules_of(function)
    own = Named()
    assert named_modules_of(own) == [("!", own)] and modules_of(own) == [own]
