"""A cluster of two hosts of four devices: links inside of a host are fast, those between the hosts slow."""

import shardwright as sw

CLUSTER = sw.Cluster(
    "two hosts",
    (sw.Level("inside", 4, 1e12, 1e-9), sw.Level("between", 2, 5e9, 1e-9)),
    1e12,
    {"float32": 1e14},
    1e15,
    1e-9,
)
