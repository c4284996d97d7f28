"""`vcal submit slurm`: what is refused, what is sent, and what becomes of it on a real SLURM."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli import main
from jobs.submission.slurm import SCRIPTS
from tests.jobs.slurm_kit import Slurm, cluster, missing
from tests.vcal_dist.training_kit import make_store, merge, metrics, settings

needs_slurm = pytest.mark.skipif(missing() is not None, reason=str(missing()))
patient = pytest.mark.timeout(300)  # two busy cores take long to start several interpreters, and Ray
ODD = 'it\'s "odd"; $(touch touched) `touch touched`\n& * %j é'


def vcal(*arguments: str) -> int:
    """Run `vcal` in this process and return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder: Path, name: str = "config.yaml", **sections: Any) -> str:
    """A configuration of few steps on CPUs."""
    plain = settings(folder / "store.zarr", folder / "run", devices={"accelerator": "cpu", "precision": "float64"})
    (folder / name).write_text(yaml.safe_dump(merge(plain, sections)), encoding="utf-8")
    return name


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], list[list[str]]]:
    """The frozen configuration and the command lines that would be sent."""
    assert vcal("submit", "slurm", "--dry-run", *words) == 0
    out = capsys.readouterr().out
    config = yaml.safe_load(out.partition("# sent\n")[0])
    return config, [shlex.split(part.partition("\n\n")[0]) for part in out.split("# sent\n")[1:]]


# --- what is refused, and what would be sent --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "-1"], "--nodes"),
        (["--time", "soon"], "--time is 'soon'"),
        (["--time", "1:2:3:4"], "--time"),
        (["--time", "4:59"], "5 minutes or more"),
        (["--partition", "a\nb"], "--partition is 'a\\nb'"),
        (["--account", ""], "--account"),
        (["--mem", "much"], "--mem is 'much'"),
        (["--name", "interactive"], "Lightning"),
        (["--sbatch=nodes=3"], "long option"),
        (["--sbatch=--constraint=a\nb"], "long option"),
        (["--sbatch=--output=x"], "set by vcal"),
        (["--sbatch=--arr=1-9"], "--array is set by vcal"),
        (["--gpus-per-node", "2"], "devices.accelerator is 'cpu'"),
        (["--array"], "trials of a sweep"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here)
    assert vcal("submit", "slurm", *words, "--", "train", config) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())
    assert [f.name for f in here.iterdir()] == [config]


