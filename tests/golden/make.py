"""Writes the golden files of one version, with the code of then.

    python tests/golden/make.py COMMIT DIRECTORY [--run] [--train [--features] [--mixture]]

takes the files of a commit out of git into a temporary directory, and makes there, with that code, a store and, if that
code trains, a run of it, whose posterior and last checkpoint are kept. After a change of a schema, the new version's
files are written once and are never written again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

KEPT = ("config.yaml", "rows.json", "versions.json", "posterior.safetensors", "checkpoints/last.safetensors")
PROBLEM: dict[str, Any] = {
    "name": "golden",
    "control_inputs": [{"name": "x", "bounds": [0, 1], "unit": "m"}],
    "calibration_inputs": [{"name": "t", "bounds": [0, 2], "prior": {"family": "normal", "mean": 1.0, "sd": 0.5}}],
    "outputs": [{"name": "f"}],
}
CONFIG: dict[str, Any] = {
    "model": {"eta": {"features": {"features": 6}}, "delta": {"features": {"features": 4}}},
    "fit": {"emulator": {"steps": 4}, "theta": {"steps": 4}, "joint": {"steps": 2}, "screening": 32, "starts": 1},
    "checkpoints": {"every_steps": 2, "every_seconds": None, "keep_best": False},
}
RUNS, OBSERVATIONS = 24, 8


def write(folder: Path, options: list[str]) -> None:
    """In the process that has the old code on its path; what it knows of is chosen by the options."""
    import numpy as np

    import storage

    rng = np.random.default_rng(0)
    x, t = rng.random((RUNS, 1)), 2 * rng.random((RUNS, 1))
    field = np.linspace(0, 1, OBSERVATIONS)[:, None]
    store = storage.create(folder / "store", PROBLEM, dtype="float64", chunk_rows=16)
    numbers = {"run": np.arange(RUNS)} if "--run" in options else {}
    store.append_runs(x, t, np.sin(x * t), **numbers)
    store.append_observations(field, np.sin(1.3 * field))
    if "--train" in options:
        from vcal_dist.config import Config
        from vcal_dist.training import train

        plain = {**CONFIG, "store": "store", "output": "run"}
        if "--features" in options:  # a stacked emulator of few runs would be large
            plain["model"] = {**plain["model"], "emulator": "features"}
            plain["fit"] = {**plain["fit"], "evaluations": 0}
        posterior = train(Config.parse(plain, "golden"), progress=False)
        if "--mixture" in options:
            from vcal_dist.mixed import Averaged

            Averaged([posterior], [0.0]).save(folder / "mixture")


def main(commit: str, target: str, *options: str) -> None:
    """In the process of today."""
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as temporary:
        code, folder = Path(temporary) / "code", Path(temporary) / "made"
        folder.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(code, filter="data")
        call = [sys.executable, str(Path(__file__).resolve()), "--write", json.dumps(options)]
        subprocess.run(call, check=True, cwd=folder, env=os.environ | {"PYTHONPATH": str(code)})
        kept = [
            path.relative_to(folder)
            for path in (folder / "store").rglob("*")
            if path.is_file() and path.suffix != ".lock"
        ]
        kept += [Path("run") / name for name in KEPT if (folder / "run" / name).exists()]
        kept += [path.relative_to(folder) for path in (folder / "mixture").rglob("*.[js]*")]
        for name in kept:
            (Path(target) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, Path(target) / name)


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path.cwd(), json.loads(sys.argv[2]))
    else:
        main(*sys.argv[1:])
