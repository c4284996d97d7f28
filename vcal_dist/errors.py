"""What can be wrong with a configuration, with a model's settings or with the numbers that enter it."""

from storage.errors import VcalError

PREEMPTED, INTERRUPTED = 75, 130  # exit statuses after SIGTERM ("try again" in sysexits.h) and after Ctrl-C


class ModelError(VcalError, ValueError):
    """A setting or an input that the model cannot work with; the message names it, its value and the cure."""


class ConfigError(VcalError, ValueError):
    """A configuration that cannot be read; the message names every wrong key, its value and what is accepted."""


class Malformed(ModelError):  # noqa: N818 - a state, as in DamagedChunk
    """A file whose content this program never writes; somebody made it up, or it is of another program."""


# What code raises that takes such a content for what it should be.
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Diverged(ModelError):  # noqa: N818 - a state, as in DamagedChunk
    """Training that leads nowhere: a loss that is not finite, or that rises without end."""


class Disconnected(VcalError):  # noqa: N818
    """Processes of one training that have lost each other; the same command goes on from the last checkpoint."""


class Preempted(VcalError):  # noqa: N818
    """Training that was told to stop and has written where it is; the same command goes on."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