@pytest.mark.parametrize("limit", ["5", "5:00", "0:05:00", "0-1", "2-12:30", "2-12:30:59", "90"])
def test_every_way_to_write_a_time_limit_is_taken(limit: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, [command] = dry_run(capsys, "--time", limit, "--", "train", write_config(here))
    assert f"--time={limit}" in command


def test_without_slurm_the_error_names_the_dry_run_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(here)
    monkeypatch.setenv("PATH", str(here))
    assert vcal("submit", "slurm", "--", "train", config) == 1
    assert "no sbatch on the path" in (said := " ".join(capsys.readouterr().err.split()))
    assert "--dry-run" in said
    assert vcal("submit", "slurm", "--dry-run", "--", "train", config) == 0
    assert [f.name for f in here.iterdir()] == [config]


def test_gpus_become_tasks_and_the_configuration_is_frozen_to_match(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here, devices={"accelerator": "gpu"})
    words = ["--nodes", "2", "--gpus-per-node", "4", "--sbatch=--constraint=a100"]
    frozen, [command] = dry_run(capsys, *words, "--", "train", config, "seed=7")
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--constraint=a100"} <= set(command)
    assert {"--requeue", "--open-mode=append", "--signal=TERM@120"} <= set(command)
    assert frozen["devices"]["num_nodes"] == 2
    assert frozen["devices"]["devices"] == 4
    assert frozen["devices"]["accelerator"] == "gpu"
    assert frozen["seed"] == 7
    script = command.index(str(SCRIPTS / "lightning.sh"))
    assert [Path(word).name for word in command[script + 1 : script + 4]] == ["slurm", "vcal", "train"]
    assert vcal("submit", "slurm", "--dry-run", "--", "train", config) == 1  # how many?
    assert "--gpus-per-node" in capsys.readouterr().err


def test_training_on_ray_gets_one_task_a_node_and_a_process_a_gpu(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here, devices={"accelerator": "auto"})
    words = ["--nodes", "2", "--gpus-per-node", "4", "--", "train", config, "--on", "ray"]
    _, [command] = dry_run(capsys, *words)
    assert {"--ntasks-per-node=1", "--cpus-per-task=4", "--gpus-per-node=4"} <= set(command)
    script = command.index(str(SCRIPTS / "ray.sh"))
    assert command[script + 5 :] == ["--on", "ray", "--workers", "8"]
    _, [command] = dry_run(capsys, *words, "--workers", "1:3")
    assert command[script + 5 :] == ["--on", "ray", "--workers", "1:3"]
    assert vcal("submit", "slurm", "--dry-run", *words, "--address", "x:1") == 1
    assert "--address cannot be submitted" in capsys.readouterr().err


def test_a_sweep_as_an_array_is_collected_afterwards(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(here, sweep={"trials": 5})
    frozen, [trials, collect] = dry_run(capsys, "--array", "--", "sweep", config)
    assert frozen["sweep"]["trials"] == 5
    assert "--array=0-4" in trials
    assert "--collect" not in trials
    assert "--dependency=afterany:NUMBER" in collect
    assert collect[-1] == "--collect"
    _, [command] = dry_run(capsys, "--", "sweep", config)
    assert str(SCRIPTS / "ray.sh") in command
    assert "--exclusive" in command


@pytest.mark.parametrize("passed_on", [True, False])
def test_a_task_passes_the_order_to_stop_on_where_slurm_does_not(passed_on: bool, here: Path) -> None:
    # As with cgroups: the signal comes to the task alone.
    script = "trap 'echo told; exit 75' TERM\ntouch begun\nfor _ in {1..30}; do sleep 0.1; done\nexit 0"
    environment = os.environ | ({"VCAL_PASS_ON": "1"} if passed_on else {})
    task = subprocess.Popen(
        ["bash", SCRIPTS / "task.sh", "bash", "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    while not (here / "begun").exists():
        assert task.poll() is None
        time.sleep(0.01)
    task.terminate()
    said, _ = task.communicate(timeout=30)
    assert (task.returncode, said) == ((75, "told\n") if passed_on else (0, ""))


# --- a real SLURM -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(running: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The cluster, with what is run in this process in its environment."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


def log_of(folder: Path, run: str = "run") -> str:
    [log] = [file for file in folder.iterdir() if re.fullmatch(re.escape(run) + r"\.slurm-\d+\.log", file.name)]
    return log.read_text(encoding="utf-8", errors="replace")


def submitted(said: str) -> str:
    """The number of the one job that was sent."""
    [number] = re.findall(r"submitted job (\d+)", said)
    return str(number)


def send(slurm: Slurm, folder: Path, script: str, *options: str) -> str:
    """Submits a small program in place of `vcal`; the job's number."""
    program = folder / "program"
    program.write_text(f"#!/usr/bin/env bash\n{script}", encoding="utf-8")
    program.chmod(0o755)
    log = f"--output={folder}/run.slurm-%j.log"
    words = ["--parsable", "--requeue", "--open-mode=append", log, *options, str(SCRIPTS / "lightning.sh")]
    return slurm.run("sbatch", *words, str(SCRIPTS), str(program)).strip()


@needs_slurm
def test_a_task_that_fails_ends_the_others(slurm: Slurm, here: Path) -> None:
    number = send(slurm, here, "((SLURM_PROCID == 0)) && exec sleep 600\nexit 3", "--nodes=2", "--ntasks-per-node=1")
    slurm.until(lambda: slurm.state(number) == "FAILED")
    assert "task 1 on vcal2 failed with status 3" in log_of(here)


@needs_slurm
def test_a_job_goes_back_into_the_queue_when_it_is_told_to_stop_before_it_can_write(slurm: Slurm, here: Path) -> None:
    script = 'touch "begun-${SLURM_RESTART_COUNT-0}"\n[[ -n ${SLURM_RESTART_COUNT-} ]] || exec sleep 600'
    number = send(slurm, here, script)
    slurm.until((here / "begun-0").exists)
    slurm.run("scancel", "--signal=TERM", number)
    slurm.until(lambda: slurm.state(number) == "COMPLETED")
    assert (here / "begun-1").exists()
    assert f"job {number} goes back into the queue" in log_of(here)


@needs_slurm
def test_a_job_that_is_cancelled_stays_so(slurm: Slurm, here: Path) -> None:
    number = send(slurm, here, "touch begun\ntrap 'exit 75' TERM\nsleep 600 & wait")
    slurm.until((here / "begun").exists)
    slurm.run("scancel", number)
    slurm.until(lambda: slurm.state(number) == "CANCELLED")
    assert "goes back" not in log_of(here)


@needs_slurm
@patient
@pytest.mark.slow
def test_odd_names_arrive_unharmed_and_nothing_is_evaluated(
    slurm: Slurm, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / ODD
    folder.mkdir()
    make_store(folder / f"{ODD}.zarr")
    write_config(folder, f"{ODD}.yaml", store="changed by an override")
    store, output = f"{ODD}/{ODD}.zarr", f"{ODD}/{ODD}.run"
    words = [f"{ODD}/{ODD}.yaml", f"store={yaml.safe_dump(store)}", f"output={yaml.safe_dump(output)}"]
    assert vcal("submit", "slurm", "--wait", "--", "train", *words) == 0, log_of(folder, f"{ODD}.run")
    assert (here / output / "posterior.safetensors").exists()
    assert "Posterior of θ" in log_of(folder, f"{ODD}.run")
    said = capsys.readouterr().out
    number = submitted(said)
    assert f"squeue -j {number}" in said
    assert f"scancel {number}" in said
    assert f"{ODD}.run.slurm-{number}.log" in said
    assert not [file for place in (here, folder) for file in place.rglob("touched")]


@needs_slurm
@patient
@pytest.mark.slow
def test_a_job_that_fails_gives_its_status_and_says_why(slurm: Slurm, here: Path) -> None:
    assert vcal("submit", "slurm", "--wait", "--", "train", write_config(here)) == 1  # there is no store
    assert "error: " in log_of(here)
    assert "store.zarr" in log_of(here)


@needs_slurm
@patient
@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (2, 1)])
def test_several_tasks_train_together(nodes: int, devices: int, slurm: Slurm, here: Path) -> None:
    make_store(here / "store.zarr")
    config = write_config(here, devices={"devices": devices})
    assert vcal("submit", "slurm", "--wait", "--nodes", str(nodes), "--", "train", config) == 0, log_of(here)
    assert (here / "run" / "posterior.safetensors").exists()
    assert log_of(here).count("training on 428 runs") == 1  # one of them speaks
    frozen = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in here.glob("run.submitted-*.yaml")]
    assert [one["devices"]["num_nodes"] for one in frozen] == [nodes]


@needs_slurm
@patient
@pytest.mark.slow
def test_a_preempted_job_goes_on_from_its_checkpoint(
    slurm: Slurm, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(here / "store.zarr")
    steps = 4000
    long = {"fit": {"emulator": {"steps": steps}}, "checkpoints": {"every_steps": 20}, "record_every": 10}
    config = write_config(here, **long)
    assert vcal("submit", "slurm", "--", "train", config) == 0
    number = submitted(capsys.readouterr().out)
    slurm.until((here / "run" / "checkpoints" / "last.safetensors").exists)
    urgent = ["--partition=urgent", "--exclusive", "--nodes=2", "--output=/dev/null", "--wrap=true"]
    slurm.run("sbatch", *urgent)
    slurm.until(lambda: slurm.state(number) == "COMPLETED", timeout=200)
    said = log_of(here)
    [stopped] = re.findall(r"stopped by a signal after step (\d+)", said)
    assert 0 < int(stopped) < steps
    assert f"going on after step {stopped} of the run" in said
    assert (here / "run" / "posterior.safetensors").exists()
    done = [int(row["step"]) for row in metrics(here / "run")]
    assert done == sorted(set(done))  # no step was made twice


@needs_slurm
@patient
@pytest.mark.slow
def test_a_sweep_as_a_job_array_is_collected(slurm: Slurm, here: Path) -> None:
    make_store(here / "store.zarr")
    config = write_config(here, sweep={"trials": 2, "rungs": 1})
    assert vcal("submit", "slurm", "--array", "--wait", "--", "sweep", config) == 0
    assert sorted(f.name for f in (here / "run" / "trials").iterdir()) == ["0", "1"]
    assert (here / "run" / "best" / "posterior.safetensors").exists()
    assert len(list(here.glob("run.slurm-*_[01].log"))) == 2


@needs_slurm
@patient
@pytest.mark.slow
def test_training_on_ray_inside_a_job(slurm: Slurm, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(here / "store.zarr")
    config = write_config(here)
    before = folders_of_ray()
    assert vcal("submit", "slurm", "--", "train", config, "--on", "ray") == 0
    number = submitted(capsys.readouterr().out)
    [folder] = slurm.until(lambda: folders_of_ray() - before)
    assert folder.name != f"vcal-ray-{number}"  # which anybody knows before
    assert folder.stat().st_mode & 0o777 == 0o700
    port = 25000 + int(number) % 2300 * 3 + 1
    assert slurm.until(lambda: answer(f"http://127.0.0.1:{port}/api/version")) == 401
    slurm.until(lambda: slurm.state(number) == "COMPLETED")
    assert (here / "run" / "posterior.safetensors").exists(), log_of(here)
    assert not folder.exists()


def folders_of_ray() -> set[Path]:
    return set(Path("/tmp").glob("vcal-ray-*"))


def answer(url: str) -> int:
    """The status that somebody without a token gets; 0 while nobody is there."""
    try:
        with urllib.request.urlopen(url, timeout=5) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize("how", ["open to others", "another user's", "a link", "a file"])
def test_a_node_takes_no_folder_that_is_not_its_own(here: Path, how: str) -> None:
    folder = here / "vcal-ray-taken"
    if how == "a file":
        folder.touch(0o700)
    elif how == "a link":
        (here / "elsewhere").mkdir(0o700)
        folder.symlink_to(here / "elsewhere")
    else:
        folder.mkdir(0o755 if how == "open to others" else 0o700)
    if how == "another user's":
        if os.geteuid():
            pytest.skip("only root can make a folder of another user")
        os.chown(folder, 65534, 65534)
    (here / "ray").write_text("#!/usr/bin/env bash\ntouch started\n", encoding="utf-8")
    (here / "ray").chmod(0o755)
    variables = {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["bash", SCRIPTS / "ray_node.sh", here, "127.0.0.1:1", folder],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert str(folder) in done.stderr
    assert not (here / "started").exists()
    assert not folder.is_dir() or not list(folder.iterdir())
