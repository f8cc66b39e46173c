"""All ranks in one process.

local_executor       the program, operator by operator
shards               the local tensors of all ranks, and redistributions as tensor arithmetic
operators            one operator for all ranks at once
matrix_products      matrix products for all ranks at once
"""

from __future__ import annotations
