"""Checkpoints: what a run needs to go on, written whole or not at all, and read by any number of devices.

A checkpoint is a folder ``PATH/step-00000100``; PATH is that of a run. It holds

    manifest.json           what else there is: every file with its digest, every tensor with where its bytes lie (`manifest`)
    model.safetensors, …    the tensors, whole; or ``.metadata`` and ``__R_0.distcp``: each rank's part
    state.json              what is not a tensor: step, settings of the optimizer, schedulers, random state, position in the data
    plan.json               the plan (`Plan.save`)

It is written beside, under a name with a dot, and gets its own once every byte is on the disk (`folders`).
"""
