"""Parts of the observation of a forward's Python state (`observed_state`).

attribute_patches  methods of classes that record the attributes which are read and assigned
code_names     names in the bytecode of the user's functions
opaque_state   state of objects without attributes: numpy arrays, byte arrays, context variables, random generators
named_reads    names in the code of functions that run, as reads
stand_ins      iterators, files, clocks, environment, ``getattr`` and ``globals`` of the user's code, during a capture
memoised_functions  functions that cache their results, such as `functools.lru_cache`
places         places in which Python keeps values
kept_state     state in reach of a forward, compared after it and restored
"""

from __future__ import annotations
