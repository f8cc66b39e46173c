"""Plans as JSON files.

    load_save            saving and loading a plan of either kind
    encoding             graphs, strategies and layouts as JSON, and back
    plan_document        reading the plan of one program
    pipeline_document    reading the plan of a pipeline
    document_writer      writing both
    parameter_file       the storage of parameters, as a file of its own

The document of a plan is JSON to read, compare, edit and load; `plan_document` describes its format.
"""

from __future__ import annotations
