"""Texts and pictures of a plan, for people.

tables               a plan in a terminal
pipeline_tables      a pipeline in a terminal
table_parts          rows, columns and notes that both have
explanations         the reasons for a plan, in a terminal
ir_dump              the program of one rank as plain text, one operator a line
format               units, types, layouts and numbers in these texts
plan_diff            two plans compared
timeline             a simulated step: Perfetto's trace, a picture
"""

from __future__ import annotations

from .ir_dump import write_dumps
from .tables import explain

__all__ = ["explain", "write_dumps"]
