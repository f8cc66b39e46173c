"""What a person reads: tables in the terminal, dumps of the programs."""

from .ir import write_dumps
from .tables import explain

__all__ = ["explain", "write_dumps"]
