"""The command line. `main` has the parser; each other module adds one command, or one family of commands.

    plan_command         plan, plan diff, explain, simulate, verify
    report_command       report
    rehearse_command     rehearse
    compare_trace_command  compare-trace
    calibrate_command    calibrate
    checkpoint_command   checkpoint info, verify, merge, transform
    doctor_command       doctor
    completion_command   completion
    command_line         what commands share: the parser with its examples, --json, --import
    forked_ranks         forked processes with a time limit, two of them as ranks, for doctor
    checkpoint_tables    a checkpoint in a terminal
    script               the target of a command: a training script, or a function

``shardwright run`` is `launch.run`, which needs no torch.
"""

from __future__ import annotations
