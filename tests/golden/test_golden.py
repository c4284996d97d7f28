"""Files of every schema that there was open, resume, or are refused with what to do; `make.py` wrote them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import storage
from jobs.cli import main
from jobs.config import read
from storage import layout
from storage.errors import StoreError
from tests.golden.make import OBSERVATIONS, RUNS
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.training import train

HERE = Path(__file__).parent
STORES = sorted(path.name for path in HERE.iterdir() if (path / "store").is_dir())
TRAINED = sorted(path.name for path in HERE.iterdir() if (path / "run").is_dir())
NEWEST = TRAINED[-1]
CURE = "delete|that version|upgrade|use the one|ingest the data again"


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all of them: runs name their stores by relative paths."""
    return Path(shutil.copytree(HERE, tmp_path / "golden", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


@pytest.mark.parametrize("name", STORES)
def test_a_store_opens_and_grows(golden: Path, name: str) -> None:
    store = storage.open(golden / name / "store")
    schema = store.document["attributes"]["vcal"]["schema"]
    assert store.has_checksum == (schema >= layout.WITH_CHECKSUM)
    assert (store.runs.rows, store.observations.rows) == (RUNS, OBSERVATIONS)
    assert store.verify() == []
    rows = store.runs.read()
    np.testing.assert_allclose(rows["z"], np.sin(rows["x"] * rows["t"]))
    prior = store.problem.calibration_inputs[0].prior
    assert prior is not None
    assert prior.model_dump() == {"family": "normal", "mean": 1.0, "sd": 0.5}

    numbers = {"run": [RUNS]} if "runs/run" in layout.members(store.document) else {}
    store.append_runs([[0.5]], [[1.0]], [[0.25]], **numbers)
    again = storage.open(golden / name / "store")
    assert again.runs.rows == RUNS + 1
    np.testing.assert_array_equal(again.runs.read(0, RUNS)["z"], rows["z"])
    assert again.verify() == []
    assert again.has_checksum
    assert again.document["attributes"]["vcal"]["schema"] == layout.SCHEMA


def test_every_schema_of_a_store_is_there() -> None:
    roots = (json.loads((HERE / name / "store" / "zarr.json").read_text(encoding="utf-8")) for name in STORES)
    assert {root["attributes"]["vcal"]["schema"] for root in roots} == set(layout.READ)


def test_a_store_of_the_future_is_refused(golden: Path) -> None:
    root = golden / STORES[0] / "store" / "zarr.json"
    document = json.loads(root.read_text(encoding="utf-8"))
    document["attributes"]["vcal"]["schema"] = 99
    root.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError, match=r"schema 99.*upgrade vcal-dist"):
        storage.open(root.parent)


@pytest.mark.parametrize("name", TRAINED)
def test_a_posterior_loads_and_predicts_or_is_refused(golden: Path, name: str) -> None:
    if name == "run-1":  # its weights were kept otherwise, under the same number of the schema
        with pytest.raises(ModelError, match="is not a whole posterior: it has no 'shape'"):
            Posterior.load(golden / name / "run")
        return
    posterior = Posterior.load(golden / name / "run")
    assert [parameter.name for parameter in posterior.problem.calibration_inputs] == ["t"]
    draws = posterior.sample(100, seed=0)
    assert np.isfinite(draws).all()
    predicted = posterior.predict(np.linspace(0, 1, 5)[:, None])
    assert np.isfinite(predicted.mean).all()
    assert (predicted.sd > 0).all()


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_can_be_inspected(golden: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", str(golden / name / "run")])
    said = capsys.readouterr()
    assert "posterior.nc is missing" in said.out or name == "run-1"  # which is too large to keep here
    assert "vcal-dist 0.1.0" in said.out


@pytest.mark.parametrize("name", TRAINED)
def test_an_interrupted_run_resumes_or_is_refused_with_what_to_do(
    golden: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = golden / name / "run"
    (run / FILE).unlink()
    before = (run / "checkpoints" / "last.safetensors").read_bytes()
    monkeypatch.chdir(golden / name)  # its paths are relative

    def resume(said: list[str]) -> None:
        train(Config.parse(read(run / "config.yaml")), progress=False, say=said.append)

    if name == NEWEST:
        said: list[str] = []
        resume(said)
        assert any("going on after step" in line for line in said)
        assert (run / FILE).exists()
        return
    with pytest.raises(ConfigError, match=CURE):
        resume([])
    assert (run / "checkpoints" / "last.safetensors").read_bytes() == before, "what was refused was written over"


def test_a_mixture_loads(golden: Path) -> None:
    mixture = Averaged.load(golden / NEWEST / "mixture")
    assert np.isfinite(mixture.sample(10, seed=0)).all()
    text = json.loads((golden / NEWEST / "mixture" / "mixture.json").read_text(encoding="utf-8"))
    (golden / NEWEST / "mixture" / "mixture.json").write_text(json.dumps({**text, "schema": 99}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"schema 99.*use the one that wrote it"):
        Averaged.load(golden / NEWEST / "mixture")
