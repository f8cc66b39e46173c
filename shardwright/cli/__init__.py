"""The command line. `main` has the parser; each other module adds one command, or one family of commands.

    plan_command, calibrate_command, checkpoint_command, solve_command
    script               what a command is pointed at: a training script, or a function

``shardwright run`` is `launch.run`, which needs no torch.
"""

from __future__ import annotations
