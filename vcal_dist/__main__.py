"""`python -m vcal_dist CONFIG [--quiet]`: trains what a resolved configuration says; `vcal train` is for people.

Exit status 75 after SIGTERM ("try again" in sysexits.h) and 130 after Ctrl-C: the same command goes on.
"""

from __future__ import annotations

import signal
import sys

from storage import strict_yaml
from storage.errors import VcalError
from vcal_dist.config import Config
from vcal_dist.errors import INTERRUPTED, PREEMPTED, ConfigError, Diverged, Preempted
from vcal_dist.training import is_first, train


def main(path: str, *options: str) -> int | str:
    """The exit status, or a message with status 1."""
    try:
        config = Config.parse(strict_yaml.read(path, ConfigError, "the configuration"), path)
        train(config, progress="--quiet" not in options)
    except (Diverged, Preempted) as stopped:
        if not is_first():  # all processes ended alike, and Lightning kills the first if another fails before it
            return 0
        if isinstance(stopped, Diverged):
            return f"error: {stopped}"
        return INTERRUPTED if stopped.signal == signal.SIGINT else PREEMPTED
    except VcalError as error:
        return f"error: {error}"
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
