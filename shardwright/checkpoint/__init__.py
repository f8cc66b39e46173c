"""Checkpoints: what a run needs to go on, written whole or not at all, and read by any number of devices.

A checkpoint is a folder ``PATH/step-00000100``; PATH is that of a run. It holds

    manifest.json           every file with its digest, every tensor with the place of its bytes
    model.safetensors, …    the tensors, whole; or ``.metadata`` and ``__R_0.distcp``: the part of each rank
    state.json              step, settings of the optimizer, schedulers, random state, position in the data
    plan.json               the plan (`Plan.save`)

A checkpoint is written under a name that begins with a dot, and gets its own name once every byte is on the disk.

    save, writer            saving: what is written, and all ranks writing it together
    state                   what a rank has of the tensors of model and optimizer
    formats                 the files of tensors, and which rank writes which box of a tensor
    manifest                the manifest, digests, folders
    load, tensor_reader     loading, and reading any slice of a stored tensor
    target_placement        where tensors lie under the strategies of another run
    transform               a checkpoint for other devices, or whole files, made in one process
    callback                saving every so many steps or minutes
"""

from __future__ import annotations
