"""What can go wrong with the user's data. Every message names the thing, the value and the cure."""

from storage.text import redacted


class VcalError(Exception):
    """Base of the errors that a user can fix; the command line prints them without a traceback.

    Messages end in logs: what they name of passwords and signatures is hidden.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class ProblemError(VcalError, ValueError):
    """The problem file is not valid."""


class IngestError(VcalError, ValueError):
    """Rows or files that cannot enter a store."""


class StoreError(VcalError):
    """A store cannot be created, opened, read or written."""


class CommitUnknown(StoreError):  # noqa: N818 - a state, as below
    """Rows that may be committed or not, because a remote store does not answer: look before you append again."""


class DamagedChunk(StoreError):  # noqa: N818 - the name says what is damaged
    """A chunk of a store is missing, truncated or fails its checksum."""

    reason = ""  # without where it is and what to do


class StreamError(VcalError, ValueError):
    """A stream's settings or state do not fit the store."""
