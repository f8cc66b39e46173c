"""Launching: the processes of a run, their logs and how they end; and which of them a process is.

``settings`` is what a run is asked for, ``run`` the command, ``agent`` torchrun's engine at work, ``rendezvous`` how
the nodes of a run meet, ``watch`` which worker ended when, ``progress`` what the terminal shows, ``logs`` what is
written.
In a process that somebody started: ``environment`` is its place in the run, from ``claims``, what each launcher's
variables say, ``rank_table`` and ``host_list``; ``meeting`` is how ranks meet without an agent, ``interface`` the
network that leads to the others.
Only ``agent``, ``rendezvous`` and ``meeting`` import torch.
"""
