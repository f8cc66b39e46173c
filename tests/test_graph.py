"""The records of a captured graph, and walks over nested arguments."""

import torch


def test_nested_arguments_are_walked_as_pytree_does():
    from collections import OrderedDict, namedtuple

    from torch.fx.immutable_collections import immutable_dict, immutable_list
    from torch.utils import _pytree as pytree

    from shardwright.graph import leaves, map_leaves

    pair = namedtuple("pair", "a b")
    tree = (
        1,
        [2.0, None, immutable_list([True, slice(1, 2)])],
        {"k": (torch.int64, "x"), "j": []},
        torch.Size([3, 4]),
        immutable_dict({"m": pair(5, [6])}),
        OrderedDict(z=7, a=8),
        pair(9, {"n": ()}),
        torch.device("cpu"),
    )
    assert list(leaves(tree)) == pytree.tree_leaves(tree)
    seen = []
    mine, theirs = map_leaves(lambda x: seen.append(x) or (x,), tree[:3]), pytree.tree_map(lambda x: (x,), tree[:3])
    assert repr(mine) == repr(theirs) and seen == pytree.tree_leaves(tree[:3])
    assert [type(x) for x in map_leaves(lambda x: x, tree)] == [type(x) for x in pytree.tree_map(lambda x: x, tree)]
    assert map_leaves(lambda x: x, tree) == tree
