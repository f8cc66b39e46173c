"""Launching: the processes of a run, their logs and how they end; and which of them a process is.

    run                  the command ``shardwright run``
    run_settings         what a run is asked for
    agent                torchrun's engine at work on one node
    rendezvous           how the nodes of a run meet, and how ranks meet without an agent
    console              logs, the live line, which worker ended first
    environment          the place of a process in the run, from the variables of its launcher

Only `agent` and `rendezvous` import torch.
"""

from __future__ import annotations
