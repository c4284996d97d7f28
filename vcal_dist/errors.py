"""What can be wrong with a model's settings or with the numbers that enter it."""

from storage.errors import VcalError


class ModelError(VcalError, ValueError):
    """A setting or an input that the model cannot work with; the message names it, its value and the cure."""
