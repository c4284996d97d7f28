"""Training on a real Ray cluster: the same posterior as here, through the death of a process, and refusals at once."""

from __future__ import annotations

import json
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import s3fs
import yaml

from jobs.ray_cluster import Capacity, connected, planned
from tests.ray_kit import BIN, MARK, RayHead
from tests.vcal_dist.training_kit import Processes, apart, make_store, merge, metrics, settings, tensors, wait_for
from vcal_dist.errors import PREEMPTED, ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LONG = {"fit": {"emulator": {"steps": 150}}}  # long enough to be killed in
ONE_CPU = ("--cpus-per-worker", "1")  # two threads of one process wait for each other where something else runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ray training")
    make_store(made / "s.zarr")
    return made


@pytest.fixture(scope="module")
def here(folder: Path) -> Path:
    """What two processes find without Ray."""
    processes = Processes(folder)
    try:
        processes.finish(plain(folder, "here"), ranks=2)
    finally:
        processes.close()
    return folder / "here"


def plain(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return merge(
        merge(settings(folder / "s.zarr", folder / name), LONG), {"devices": {"precision": "float64"}, **sections}
    )


def start(head: RayHead, folder: Path, name: str, *options: str, **sections: Any) -> subprocess.Popen[str]:
    """`vcal train --on ray` with a configuration of its own."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(plain(folder, name, **sections)))
    command = [BIN / "vcal", "train", path, "--on", "ray", "--address", head.address, *options]
    return subprocess.Popen(command, env=head.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(started: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = started.communicate(timeout=200)
    return started.returncode, said


def workers(head: RayHead) -> list[psutil.Process]:
    """The processes that train on this head."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        if "RayTrainWorker" in " ".join(one.info["cmdline"] or []):
            try:
                if one.environ().get(MARK) == head.folder.name:
                    found.append(one)
            except psutil.Error:
                continue
    return found


def test_two_workers_find_what_two_processes_find_here(ray_head: RayHead, folder: Path, here: Path) -> None:
    status, said = finish(start(ray_head, folder, "there", "--workers", "2"))
    assert status == 0, said
    assert apart(folder / "there", here) < 1e-8
    assert [row["loss"] for row in metrics(folder / "there")] == [row["loss"] for row in metrics(here)]
    names = sorted(item.name for item in here.iterdir())
    assert sorted(item.name for item in (folder / "there").iterdir()) == names  # nothing of Ray's is left
    assert "2 processes on Ray with 1 CPU and 0 GPU each" in said
    status, said = finish(start(ray_head, folder, "there", "--workers", "2"))
    assert status == 0
    assert "is done already" in said


def test_it_recovers_from_the_death_of_a_process(ray_head: RayHead, folder: Path, here: Path) -> None:
    """The other is ended as well, and both start anew from the checkpoint."""
    started = start(ray_head, folder, "killed", "--workers", "2")
    checkpoint = folder / "killed" / "checkpoints" / "last.safetensors"
    wait_for(checkpoint.exists, 100)
    before = {one.pid for one in workers(ray_head)}
    assert len(before) == 2
    psutil.Process(min(before)).kill()
    status, said = finish(started)
    assert status == 0, said
    assert "going on after step" in said
    assert apart(folder / "killed", here) < 1e-8
    assert not workers(ray_head)


def test_as_many_processes_as_there_is_room_for_train_into_an_object_store(
    ray_head: RayHead, folder: Path, here: Path, s3_url: str
) -> None:
    files, root = s3fs.S3FileSystem(use_listings_cache=False), f"{s3_url.removeprefix('s3://')}/elastic run"
    options = ("--workers", "1:3", *ONE_CPU)
    status, said = finish(start(ray_head, folder, "elastic", *options, output=f"s3://{root}"))
    assert status == 0, said
    assert "1 to 3 processes on Ray with 1 CPU" in said
    assert not (folder / "elastic").exists()
    names = {found.removeprefix(f"{root}/").partition("/")[0] for found in files.find(root)}
    assert names == {item.name for item in here.iterdir()} - {"run.lock"}
    copy = folder / "copy"
    files.get(root, str(copy), recursive=True)
    assert tensors(copy).keys() == tensors(here).keys()
    assert apart(copy, here) < 1e-8


def test_a_signal_ends_all_processes_with_a_checkpoint(ray_head: RayHead, folder: Path) -> None:
    begin = partial(start, ray_head, folder, "told", *ONE_CPU, fit={"emulator": {"steps": 1500}})
    first = begin()
    wait_for((folder / "told" / "checkpoints" / "last.safetensors").exists, 100)
    first.send_signal(signal.SIGTERM)
    status, said = finish(first)
    assert status == PREEMPTED, said
    assert "the same command goes on from the last checkpoint" in said
    status, said = finish(begin())
    assert status == 0, said
    assert "going on after step" in said
    assert not (folder / "told" / ".ray").exists()


def test_what_cannot_be_is_refused_before_anything_starts(ray_head: RayHead, folder: Path) -> None:
    status, said = finish(start(ray_head, folder, "much", "--workers", "5"))
    assert status == 1
    assert "asks for 5 process(es) with 1 CPU and 0 GPU each" in said
    assert "2 CPU and 0 GPU, room for 2" in said
    status, said = finish(start(ray_head, folder, "wrong", data={"holdout": 0.2}, fit={"start": {"t9": 1.0}}))
    assert status == 1
    assert "fit.start names 't9'" in said
    assert "RayTrainWorker" not in said
    assert not (folder / "much").exists()
    assert not (folder / "wrong").exists()


def test_training_that_diverges_is_told_once_and_not_tried_again(ray_head: RayHead, folder: Path) -> None:
    status, said = finish(start(ray_head, folder, "diverged", fit={"emulator": {"rate": 1e6}}))
    assert status == 1
    assert said.count("error: ") == 1
    assert "emulator" in said
    assert said.count("training on 428 runs") == 1
    assert not (folder / "diverged" / "posterior.safetensors").exists()
    assert json.loads((folder / "diverged" / "rows.json").read_text())["runs"] == 450


def test_shares_fill_the_cluster_and_never_ask_for_more() -> None:
    one = Capacity([(16.0, 0.0)], [])
    assert [one.share(n, 0) for n in (1, 2, 3, 16, 40)] == [16, 8, 5, 1, 1]
    assert one.suited(2, 8, 0) == 2  # two with eight CPUs each, rather than eight with two
    uneven = Capacity([(4.0, 0.0), (7.0, 0.0)], [])
    assert uneven.room(3, 0) == 3
    assert uneven.share(3, 0) == 3
    gpus = Capacity([(0.0, 0.0), (16.0, 4.0), (8.0, 1.0)], [])
    assert gpus.room(1, 1) == gpus.suited(1, 8, 1) == 5
    assert gpus.share(5, 1) == 4
    assert gpus.room(1, 0.5) == 10
    with pytest.raises(ConfigError, match="the Ray cluster has no node, room for 0"):
        Capacity([], []).refuse("training", 1, 1, 0)


def test_what_an_autoscaler_may_bring_counts_node_by_node(root: Path, tmp_path: Path) -> None:
    """The cluster file that `ray up` leaves on the head is the only place that tells."""
    grows = Capacity([(0.0, 0.0)], planned(root / "cluster.yaml"))
    assert grows.most == [(0.0, 0.0), *[(16.0, 1.0)] * 8]
    grows.refuse("training", 8, 16, 1)
    assert [grows.share(n, 1) for n in (1, 4, 8)] == [16, 16, 16]
    with pytest.raises(ConfigError, match=r"has 0 CPU and 0 GPU \(an autoscaler may make it .*8 × 16 CPU and 1 GPU\)"):
        grows.refuse("training", 9, 1, 1)
    with pytest.raises(ConfigError, match="room for 0"):
        grows.refuse("training", 1, 17, 1)
    cluster = yaml.safe_load((root / "cluster.yaml").read_text())
    (tmp_path / "three.yaml").write_text(yaml.safe_dump(cluster | {"max_workers": 3}))
    assert len(planned(tmp_path / "three.yaml")) == 4
    for text in ("provider: {type: local}", "[", "available_node_types: 3"):
        (tmp_path / "other.yaml").write_text(text)
        assert planned(tmp_path / "other.yaml") == []


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("localhost", "the address of the Ray cluster is 'localhost'; accepted: host:port"),
        ("http://127.0.0.1:8265", "vcal submit ray --address"),
    ],
)
def test_an_address_where_no_cluster_is_is_refused_at_once(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told), connected(address):
        pass
