"""A file of a user, whose names `test_observed_state` changes."""

K = 1.0
TABLE = {"k": 1.0}


def factor() -> float:
    return K
