"""Plans as JSON files.

load_save            the two functions
encoding             graphs, strategies and layouts as JSON, and back
plan_document        reading the plan of one program
pipeline_document    reading the plan of a pipeline
document_writer      writing both
parameter_file       where parameters lie, as a file of its own
"""

from __future__ import annotations
