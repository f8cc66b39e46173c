"""The watch of ranks over one another.

rank_positions       the position of each rank, and the rank that others wait for
device_events        the collective that a device has come to while the host is ahead
watchdog             messages beside the collectives, and the verdict that ends a run
wait_times           the time of a step by computation and exposed communication
"""

from __future__ import annotations
