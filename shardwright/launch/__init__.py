"""Launching: the processes of a run, their logs and how they end.

``settings`` is what a run is asked for, ``run`` the command, ``agent`` torchrun's engine at work, ``rendezvous`` how
the nodes of a run meet, ``watch`` which worker ended when, ``progress`` what the terminal shows, ``logs`` what is
written.
Only ``agent`` and ``rendezvous`` import torch.
"""
