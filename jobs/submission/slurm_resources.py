"""What a SLURM job asks for, checked before anything is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vcal_dist.errors import ConfigError

WARNING = 120  # seconds before the time limit, for the checkpoint
SHORTEST = 5  # minutes of a job, or little but the checkpoint would be left
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"\\`$;&|<>]+")
INTERACTIVE = ("bash", "interactive")  # by these names Lightning knows jobs in which it is not to look for SLURM
# Options of sbatch that are set here, or would break what is: others go through --sbatch.
OWN = (
    *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", "time", "partition"),
    *("account", "output", "error", "open-mode", "requeue", "no-requeue", "signal", "array", "dependency", "parsable"),
    *("wait", "wrap", "test-only", "export", "chdir"),
)


@dataclass(frozen=True)
class Resources:
    """What a job asks SLURM for; None leaves it to the configuration or to SLURM."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    sbatch: tuple[str, ...] = ()
    array: bool = False

    def __post_init__(self) -> None:
        for option, value, pattern, example in (
            ("mem", self.mem, MEMORY, "64G"),
            ("partition", self.partition, WORD, "gpu"),
            ("account", self.account, WORD, "physics"),
            ("name", self.name, WORD, "calibration"),
        ):
            if value is not None and not pattern.fullmatch(value):
                raise ConfigError(f"--{option} is {value!r}; write it as {example}")
        if self.name in INTERACTIVE:
            raise ConfigError(f"--name is {self.name!r}, by which Lightning knows interactive jobs; choose another")
        if self.time is not None and minutes(self.time) < SHORTEST:
            raise ConfigError(
                f"--time is {self.time!r}; accepted: {SHORTEST} minutes or more, as training is told to stop "
                f"{WARNING} s before the limit and goes on in the next job"
            )
        for option in self.sbatch:
            self._check_extra(option)

    @staticmethod
    def _check_extra(option: str) -> None:
        name = option.removeprefix("--").partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option) or not option.isprintable():
            raise ConfigError(
                f"--sbatch is {option!r}; write a long option of sbatch, as in --sbatch=--constraint=a100"
            )
        taken = next((own for own in OWN if own.startswith(name)), None)  # sbatch takes abbreviations
        if taken is not None:
            raise ConfigError(
                f"--sbatch is {option!r}, but --{taken} is set by vcal; see vcal submit slurm --help for what can be "
                "chosen"
            )


def minutes(text: str) -> float:
    """A time limit in minutes, from any of the ways in which SLURM writes one."""
    found = TIME.fullmatch(text)
    if found is None:
        raise ConfigError(f"--time is {text!r}; write minutes (90), 1:30:00, or days as 2-12:00:00")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        return days * 1440 + (first or 0) * 60 + (second or 0) + (third or 0) / 60
    if third is None:
        return (first or 0) + (second or 0) / 60
    return (first or 0) * 60 + (second or 0) + third / 60
