"""Checkpoints: the state a run resumes from, written whole or not at all, and read by any number of devices.

A checkpoint is a folder ``PATH/step-00000100``; PATH is the folder of the run. Its files:

    manifest.json           every file with its digest, every tensor with the offset of its bytes
    model.safetensors, …    the tensors, whole; or ``.metadata`` and ``__R_0.distcp``: the part of each rank
    state.json              step, optimizer settings, schedulers, random state, position in the data
    plan.json               the plan (`Plan.save`)

A checkpoint is written under a name that begins with a dot and gets its own name once every byte is on the disk.
Where ranks share no file system, each folder has the parts of its own ranks, and all else.

    save, writer            saving: the content of a checkpoint, and its writing by all ranks together
    checkpointed_model      the tensors of a model and an optimizer on one rank
    tensor_files            the tensor files, and the assignment of each tensor's boxes to ranks
    box_joining             short runs of a file put together into long ones
    manifest                the manifest; the check for damage
    digests                 digests of files, block by block
    state_file              ``state.json``: types and bounds of everything but tensors
    checkpoint_folders      the folders of a run's checkpoints: names, unfinished ones, old ones
    folders_of_ranks        the folders that ranks see, where they share no file system
    folder_lock             one run at a time saves into a folder
    load, tensor_reader     loading, and reading any slice of a stored tensor
    target_placement        placement of the tensors under the strategies of another run
    transform               a checkpoint for other devices, or whole files, made in one process
    callback                saving every N steps or minutes
"""

from __future__ import annotations
