"""Where commands write: a path that cannot be written is told before the work."""

from __future__ import annotations

from typing import Any


def writable(path: Any) -> Any:
    """Callback of an option: the path, if something can be written there as far as can be told; URLs are not tried."""
    if path is not None and "://" not in str(path):
        from storage.room import check_output

        check_output(path)
    return path
