"""Hosts, links, processes and servers that fail in the middle of training, one at a time.

Training recovers, or ends with one clear line and a checkpoint that the same command goes on from, each within a stated
number of seconds. The result is that of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts_kit import Host, hosts, why_no_hosts
from tests.jobs.hosts_jobs import S3, Training, of_ray, start_ray, train_here, written
from tests.vcal_dist.training_kit import apart, make_store, wait_for

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]
LONG: dict[str, Any] = {"fit": {"emulator": {"steps": 600}}}  # long enough to fail in
TIMEOUT = 20  # seconds, of devices.timeout
START_TIMEOUT = 60  # seconds, of --start-timeout: processes on Ray take half of it to start
START = 100  # seconds that processes may take to start, on a machine that is busy otherwise
TWO_NODES: dict[str, Any] = {**LONG, "devices": {"devices": 1, "num_nodes": 2, "timeout": TIMEOUT}}
IN_S3: dict[str, Any] = {"output": "s3://bucket/run", "checkpoints": {"every_steps": None, "every_seconds": 2.0}}
SENT = "PUT /bucket/run/checkpoints/last"  # in the log of the server
ON_RAY: dict[str, Any] = {**LONG, "devices": {"timeout": 3 * TIMEOUT}}  # its processes start more slowly


@pytest.fixture
def three() -> Iterator[list[Host]]:
    """A network for each test: what one does to it, no other sees."""
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    make_store(made / "s.zarr")
    return made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    return train_here(folder, "undisturbed", **LONG)


def one_line(said: str) -> str:
    """The error, which is one line, and no traceback beside it."""
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert lines, said
    return lines[-1].lower()


def interrupted(training: Training, statuses: list[int]) -> None:
    """It ended with one line, and has left a checkpoint."""
    assert all(status == 1 for status in statuses), training.said()
    assert "the same command goes on from the last checkpoint" in one_line(training.said())
    assert (training.run / "checkpoints" / "last.safetensors").exists()
    assert not (training.run / "posterior.safetensors").exists()


# --- plain processes --------------------------------------------------------------------------------------------------


def test_plain_processes_whose_link_goes_down_end_in_time_and_go_on_later(
    three: list[Host], folder: Path, undisturbed: Path
) -> None:
    config = written(folder, "unplugged", **TWO_NODES)
    training = Training(folder, "unplugged").plainly(three[:2], config).until_checkpoint()
    three[1].unplug()
    interrupted(training, training.ends(TIMEOUT + 30))
    three[1].plug()
    again = Training(folder, "unplugged").plainly(three[:2], config)
    assert again.ends(START + 60) == [0, 0], again.said()
    assert "going on after step" in again.said()
    assert apart(again.run, undisturbed) < 1e-7


@pytest.mark.parametrize("which", [0, 1])
def test_the_other_plain_process_ends_at_once_when_one_is_killed(
    three: list[Host], folder: Path, undisturbed: Path, which: int
) -> None:
    name = f"killed {which}"
    config = written(folder, name, **TWO_NODES)
    training = Training(folder, name).plainly(three[:2], config).until_checkpoint()
    three[which].kill()
    assert training.ends(TIMEOUT + 30)[1 - which] == 1
    assert "the same command goes on from the last checkpoint" in one_line(training.said())
    again = Training(folder, name).plainly(three[:2], config)
    assert again.ends(START + 60) == [0, 0], again.said()
    assert apart(again.run, undisturbed) < 1e-7


def test_a_host_that_never_comes_is_waited_for_no_longer_than_stated(three: list[Host], folder: Path) -> None:
    config = written(folder, "missing", **TWO_NODES)
    training = Training(folder, "missing").plainly(three[:2], config)
    three[1].kill()
    statuses = training.ends(START + TIMEOUT)
    assert statuses[0] == 1
    assert "cannot connect, at 10.9.0.1:29500" in one_line(training.said())


# --- Ray --------------------------------------------------------------------------------------------------------------


def test_ray_goes_on_with_fewer_processes_after_a_link_went_down(
    three: list[Host], folder: Path, undisturbed: Path
) -> None:
    head, other = three[:2]
    for host in (head, other):
        start_ray(host, head)
    config = written(folder, "elastic", **ON_RAY)
    training = Training(folder, "elastic").on_ray(head, head, config, "--workers", "1:2").until_checkpoint()
    other.unplug()
    assert training.ends(START + 150) == [0], training.said()
    assert "going on after step" in training.said()
    assert apart(training.run, undisturbed) < 1e-7


def test_a_fixed_number_of_processes_waits_for_a_lost_host_no_longer_than_stated(
    three: list[Host], folder: Path, undisturbed: Path
) -> None:
    head, other = three[:2]
    for host in (head, other):
        start_ray(host, head)
    config = written(folder, "fixed", **ON_RAY)
    options = ("--workers", "2", "--start-timeout", str(START_TIMEOUT))
    training = Training(folder, "fixed").on_ray(head, head, config, *options).until_checkpoint()
    other.kill()
    statuses = training.ends(START_TIMEOUT + 120)  # Ray itself needs some time to see that a host is lost
    assert statuses == [1], training.said()
    said = one_line(training.said())
    assert f"has not started 2 processes on ray with 1 cpu and 0 gpu each in {START_TIMEOUT} s" in said
    assert "the same command goes on from the last checkpoint" in said
    start_ray(other, head)
    again = Training(folder, "fixed").on_ray(head, head, config, *options)
    assert again.ends(START + 60) == [0], again.said()
    assert apart(again.run, undisturbed) < 1e-7


def test_ray_starts_again_when_a_process_in_another_host_is_killed(
    three: list[Host], folder: Path, undisturbed: Path
) -> None:
    head, other = three[:2]
    for host in (head, other):
        start_ray(host, head)
    config = written(folder, "worker", **ON_RAY)
    training = Training(folder, "worker").on_ray(head, head, config, "--workers", "2").until_checkpoint()
    for one in of_ray(other, "RayTrainWorker"):
        one.kill()
    assert training.ends(START + 100) == [0], training.said()
    assert "going on after step" in training.said()
    assert "Traceback" not in training.said()
    assert apart(training.run, undisturbed) < 1e-7


@pytest.mark.parametrize("lost", [Host.kill, Host.unplug])
def test_the_driver_ends_with_one_line_when_the_head_is_lost(
    three: list[Host], folder: Path, undisturbed: Path, lost: Callable[[Host], None]
) -> None:
    head, other = three[:2]
    for host in (head, other):
        start_ray(host, head)
    name = f"headless {lost.__name__}"
    config = written(folder, name, **ON_RAY)
    training = Training(folder, name).on_ray(other, head, config, "--workers", "2").until_checkpoint()
    lost(head)
    interrupted(training, training.ends(150))
    for host in (head, other):
        host.kill()
        host.plug()
    for host in (head, other):
        start_ray(host, head)
    again = Training(folder, name).on_ray(other, head, config, "--workers", "2")
    assert again.ends(START + 100) == [0], again.said()
    assert apart(again.run, undisturbed) < 1e-7


# --- an object store in a third host ----------------------------------------------------------------------------------


@pytest.fixture
def s3(three: list[Host], folder: Path) -> S3:
    return S3(three[2], folder).made(three[0])


@pytest.mark.parametrize("fault", ["500", "0.3"])
def test_training_outlasts_an_object_store_that_fails_for_a_while(
    three: list[Host], folder: Path, undisturbed: Path, s3: S3, fault: str
) -> None:
    config = written(folder, "s3", **{**TWO_NODES, **IN_S3, "devices": {**TWO_NODES["devices"], "timeout": 200}})
    training = Training(folder, f"s3 {fault}").plainly(three[:2], config, **s3.variables)
    wait_for(lambda: SENT in s3.said(), START)
    s3.fails(fault)
    line, some = ("500 -", 3) if fault == "500" else (SENT, s3.said().count(SENT))
    wait_for(lambda: s3.said().count(line) > some, 60)
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(training.processes[0].pid).wait(10)
    s3.recovers()
    assert training.ends(250) == [0, 0], training.said()
    assert apart(s3.fetched(three[0], "run", folder / f"copy {fault}"), undisturbed) < 1e-7


def test_an_object_store_that_stays_away_ends_training_with_one_line(
    three: list[Host], folder: Path, undisturbed: Path, s3: S3
) -> None:
    config = written(folder, "away", **{**LONG, **IN_S3})
    training = Training(folder, "away").plainly(three[:1], config, **s3.variables)
    wait_for(lambda: SENT in s3.said(), START)
    s3.fails("500")
    assert training.ends(300) == [1], training.said()
    assert "cannot write s3://bucket/run/" in one_line(training.said())
    s3.recovers()
    again = Training(folder, "away again").plainly(three[:1], config, **s3.variables)
    assert again.ends(200) == [0], again.said()
    assert "going on after step" in again.said()
    assert apart(s3.fetched(three[0], "run", folder / "copy away"), undisturbed) < 1e-7
