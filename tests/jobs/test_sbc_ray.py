"""`vcal sbc --ray` on a real Ray cluster of two CPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from jobs.cli import main
from tests.ray_kit import BIN, RayHead
from tests.vcal_dist.training_kit import make_store, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_replicates_as_tasks_of_a_cluster(
    ray_head: RayHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "small.zarr", runs=60, observations=12)
    plain = settings(tmp_path / "small.zarr", tmp_path / "run", fit={"evaluations": 0})
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")

    command = ["sbc", str(tmp_path / "small.yaml"), "--replicates", "3", "--json"]
    arguments = [str(BIN / "vcal"), *command, "--ray", ray_head.address]
    done = subprocess.run(arguments, env=ray_head.env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 replicates done" in done.stderr
    with pytest.raises(SystemExit):
        main([*command, "--workers", "1", "-o", str(tmp_path / "here")])
    found, expected = (json.loads(text) for text in (done.stdout, capsys.readouterr().out))
    assert found["output"] == str(tmp_path / "run-sbc")
    assert [one["pit"] for one in found["parameters"]] == [pytest.approx(one["pit"]) for one in expected["parameters"]]
