"""Random numbers: those of one device, under every cut.

counter_rng       a word for each position of the whole tensor, equal on every rank
dropout           a dropout and its mask in one operator
dropout_kernel    the same in one kernel, on devices for which Triton compiles
traced_numbers    the same numbers in operators that a compiler sees through
word_arithmetic   words of 64 bits as tensors, also where a device has no such integers, and the numbers made of them
"""
