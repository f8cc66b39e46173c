"""JSON: files read strictly and within limits, and values that JSON has no word for.

json_reader     the reader of every JSON file of the package
json_values     states of schedulers, samplers, generators and users as JSON, and back
"""

from __future__ import annotations
