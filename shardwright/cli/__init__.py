"""The command line. Each module of commands adds one, or a family of them.

    main                 the parser of the whole command line; completion
    plan_command         plan, plan diff, explain, report, simulate
    verify_command       verify
    measuring_commands   calibrate, rehearse, compare-trace
    checkpoint_command   checkpoint info, verify, merge, transform
    doctor_command       doctor
    command_line         what commands share: the parser with its examples, --json, --import; the target of a command
    forked_ranks         forked processes with a time limit, two of them as ranks, for doctor
    library_imports      optional libraries imported, each in a process of its own, for doctor

``shardwright run`` is `launch.run`, which needs no torch.
"""

from __future__ import annotations
