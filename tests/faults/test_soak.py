"""Random faults strike trainings on two hosts for a time: the same command again and again ends the same."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import Tally, size
from tests.hosts_kit import Host, hosts, why_no_hosts
from tests.jobs.hosts_jobs import S3, Training, written
from tests.vcal_dist.training_kit import apart, make_store

SECONDS = size("SOAK", 1800)
TIMEOUT = 10  # seconds, of devices.timeout
LONGEST = 15.0  # seconds that a link is down, or the server away or slow
STRIKES = 4  # most, for one training; then it is left alone
MOMENT = 30.0  # seconds from a start, or from the last fault, to the next one at most; about what a training takes
LEFT_ALONE = 400  # seconds within which training ends, well or not, once nothing happens any more
LONG: dict[str, Any] = {
    "fit": {"emulator": {"steps": 1000}},
    "checkpoints": {"every_steps": None, "every_seconds": 1.0},
    "devices": {"devices": 1, "num_nodes": 2, "timeout": TIMEOUT},
}
# Well; with one line; asked to stop, before and after it could write a checkpoint; killed.
STATUSES = {0, 1, 75, -signal.SIGTERM, -signal.SIGKILL}
pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS + 1800),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


class Striker:
    """What can happen to a training in the first two hosts, and to the server in the third."""

    def __init__(self, made: list[Host], s3: S3) -> None:
        self.hosts, self.s3, self.chance = made[:2], s3, random.Random(0)
        self.kinds: dict[str, Callable[[], None]] = {
            "link down": self.unplug,
            "killed process": self.kill,
            "SIGTERM": self.terminate,
            "server away": lambda: self.spoil("500"),
            "server slow": lambda: self.spoil("0.3"),
        }

    def wait(self, longest: float = LONGEST) -> None:
        time.sleep(self.chance.uniform(0, longest))

    def strike(self, *, remote: bool) -> str:
        """Something of any kind; only a training with its run in the server feels what happens to that."""
        kind = self.chance.choice([name for name in self.kinds if remote or not name.startswith("server")])
        self.kinds[kind]()
        return kind

    def unplug(self) -> None:
        host = self.chance.choice(self.hosts)
        host.unplug()
        self.wait()
        host.plug()

    def kill(self) -> None:
        self._signal([self.chance.choice(self.hosts)], signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(self.hosts, signal.SIGTERM)  # as a scheduler does

    def spoil(self, how: str) -> None:
        self.s3.fails(how)
        self.wait()
        self.s3.recovers()

    def _signal(self, some: list[Host], number: int) -> None:
        for one in (one for host in some for one in host.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "train" in one.cmdline()[:3]:
                    one.send_signal(number)


def survived(folder: Path, name: str, striker: Striker, *, remote: bool) -> list[str]:
    """Starts a training until it ends well, and tells what has happened to it on the way."""
    output = {"output": f"s3://bucket/{name}"} if remote else {}
    config, variables = written(folder, name, **LONG, **output), striker.s3.variables if remote else {}
    strikes, struck = striker.chance.randint(1, STRIKES), list[str]()
    while True:
        training, before = Training(folder, name).plainly(striker.hosts, config, **variables), len(struck)
        while len(struck) < strikes and training.runs(striker.chance.uniform(0, MOMENT)):
            struck.append(striker.strike(remote=remote))
        ended = training.ends(LEFT_ALONE)
        if ended == [0, 0]:
            return struck
        assert len(struck) > before, f"{ended} without a fault, after {struck}: {training.said()}"
        assert set(ended) <= STATUSES, f"{ended} after {struck}: {training.said()}"
        assert "Traceback" not in training.said(), f"after {struck}: {training.said()}"


def test_trainings_that_random_faults_strike_end_the_same(tmp_path: Path, three: list[Host], tally: Tally) -> None:
    make_store(tmp_path / "s.zarr")
    # By as many processes: in so many steps at a high rate, rounding grows until another number ends elsewhere.
    undisturbed = Training(tmp_path, "undisturbed").plainly(three[:2], written(tmp_path, "undisturbed", **LONG))
    assert undisturbed.ends(LEFT_ALONE) == [0, 0], undisturbed.said()
    striker = Striker(three, S3(three[2], tmp_path).made(three[0]))
    end, number, resumed = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < end:
        name, remote = f"run-{number}", number % 2 == 1
        struck = survived(tmp_path, name, striker, remote=remote)
        run = striker.s3.fetched(three[0], name, tmp_path / name) if remote else tmp_path / name
        assert apart(run, undisturbed.run) < 1e-7, struck
        shutil.rmtree(run)
        for kind in struck:
            tally.add(f"soak: {kind}", 1, 1)
        tally.add("soak: finished trainings", 1, 1)
        number += 1
        resumed += (tmp_path / f"{name}.log").read_text(encoding="utf-8").count("going on after step")
    print(f"{number} trainings, resumed {resumed} times")
    assert resumed or number < 5, "all faults came before a checkpoint: the test has lost its point"
