"""Texts and pictures of a plan, for people.

description          a plan in the field's words, by groups of equal layers
operator_cuts        the cuts of operators in the field's words
operator_names       operators by their paths in the model
tables               a plan or a pipeline in a terminal
table_elements       rows, columns and notes of these tables
console_tables       tables and sentences that fit the width of a terminal
explanations         the reasons for a plan, in a terminal
ir_dump              the program of one rank as plain text, one operator a line
format               units, types, layouts and numbers in these texts
html_report          a plan as one HTML file; plans, operators and layouts in a notebook
report_content       its figures
html_elements        the values and pictures of which it is made
plan_diff            two plans compared
plan_figures         the figures of a plan as JSON
timeline             a simulated step: Perfetto's trace, a picture
"""

from __future__ import annotations

from ..launch.progress import load_rich

load_rich()  # before the modules below import it: it would draw one of Python's random numbers

from .ir_dump import write_dumps  # noqa: E402  see above
from .tables import explain  # noqa: E402  see above

__all__ = ["explain", "write_dumps"]
