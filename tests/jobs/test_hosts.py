"""Training over two real hosts, whose own names resolve to loopback as on every Debian and Ubuntu machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts_kit import Host, hosts, why_no_hosts
from tests.jobs.hosts_jobs import ENV, Training, start_ray, train_here, written
from tests.vcal_dist.training_kit import apart, make_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be made"),
]
CHOICE = """
import os, sys
from vcal_dist.interfaces import use_interface
use_interface(sys.argv[1], nodes=int(sys.argv[2]))
print(os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.fixture(scope="module")
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hosts")
    make_store(made / "s.zarr")
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """What one process finds."""
    return train_here(folder, "alone")


def test_the_interface_is_the_one_towards_the_meeting_point(two: list[Host]) -> None:
    def chosen(host: Host, meeting: str, nodes: int = 2, **variables: str) -> str:
        return host.run([sys.executable, "-c", CHOICE, meeting, str(nodes)], env=ENV | variables).strip()

    first, second = two
    assert chosen(first, second.address) == "eth0 =eth0"
    assert chosen(first, first.address) == "eth0 =eth0"
    assert chosen(first, "host1") == "eth0 =eth0"  # its own name, which is loopback's
    assert chosen(first, "127.0.0.1", nodes=1) == "lo =lo"
    assert chosen(first, second.address, GLOO_SOCKET_IFNAME="lo") == "lo =eth0"  # as the user says


def test_plain_processes_on_two_hosts_find_what_one_finds(two: list[Host], folder: Path, alone: Path) -> None:
    config = written(folder, "plain", devices={"devices": 1, "num_nodes": 2})
    training = Training(folder, "plain").plainly(two, config)
    assert training.ends(150) == [0, 0], training.said()
    assert apart(training.run, alone) < 1e-7


def test_a_ray_cluster_over_two_hosts_finds_what_one_process_finds(two: list[Host], folder: Path, alone: Path) -> None:
    """Without a word of Ray's own."""
    head = two[0]
    for host in two:
        start_ray(host, head)
    training = Training(folder, "ray").on_ray(head, head, written(folder, "ray"), "--workers", "2")
    assert training.ends(200) == [0], training.said()
    assert apart(training.run, alone) < 1e-7
    said = training.said()
    assert "2 processes on Ray with 1 CPU" in said
    strange = [line for line in said.splitlines() if re.search(r"Cleaner|Watcher|Traceback|\[c10d\]|gloo", line)]
    assert not strange
