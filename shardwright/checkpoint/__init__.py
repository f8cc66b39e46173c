"""Checkpoints: the state a run resumes from, written whole or not at all, and read by any number of devices.

A checkpoint is a folder ``PATH/step-00000100``; PATH is the folder of the run. Its files:

    manifest.json           every file with its digest, every tensor with the offset of its bytes
    model.safetensors, …    the tensors, whole; or ``.metadata`` and ``__R_0.distcp``: the part of each rank
    state.json              step, optimizer settings, schedulers, random state, position in the data
    plan.json               the plan (`Plan.save`)

A checkpoint is written under a name that begins with a dot and gets its own name once every byte is on the disk.
Where ranks share no file system, each folder has the parts of its own ranks, and all else.

    save, writer            saving: the content of a checkpoint, and its writing by all ranks together
    run_state               the state of a run: the tensors of one rank, random states, and ``state.json``
    tensor_files            the tensor files, and the assignment of each tensor's boxes to ranks
    manifest                the manifest; the check for damage
    digests                 digests of files, block by block
    checkpoint_folders      the folders of a run's checkpoints: names, unfinished ones, old ones; the lock of the run
    load                    loading under any plan, on any number of devices
    stored_checkpoint       any slice of a stored tensor, read from the folders that ranks see
    target_placement        placement of the tensors under the strategies of another run
    transform               a checkpoint for other devices, or whole files, made in one process
    callback                saving every N steps or minutes, or at a signal that ends all ranks
"""

from __future__ import annotations
