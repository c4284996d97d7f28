"""Runs that somebody else sent: what their files say of places is shown, and no command goes there by itself."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from jobs.cli import main
from jobs.config import load
from jobs.run_state import resume_command
from tests.vcal_dist.report.runs_kit import trained
from vcal_dist.errors import ConfigError
from vcal_dist.locations import is_remote, remote_locations
from vcal_dist.metrics import read_metrics
from vcal_dist.posterior import Posterior
from vcal_dist.records import records_until
from vcal_dist.run_place import inside, run_place


class Listener:
    """Somebody who waits on this machine for a connection, and counts."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.count += 1
            connection.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener()
    yield found
    found.socket.close()


@pytest.fixture
def endpoint(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """The listener, where requests to object stores go."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{listener.port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    return listener


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("sent"), parameters=1, observations=30, runs=80)


def changed(run: Path, to: Path, **sections: Any) -> Path:
    """A copy of the run, whose record and configuration say something else."""
    shutil.copytree(run, to)
    posterior = Posterior.load(to)
    record = posterior.record["config"]
    for key, value in sections.items():
        record[key] = {**record[key], **value} if isinstance(value, dict) else value
    posterior.save(to)
    (to / "config.yaml").write_text(yaml.safe_dump(record))
    return to


def vcal(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def test_refinement_does_not_compute_where_a_record_says(sent: Path, listener: Listener, tmp_path: Path) -> None:
    run = changed(sent, tmp_path / "run", data={"scheduler": f"tcp://127.0.0.1:{listener.port}"})
    assert vcal("refine", run, "--evaluations", "100", "--json") == 0
    assert listener.count == 0


@pytest.mark.parametrize("command", ["diagnose", "report", "inspect"])
def test_a_store_on_the_network_is_not_asked_unless_it_is_trusted(
    command: str, sent: Path, endpoint: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = changed(sent, tmp_path / "run", store="s3://somebody/s.zarr")
    assert vcal(command, run) == 0
    assert endpoint.count == 0
    if command == "diagnose":
        told = " ".join(capsys.readouterr().out.split())
        assert "names a location on the network that you did not: store s3://somebody/s.zarr" in told
        assert "--trust-locations" in told
        assert told.startswith("Use this calibration with care")  # what could not be looked at is no good news


def test_refinement_of_a_run_with_a_store_on_the_network_asks_first(
    sent: Path, endpoint: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = changed(sent, tmp_path / "run", store="s3://somebody/s.zarr")
    assert vcal("refine", run) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "give it with --store s3://somebody/s.zarr, or add --trust-locations" in told
    assert endpoint.count == 0
    own = Posterior.load(sent).record["config"]["store"]
    assert vcal("refine", run, "--store", own, "--evaluations", "100", "--json") == 0
    assert endpoint.count == 0


def test_a_record_that_is_trusted_is_followed(sent: Path, endpoint: Listener, tmp_path: Path) -> None:
    run = changed(sent, tmp_path / "run", store="s3://somebody/s.zarr")
    assert vcal("diagnose", run, "--trust-locations") == 0
    assert endpoint.count > 0


def test_training_from_a_run_s_own_file_asks_first(
    sent: Path, endpoint: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{endpoint.port}"
    run = changed(sent, tmp_path / "run", store="s3://somebody/s.zarr", data={"scheduler": address})
    for command in (["train"], ["sbc", "--replicates", "2"], ["sweep"]):
        assert vcal(*command, run / "config.yaml") == 1
        told = " ".join(capsys.readouterr().err.split())
        assert f"store s3://somebody/s.zarr and data.scheduler {address}" in told
    assert endpoint.count == 0
    overrides = ["store=s3://somebody/s.zarr", f"data.scheduler={address}"]
    assert load(run / "config.yaml", overrides).data.scheduler == address  # named by the user
    assert load(run / "config.yaml", trust_locations=True).store == "s3://somebody/s.zarr"
    assert all(override in resume_command(run) for override in overrides)
    own = tmp_path / "train.yaml"  # written by the user
    shutil.copy(run / "config.yaml", own)
    assert load(own).store == "s3://somebody/s.zarr"


def test_files_of_a_sweep_are_records_too(tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    for name in ("sweep.yaml", "best.yaml"):
        (tmp_path / name).write_text("store: s3://somebody/s.zarr\nsweep: {trials: 2}\n")
    with pytest.raises(ConfigError, match=r"best\.yaml names a location on the network"):
        load(tmp_path / "best.yaml")


@pytest.mark.parametrize(
    ("location", "remote"),
    [
        ("s3://bucket/s.zarr", True),
        ("https://host/s.zarr", True),
        ("simplecache::s3://bucket/s.zarr", True),
        ("file:///tmp/s.zarr", False),
        ("file://s3://bucket", True),
        ("/tmp/s.zarr", False),
        ("s.zarr", False),
    ],
)
def test_what_is_on_the_network(location: str, remote: bool) -> None:
    assert is_remote(location) == remote
    assert remote_locations({"store": location}) == ({"store": location} if remote else {})


@pytest.mark.timeout(30)
def test_no_pipe_or_device_beside_a_run_is_waited_for(
    sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f.relative_to(sent) for f in sent.rglob("*") if f.is_file() and "tensorboard" not in f.parts]
    for name in names:
        shutil.copytree(sent, tmp_path / "run")
        (tmp_path / "run" / name).unlink()
        if name.suffix == ".csv":
            (tmp_path / "run" / name).symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / "run" / name)
        assert vcal("inspect", tmp_path / "run") in (0, 1)
        assert "Traceback" not in capsys.readouterr().err
        shutil.rmtree(tmp_path / "run")
    assert {"config.yaml", "metrics.csv", "versions.json", "rows.json"} <= {str(name) for name in names}


def test_records_without_an_end_of_line_take_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "metrics.csv").open("wb") as file:
        file.truncate(1 << 36)  # a hole takes no disk
    assert read_metrics(tmp_path) == []


def test_phases_without_end_are_left_out(tmp_path: Path) -> None:
    """The report draws each of them, for half an hour if there are a megabyte of them."""
    lines = "".join(f"{i},phase {i},1\n" for i in range(5000))
    (tmp_path / "metrics.csv").write_text(f"step,phase,seconds\n{lines}6000,phase 3,1\n")
    steps = [int(row["step"]) for row in read_metrics(tmp_path)]
    assert (len(steps), steps[-1]) == (101, 6000)


def test_a_step_of_more_digits_than_python_reads_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,phase,seconds\n{'9' * 5000},emulator,1\n12,emulator,1\n")
    assert [row["step"] for row in records_until(tmp_path, 20)] == ["12"]


def test_an_object_s_name_never_leads_out_of_the_run(s3_url: str, tmp_path: Path) -> None:
    """An object store takes any text as a name; a file system goes where it leads."""
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.pipe_file(f"{s3_url}/hostile/config.yaml", b"store: s")
    files.call_s3("put_object", Bucket="bucket", Key="hostile/../../../escaped", Body=b"gotcha")
    with run_place(f"{s3_url}/hostile") as place:
        with pytest.raises(ConfigError, match=r"'\.\./\.\./\.\./escaped', which would be written outside"):
            place.fetch()
        above = place.path.parent.parent.parent
        assert not (above / "escaped").exists()
    for name in ("../x", "a/../../x", "/etc/x", "a//x", "./x", "a\\..\\x", "x\0y", ""):
        with pytest.raises(ConfigError, match="written outside"):
            inside(tmp_path, name, "s3://bucket/run")
    assert inside(tmp_path, "checkpoints/last..safetensors", "s3://bucket/run").parent == tmp_path / "checkpoints"
