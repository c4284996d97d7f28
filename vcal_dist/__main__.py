"""`python -m vcal_dist CONFIG`: trains what a resolved configuration says; `vcal train` is for people."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from storage.errors import VcalError
from vcal_dist.config import Config
from vcal_dist.training import train

if __name__ == "__main__":
    try:
        train(Config.parse(yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[1]))
    except VcalError as error:
        sys.exit(f"error: {error}")
