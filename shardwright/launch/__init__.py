"""Launching: the processes of a run, their logs, their progress and their end; the place of a process in its run.

    run                  the command ``shardwright run``
    run_settings         the settings of a run
    agent                torchrun's engine at work on one node
    rendezvous           the meeting of a run's nodes, and of ranks without an agent
    lifelines            the end of a rank's process, noticed by rank 0
    console              logs, the live line, the worker that ended first
    progress             what long work does, how far it is, and where Ctrl-C stopped it
    guardian             the end of the workers where the launcher is killed
    environment          the place of a process in the run, from the variables of its launcher
    rank_table           the file that assigns ranks to the devices of an Ascend cluster
    device_choice        the device of a process

Only `agent`, `device_choice` and `rendezvous` import torch.
"""

from __future__ import annotations
