"""Bayesian calibration of computer models with deep Gaussian processes and random features."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    # Reading the installed metadata costs milliseconds that `import vcal_dist` does not owe anybody.
    if name == "__version__":
        from importlib.metadata import version

        return version("vcal-dist")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
