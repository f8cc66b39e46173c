"""Pairwise energies to try solvers on: random ones of many shapes, and networks of layers."""

import itertools

import numpy as np

from shardwright.solver.problem import MemoryUsage, Problem

SHAPES = ("tree", "cycle", "grid", "dense", "sparse", "alone")


def pairs(shape, nodes, random):
    """The edges of a graph of that shape."""
    if shape == "tree":
        return [(int(random.integers(0, j)), j) for j in range(1, nodes)]
    if shape == "cycle":
        return [(i, i + 1) for i in range(nodes - 1)] + ([(0, nodes - 1)] if nodes > 2 else [])
    if shape == "grid":
        side = max(1, int(nodes**0.5))
        return [(v, v + 1) for v in range(nodes - 1) if (v + 1) % side] + [(v, v + side) for v in range(nodes - side)]
    some = {"dense": 0.9, "sparse": 0.3, "alone": 0.0}[shape]
    return [pair for pair in itertools.combinations(range(nodes), 2) if random.random() < some]


def random_energy(seed, shape, nodes, states, forbidden=0.0, whole=True):
    """A problem with up to that many states a node and that share of forbidden pairs; whole: of small integer costs."""
    random = np.random.default_rng(seed)

    def table(*sizes):
        costs = random.integers(-4, 10, sizes).astype(float) if whole else random.random(sizes) * 1e-3
        costs[random.random(sizes) < forbidden / (2 if len(sizes) == 1 else 1)] = np.inf
        return costs

    sizes = random.integers(1, states + 1, nodes)
    return Problem(
        tuple(table(k) for k in sizes),
        {(i, j): table(sizes[i], sizes[j]) for i, j in pairs(shape, nodes, random)},
        tuple(f"op{v}" for v in range(nodes)),
    )


def with_usages(problem, seed, limit):
    """The problem with random memory, each node's at random moments, and that part of the dearest as the limit."""
    random = np.random.default_rng(seed)
    usages = []
    for v, own in enumerate(problem.costs):
        for _ in range(int(random.integers(0, 3))):
            start = int(random.integers(0, 5))
            usages.append(
                MemoryUsage(
                    v, start, start + int(random.integers(1, 4)), random.integers(0, 10, len(own)).astype(float)
                )
            )
    whole = Problem(problem.costs, problem.edges, problem.names, tuple(usages))
    most = [use.amount.argmax() for use in usages]
    return Problem(
        problem.costs,
        problem.edges,
        problem.names,
        tuple(usages),
        limit * float(sum(use.amount[at] for use, at in zip(whole.usages, most))),
    )


def held_most(problem, states):
    """The most memory that is held at any moment."""
    return max(
        (
            sum(u.amount[states[u.node]] for u in problem.usages if u.start <= t < u.stop)
            for t in {u.start for u in problem.usages}
        ),
        default=0.0,
    )


def layered(layers, nodes=30, states=60, *, seed=0, hub=0, tied=False, same=True, forbidden=0.1):
    """A network of layers: a chain in each, two residual connections around its halves, one value that three read.

    Args:
        layers, nodes, states: how many; nodes of a layer, states of a node.
        hub: states of a node that every layer reads; 0: there is none.
        tied: the first node and the last share a table, as tied embeddings do.
        same: all layers have the same tables.
        forbidden: share of the pairs.
    """
    random = np.random.default_rng(seed)

    def table(rows, columns):
        # what conversions cost: nothing where the layouts agree
        layout, other = random.integers(0, 8, rows), random.integers(0, 8, columns)
        costs = np.where(layout[:, None] == other, 0.0, random.random((rows, columns)) * 1e-3)
        costs[random.random(costs.shape) < forbidden * (layout[:, None] != other)] = np.inf
        return costs

    def layer():
        inside = [(i, i + 1) for i in range(nodes - 1)] + [(0, nodes // 2), (nodes // 2, nodes - 1), (2, 4), (2, 6)]
        return (
            [random.random(states) * 5e-4 for _ in range(nodes)],
            {pair: table(states, states) for pair in sorted(set(inside))},
            table(states, states),
        )

    made = [layer()] * layers if same else [layer() for _ in range(layers)]
    costs, edges, shared = [], {}, table(states, hub) if hub else None
    for number, (own, inside, link) in enumerate(made):
        first = number * nodes
        costs += own
        edges.update({(first + i, first + j): costs_of for (i, j), costs_of in inside.items()})
        if number:
            edges[first - 1, first] = link
    if hub:
        edges.update({(number * nodes + 3, len(costs)): shared for number in range(layers)})
        costs.append(random.random(hub) * 5e-4)
    if tied:
        edges[0, layers * nodes - 1] = table(states, states)
    return Problem(tuple(costs), edges)


def assignments(problem):
    """All there are."""
    return itertools.product(*(range(len(own)) for own in problem.costs))
