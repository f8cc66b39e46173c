"""A plan compared with one device.

verify               the same model, batch and optimizer, run both ways
verify_report        the numbers, and the text of the report
first_difference     the first operator whose result differs
node_comparison      a plan's program compared with the captured graph, node by node
value_precision      the coarsest floating dtype on the way to each value
"""

from __future__ import annotations
