"""The user's own simulator, named on the command line as FILE.py:function."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vcal_dist.errors import ConfigError

if TYPE_CHECKING:
    from vcal_dist.replicates import Simulator

MODULE = "vcal_simulator"  # its name while it is loaded


def located(text: str) -> str:
    """The same with an absolute path, once the file is there: processes may run elsewhere."""
    file, separator, function = text.rpartition(":")
    if not separator or not file or not function.isidentifier():
        raise ConfigError(f"--simulator is '{text}'; write it as FILE.py:function, as in pendulum.py:simulate")
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(
            f"--simulator names {path}, which is no Python file that is there; accepted: FILE.py:function"
        )
    return f"{path}:{function}"


def digest(text: str) -> str:
    """What tells a file's content from another's."""
    return hashlib.sha256(Path(text.rpartition(":")[0]).read_bytes()).hexdigest()


def load(text: str) -> Simulator:
    """The function in a located file, which is run as `python FILE.py` would, but for its name."""
    file, _, function = text.rpartition(":")
    path = Path(file)
    specification = importlib.util.spec_from_file_location(MODULE, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[MODULE] = module  # dataclasses look there
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # for what lies beside it
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(function, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else f"; it has: {', '.join(names) or 'none'}"
        raise ConfigError(f"{path} has no function '{function}'{hint}")
    simulator: Simulator = found
    return simulator
