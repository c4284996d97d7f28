"""What can be predicted, each defined in one line. Without heavy imports: the help of `vcal predict` lists them."""

from __future__ import annotations

from typing import Literal, get_args

What = Literal[
    "process", "emulator", "discrepancy", "observation", "process_without_residual", "emulator_without_residual"
]
KINDS: tuple[What, ...] = get_args(What)
AT_T: tuple[What, ...] = ("emulator", "emulator_without_residual")  # at θ, or at given calibration inputs
MEANING: dict[What, str] = {
    "process": "the real process f(x, θ), with the emulator's residual",
    "emulator": "the simulator's output at x and θ, or at given calibration inputs: η with its residual",
    "discrepancy": "what the process adds to the emulator, f − η; the residual cancels",
    "observation": "a new observation: the process with noise",
    "process_without_residual": "f alone, a smooth function of x",
    "emulator_without_residual": "η alone, a smooth function of x",
}
