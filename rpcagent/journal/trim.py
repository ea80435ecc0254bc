"""Memory that was given back to the allocator is given back to the system, where that can be asked for (glibc)."""

from __future__ import annotations

import contextlib


def trim() -> None:
    """After much was freed at once: the allocator keeps it otherwise, in pieces between what lives. Holds nobody up."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
