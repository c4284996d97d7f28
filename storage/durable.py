"""Zarr's local store, with files that are on disk before they take another's place.

Zarr replaces a file by rename but does not wait for the disk: after a power failure the new name may hold nothing.
An append writes the last, partly filled chunk again, which holds rows that were committed long ago.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zarr.storage import LocalStore

from storage.places import write_durably

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer


class DurableStore(LocalStore):
    """A directory in which a value is either the old one or the new one, also after a power failure."""

    async def set(self, key: str, value: Buffer) -> None:
        """Replaces a value."""
        self._check_writable()
        await asyncio.to_thread(write_durably, self.root / key, value.as_buffer_like())
