"""Memory that was freed stays with the process, to be used again.

A step makes and frees matrices of some megabytes, hundreds of times a second. By default glibc gives such pieces back
to the system, which has to clear every page anew: on two cores, an emulator's step of 8192 rows and 200 features took
74 ms in place of 55 ms, and varied three times as much, which processes that wait for each other feel twice.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# Of mallopt(3), with the largest values that it takes or that make sense.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_PIECE, KEPT, AHEAD = 32 * 2**20, 2**30, 64 * 2**20


@cache
def keep_pages() -> bool:
    """Tells the C library so, once; whether it listened. What stays is bounded by what was in use at once."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library than glibc
        return False
    pairs = ((M_MMAP_THRESHOLD, LARGEST_PIECE), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, AHEAD))
    return all(mallopt(ctypes.c_int(parameter), ctypes.c_int(value)) == 1 for parameter, value in pairs)
