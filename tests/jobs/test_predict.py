"""`vcal predict`: the posterior's numbers at the rows of any file, in any format, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray

import storage
from jobs import prediction_files, prediction_inputs, predictions
from jobs.cli import main
from jobs.commands import predict as command
from jobs.prediction_inputs import open_rows
from jobs.predictions import Asked
from storage.problem import parse_problem
from vcal_dist.config import Config
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import AT_T, KINDS, MEANING
from vcal_dist.training import train

Array = NDArray[np.float64]
Z95 = 1.6448536269514722  # Φ(Z95) = 0.95
CONTROLS, OUTPUTS = ("depth", "flow rate"), ("T", "p")
PROBLEM: dict[str, Any] = {
    "name": "tiny",
    "control_inputs": [{"name": "depth", "unit": "m", "bounds": [0, 10]}, {"name": "flow rate", "bounds": [1, 3]}],
    "calibration_inputs": [{"name": "k", "bounds": [0, 2]}, {"name": "c", "bounds": [-1, 1]}],
    "outputs": [{"name": "T", "unit": "K"}, {"name": "p"}],
}
SMALL = {"features": {"features": 20}}
QUICK = {"emulator": {"steps": 30}, "theta": {"steps": 20}, "joint": {"steps": 5}, "evaluations": 0}


def simulate(x: Array, t: Array) -> Array:
    temperature = 300 + 20 * np.sin(x[:, 0] / 4 + t[:, 0]) + 3 * x[:, 1] * t[:, 1]
    return np.stack([temperature, 5 + x[:, 0] * t[:, 0] / 10 + t[:, 1]], 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a store of 300 runs and 40 observations with noise, and a run that has seen it."""
    where, rng = tmp_path_factory.mktemp("predict"), np.random.default_rng(0)
    store = storage.create(where / "data.zarr", PROBLEM, dtype="float64", chunk_rows=64)
    x, t = rng.uniform([0, 1], [10, 3], (300, 2)), rng.uniform([0, -1], [2, 1], (300, 2))
    store.append_runs(x, t, simulate(x, t))
    x = rng.uniform([0, 1], [10, 3], (40, 2))
    y = simulate(x, np.tile([1.2, 0.3], (40, 1))) + rng.normal([1, 0.1], [0.5, 0.05], (40, 2))
    store.append_observations(x, y, np.tile([0.3, 0.02], (40, 1)) * rng.uniform(0.5, 1.5, (40, 1)))
    settings = {"model": {"eta": SMALL, "delta": SMALL}, "fit": QUICK, "devices": {"accelerator": "cpu"}}
    config = Config.parse({"store": str(where / "data.zarr"), "output": str(where / "run"), **settings})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config, progress=False)
    torch.set_num_threads(before)
    return where


@pytest.fixture(scope="module")
def posterior(place: Path) -> Posterior:
    return Posterior.load(place / "run")


@pytest.fixture
def x() -> Array:
    return np.random.default_rng(5).uniform([0, 1], [10, 3], (23, 2))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path, x: Array) -> Path:
    """A directory to work in, with 23 rows to predict at; columns in another order, with others between them."""
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(place / "run")
    Path("data.zarr").symlink_to(place / "data.zarr")
    write_csv("at.csv", {"flow rate": x[:, 1], "site": np.arange(23.0), "depth": x[:, 0]})
    return tmp_path


def write_csv(path: str, columns: Mapping[str, Sequence[float] | Array]) -> None:
    rows = [",".join(columns), *(",".join(map(repr, map(float, row))) for row in zip(*columns.values(), strict=True))]
    Path(path).write_text("\n".join(rows) + "\n")


def read_csv(path: str) -> dict[str, Array]:
    head, *lines = Path(path).read_text().splitlines()
    values = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    return dict(zip(head.split(","), values.T, strict=True))


def vcal(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def predicted(*arguments: str, run: str = "run", out: str = "out.csv") -> dict[str, Array]:
    """What `vcal predict` writes."""
    assert vcal("predict", run, *arguments, "-o", out, "--overwrite") == 0
    return read_csv(out)


def refused(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    """What `vcal predict` says when it refuses, on one line."""
    capsys.readouterr()
    assert vcal("predict", *arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return " ".join(captured.err.replace("│", " ").split())


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("what", KINDS)
def test_the_numbers_are_those_of_the_posterior(posterior: Posterior, x: Array, what: Any) -> None:
    found = predicted("--at", "at.csv", "--what", what, "--samples", "3", "--seed", "4")
    normal = what == "discrepancy"
    expected = posterior.predict(x, what, samples=3 if normal else 1000, seed=4)
    assert expected.samples is not None
    names = [f"{o}_{k}" for o in OUTPUTS for k in ("mean", "sd", "q05", "q95", "sample_0", "sample_1", "sample_2")]
    assert list(found) == [*CONTROLS, *names]
    for j, name in enumerate(CONTROLS):
        np.testing.assert_array_equal(found[name], x[:, j])
    for k, name in enumerate(OUTPUTS):
        np.testing.assert_array_equal(found[f"{name}_mean"], expected.mean[:, k])
        np.testing.assert_array_equal(found[f"{name}_sd"], expected.sd[:, k])
        for i in range(3):
            np.testing.assert_array_equal(found[f"{name}_sample_{i}"], expected.samples[i, :, k])
        if normal:
            low, high = (expected.mean[:, k] + z * expected.sd[:, k] for z in (-Z95, Z95))
        else:  # the 50th and the 950th of 1000
            low, high = np.sort(expected.samples[:, :, k], axis=0)[[49, 949]]
        np.testing.assert_allclose(found[f"{name}_q05"], low, rtol=1e-7)
        np.testing.assert_allclose(found[f"{name}_q95"], high, rtol=1e-7)


def dense(posterior: Posterior) -> tuple[Array, Array]:
    """Mean and covariance of (θ̃, w_1, w_2), from the precision alone."""
    (q,) = posterior.components
    state = {name: value.double().numpy() for name, value in q.state_dict().items()}
    d, (outputs, width) = len(state["theta_mean"]), state["mean"].shape
    precision, frame = np.zeros((2, d + outputs * width, d + outputs * width))
    precision[:d, :d], frame[:d, :d], mean = state["precision_theta"], np.eye(d), [state["theta_mean"]]
    for k in range(outputs):
        at = slice(d + k * width, d + (k + 1) * width)
        precision[at, at], precision[:d, at] = state["precision_weights"][k], state["precision_cross"][k]
        precision[at, :d] = precision[:d, at].T
        frame[at, at] = state["frame_root"][k]
        mean.append(state["frame_mean"][k] + state["frame_root"][k] @ state["mean"][k])
    return np.concatenate(mean), frame @ np.linalg.inv(precision) @ frame.T


def features(stack: Any, unit: Array) -> Array:
    """φ at points of the unit cube."""
    with torch.no_grad():
        values: Array = stack(torch.from_numpy(unit).float()).double().numpy()
    return values


UNIT = np.array([[0.0, 10.0], [1.0, 2.0], [0.0, 2.0], [-1.0, 2.0]])  # low and width of every input


def unit(*columns: Array) -> Array:
    values = np.concatenate(columns, axis=1)
    low, width = UNIT[: values.shape[1]].T
    return np.asarray((values - low) / width)


@pytest.mark.usefixtures("files")
def test_the_emulator_at_chosen_inputs_is_normal_with_the_moments_of_its_weights(
    posterior: Posterior, x: Array
) -> None:
    given = ("--at", "at.csv", "--t", "c=-0.4", "k=1.5", "--what")
    found, alone = (predicted(*given, what) for what in AT_T)
    mean, covariance = dense(posterior)
    phi = features(posterior.model.eta, unit(x, np.tile([1.5, -0.4], (len(x), 1))))
    d, width = 2, posterior.model.width
    for k, name in enumerate(OUTPUTS):
        at = slice(d + k * width, d + k * width + phi.shape[1])
        scale, shift = posterior.scaling.outputs.sd[k].item(), posterior.scaling.outputs.mean[k].item()
        centre = shift + scale * phi @ mean[at]
        of_eta = scale * np.sqrt(np.einsum("bi,ij,bj->b", phi, covariance[at, at], phi))
        residual = scale * posterior.model.likelihood_z.noise_variance()[k].sqrt().item()  # type: ignore[operator]
        for each, sd in ((alone, of_eta), (found, np.hypot(of_eta, residual))):
            np.testing.assert_allclose(each[f"{name}_mean"], centre, rtol=1e-6)
            np.testing.assert_allclose(each[f"{name}_sd"], sd, rtol=1e-3)
            np.testing.assert_allclose(each[f"{name}_q95"], centre + Z95 * sd, rtol=1e-5)
    np.testing.assert_array_equal(found["k"], 1.5)  # where it was predicted stands beside it
    np.testing.assert_array_equal(found["c"], -0.4)


@pytest.mark.usefixtures("files")
def test_the_process_is_what_draws_of_theta_and_weights_give(posterior: Posterior, x: Array) -> None:
    whole, alone = (predicted("--at", "at.csv", "--what", what) for what in ("process", "process_without_residual"))
    mean, covariance = dense(posterior)
    draws = np.random.default_rng(1).multivariate_normal(mean, covariance, 4000)
    theta = posterior.model.prior.theta(torch.from_numpy(draws[:, :2])).numpy()
    width, inner = posterior.model.width, posterior.model.eta.width
    assert posterior.model.delta is not None
    phi_delta = features(posterior.model.delta, unit(x))
    f = np.empty((len(draws), len(x), 2))
    for s, (t, w) in enumerate(zip(theta, draws[:, 2:].reshape(-1, 2, width), strict=True)):
        phi = features(posterior.model.eta, unit(x, np.tile(t, (len(x), 1))))
        f[s] = phi @ w[:, :inner].T + phi_delta @ w[:, inner:].T
    f = f * posterior.scaling.outputs.sd.numpy() + posterior.scaling.outputs.mean.numpy()
    residual = np.random.default_rng(2).normal(size=f.shape) * posterior.residual(x)
    for found, values in ((alone, f), (whole, f + residual)):
        for k, name in enumerate(OUTPUTS):
            sd = values[:, :, k].std(0)
            low, high = np.quantile(values[:, :, k], [0.05, 0.95], axis=0)
            # In standard deviations, and some four standard errors.
            for key, value, error in (("mean", values[:, :, k].mean(0), 0.06), ("q05", low, 0.25), ("q95", high, 0.25)):
                assert np.abs((found[f"{name}_{key}"] - value) / sd).max() < error
            np.testing.assert_allclose(found[f"{name}_sd"], sd, rtol=0.08)


@pytest.mark.usefixtures("files")
def test_intervals_hold_what_they_promise_at_fresh_points() -> None:
    """Of fresh simulator outputs, of the process and of observations; functions alone hold far less."""
    rng, rows = np.random.default_rng(8), 400
    x, t = rng.uniform([0, 1], [10, 3], (rows, 2)), rng.uniform([0, -1], [2, 1], (rows, 2))
    truth = simulate(x, np.tile([1.2, 0.3], (rows, 1))) + np.array([1, 0.1])
    columns = {"depth": x[:, 0], "flow rate": x[:, 1], "k": t[:, 0], "c": t[:, 1]}
    write_csv("fresh.csv", columns)
    shares = {}
    for kind, fresh, more in (
        ("emulator", simulate(x, t), ("--t", "from-file")),
        ("emulator_without_residual", simulate(x, t), ("--t", "from-file")),
        ("process", truth, ()),
        ("process_without_residual", truth, ()),
        ("observation", truth + rng.normal(0, [0.5, 0.05], (rows, 2)), ()),
    ):
        found = predicted("--at", "fresh.csv", "--what", kind, *more)
        inside = [
            (found[f"{o}_q05"] <= fresh[:, k]) & (fresh[:, k] <= found[f"{o}_q95"]) for k, o in enumerate(OUTPUTS)
        ]
        shares[kind] = float(np.mean(inside))
    for kind in ("emulator", "process", "observation"):
        assert shares[kind] > 0.8, kind
    assert shares["emulator_without_residual"] < shares["emulator"] - 0.1
    assert shares["process_without_residual"] <= shares["process"]


def test_help_and_documentation_define_every_kind(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert vcal("predict", "--help") == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    documented = (root / "docs" / "training.md").read_text(encoding="utf-8")
    assert list(MEANING) == list(KINDS)
    for kind, text in MEANING.items():
        assert f"{kind}: {text}." in said
        assert f"| {text} |" in next(line for line in documented.splitlines() if line.startswith(f"| `{kind}`"))


@pytest.mark.usefixtures("files")
def test_an_unknown_kind_is_answered_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, 2, "run", "--at", "at.csv", "--what", "proces")
    assert "'proces' is not one of " + ", ".join(f"'{kind}'" for kind in KINDS) in said


@pytest.mark.usefixtures("files")
def test_a_part_alone_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("predict", "run", "--at", "at.csv", "--what", "process_without_residual") == 0
    assert "Prediction of the process without residual" in capsys.readouterr().out


@pytest.mark.usefixtures("files")
def test_the_discrepancy_is_normal_with_the_moments_of_its_weights(posterior: Posterior, x: Array) -> None:
    found = predicted("--at", "at.csv", "--what", "discrepancy")
    mean, covariance = dense(posterior)
    assert posterior.model.delta is not None
    phi = features(posterior.model.delta, unit(x))
    for k, name in enumerate(OUTPUTS):
        stop = 2 + (k + 1) * posterior.model.width
        at = slice(stop - phi.shape[1], stop)
        scale = posterior.scaling.outputs.sd[k].item()
        sd = scale * np.sqrt(np.einsum("bi,ij,bj->b", phi, covariance[at, at], phi))
        low = scale * phi @ mean[at] - Z95 * sd
        assert np.abs((found[f"{name}_q05"] - low) / sd).max() < 0.03  # 256 draws of θ


@pytest.mark.usefixtures("files")
def test_noise_in_the_file_widens_observations_and_nothing_else(posterior: Posterior, x: Array) -> None:
    noise = np.random.default_rng(2).uniform(0.1, 2, (23, 2))
    columns = {"depth": x[:, 0], "flow rate": x[:, 1]}
    write_csv("noisy.csv", columns | {"T_noise": noise[:, 0], "p_noise": noise[:, 1]})
    plain, own = (predicted("--at", at, "--what", "observation") for at in ("at.csv", "noisy.csv"))
    for k, name in enumerate(OUTPUTS):
        np.testing.assert_array_equal(own[f"{name}_mean"], plain[f"{name}_mean"])
        np.testing.assert_allclose(own[f"{name}_sd"] ** 2, plain[f"{name}_sd"] ** 2 + noise[:, k] ** 2)
    of_process = predicted("--at", "noisy.csv")
    np.testing.assert_array_equal(of_process["T_sd"], predicted("--at", "at.csv")["T_sd"])
    assert (plain["T_sd"] > of_process["T_sd"]).all()


def test_counts_have_quantiles_that_are_counts_and_are_never_taken_for_normal() -> None:
    drawn = np.random.default_rng(0).poisson(3.0, (1000, 5, 1)).astype(float)
    prediction = predictions.Predicted(drawn.mean(0), drawn.std(0), drawn)
    _, _, low, high = predictions._of_output(prediction, 0, normal=False, samples=0)
    assert set(low) <= {0.0, 1.0}
    assert set(high) <= {5.0, 6.0, 7.0}


@pytest.mark.usefixtures("files")
def test_what_is_not_normal_is_not_taken_for_it(posterior: Posterior) -> None:
    rows = open_rows("at.csv", posterior.problem)
    fixed = Asked("emulator", t={"k": 1.0, "c": 0.0})
    assert predictions.is_normal(posterior, rows, fixed)
    assert not predictions.is_normal(posterior, rows, Asked("emulator"))
    for what in ("process", "observation"):
        assert not predictions.is_normal(posterior, rows, Asked(what))
    two = Posterior(
        posterior.scaling, posterior.model, posterior.components * 2, torch.full((2,), 0.5).log(), posterior.record
    )
    assert not predictions.is_normal(two, rows, fixed)
    assert not predictions.is_normal(two, rows, Asked("discrepancy"))


# --- rows from everywhere ---------------------------------------------------------------------------------------------


def as_parquet(x: Array) -> str:
    pq.write_table(pa.table({"flow rate": x[:, 1], "depth": x[:, 0], "name": ["a"] * len(x)}), "at.parquet")
    return "at.parquet"


def as_netcdf(x: Array) -> str:
    xr.Dataset({"depth": ("site", x[:, 0]), "flow rate": ("site", x[:, 1])}).to_netcdf("at.nc", engine="h5netcdf")
    return "at.nc"


def as_hdf5(x: Array) -> str:
    with h5py.File("at.h5", "w") as file:
        group = file.create_group("observations")
        group["depth"], group["flow rate"] = x.T
    return "at.h5"


def as_npz(x: Array) -> str:
    np.savez("at.npz", x=x, y=np.zeros((len(x), 2)))
    return "at.npz"


def as_zarr(x: Array) -> str:
    xr.Dataset({"depth": ("site", x[:, 0]), "flow rate": ("site", x[:, 1])}).to_zarr("at.zarr", consolidated=False)
    return "at.zarr"


def as_store(x: Array) -> str:
    turned = PROBLEM | {"control_inputs": PROBLEM["control_inputs"][::-1]}  # columns are found by name
    store = storage.create("store", turned, dtype="float64", chunk_rows=10)
    store.append_observations(x[:, ::-1], np.zeros((len(x), 2)))
    return "store"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("make", [as_parquet, as_netcdf, as_hdf5, as_npz, as_zarr, as_store])
def test_rows_come_from_every_format(make: Callable[[Array], str], x: Array) -> None:
    expected, found = predicted("--at", "at.csv"), predicted("--at", make(x))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.usefixtures("files")
def test_a_pattern_stands_for_several_files(x: Array, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in (("part1.csv", x[:9]), ("part2.csv", x[9:])):
        write_csv(name, {"depth": rows[:, 0], "flow rate": rows[:, 1]})
    expected, found = predicted("--at", "at.csv"), predicted("--at", "part*.csv")
    np.testing.assert_array_equal(found["T_q95"], expected["T_q95"])
    write_csv("part2.csv", {"depth": [1.0, 11.0], "flow rate": [2.0, 2.0]})
    assert "part2.csv: column 'depth': 1 value out of bounds [0, 10], first in row 2" in refused(
        capsys, 1, "run", "--at", "part*.csv"
    )


@pytest.mark.usefixtures("files")
def test_inputs_along_dimensions_of_their_own_make_a_grid() -> None:
    depth, rate = np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.5])
    xr.Dataset(coords={"depth": depth, "flow rate": rate}).to_netcdf("grid.nc", engine="h5netcdf")
    found = predicted("--at", "grid.nc")
    np.testing.assert_array_equal(found["depth"], np.repeat(depth, 2))
    np.testing.assert_array_equal(found["flow rate"], np.tile(rate, 3))


@pytest.mark.usefixtures("files")
def test_a_store_gives_its_observations_or_with_t_its_runs(posterior: Posterior) -> None:
    store = storage.open("data.zarr")
    own = store.observations.read()
    found = predicted("--at", "data.zarr", "--what", "observation")
    expected = posterior.predict(own["x"], "observation", noise=own["noise"], samples=1000)
    np.testing.assert_array_equal(found["depth"], own["x"][:, 0])
    np.testing.assert_array_equal(found["T_sd"], expected.sd[:, 0])
    runs = store.runs.read()
    found = predicted("--at", "data.zarr", "--what", "emulator", "--t", "from-file")
    np.testing.assert_array_equal(found["c"], runs["t"][:, 1])
    np.testing.assert_array_equal(found["p_mean"], posterior.predict(runs["x"], "emulator", t=runs["t"]).mean[:, 1])
    # An emulator of these runs is close to them, which tells whether x and t belong together.
    assert np.abs(found["T_mean"] - runs["z"][:, 0]).mean() < 0.3 * runs["z"][:, 0].std()


@pytest.mark.usefixtures("files")
def test_t_from_the_file_and_from_the_command_line_agree(x: Array) -> None:
    write_csv("t.csv", {"depth": x[:, 0], "flow rate": x[:, 1], "k": [0.5] * 23, "c": [0.25] * 23})
    one = predicted("--at", "t.csv", "--what", "emulator", "--t", "from-file")
    other = predicted("--at", "t.csv", "--what", "emulator", "--t", "k=0.5", "c=0.25")
    assert list(one) == list(other)
    for name, values in one.items():
        np.testing.assert_array_equal(other[name], values)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("suffix", ["csv", "parquet", "nc", "zarr"])
def test_blocks_of_rows_give_the_same_numbers_as_all_at_once(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("predict", "run", "--at", "at.csv", "--samples", "2", "-o")
    assert vcal(*arguments, f"whole.{suffix}") == 0
    monkeypatch.setattr(predictions, "MOST_ROWS", 7)
    seen: list[int] = []
    original = prediction_inputs.Rows.blocks

    def counted(self: prediction_inputs.Rows, size: int) -> Iterator[dict[str, Array]]:
        for block in original(self, size):
            seen.append(len(block["x"]))
            yield block

    monkeypatch.setattr(prediction_inputs.Rows, "blocks", counted)
    assert vcal(*arguments, f"parts.{suffix}") == 0
    assert seen == [7, 7, 7, 2]
    whole, parts = (dict(read(f"{name}.{suffix}")) for name in ("whole", "parts"))
    for name, values in whole.items():
        np.testing.assert_allclose(parts[name], values, rtol=1e-7)  # rounding


def test_a_block_has_fewer_rows_the_more_samples_are_drawn(posterior: Posterior, place: Path) -> None:
    rows = open_rows(str(place / "data.zarr"), posterior.problem)
    for samples in (0, 5000, 10**9):
        size = predictions.block_rows(posterior, rows, Asked(samples=samples))
        assert size == max(1, predictions.NUMBERS // (2 * max(1000, samples)))
    assert predictions.block_rows(posterior, rows, Asked("discrepancy")) == predictions.MOST_ROWS


def test_pieces_of_any_size_become_blocks_of_one() -> None:
    values = np.arange(20.0).reshape(10, 2)
    for cuts in ([], [1, 2, 9], [5, 5, 5], [3, 6]):
        blocks = list(prediction_inputs._regular(np.split(values, cuts), 4))
        assert [len(block) for block in blocks] == [4, 4, 2]
        np.testing.assert_array_equal(np.concatenate(blocks), values)


# --- files to write ---------------------------------------------------------------------------------------------------


def read(path: str) -> Iterator[tuple[str, Array]]:
    """Columns by the names that they have in CSV."""
    if path.endswith(".csv"):
        yield from read_csv(path).items()
    elif path.endswith(".parquet"):
        table = pq.read_table(path)
        yield from ((name, table[name].to_numpy()) for name in table.column_names)
    else:
        with xr.open_dataset(path, engine="h5netcdf") if path.endswith(".nc") else xr.open_zarr(path) as dataset:
            for name, variable in dataset.data_vars.items():
                values = variable.values
                if values.ndim == 1:
                    yield str(name), values
                else:
                    assert variable.dims == ("row", "sample")
                    yield from ((f"{name}_{i}", values[:, i]) for i in range(values.shape[1]))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("suffix", ["parquet", "nc", "zarr"])
def test_every_format_holds_the_same_columns(suffix: str) -> None:
    arguments = ("predict", "run", "--at", "at.csv", "--samples", "2", "-o")
    assert vcal(*arguments, "out.csv") == 0
    assert vcal(*arguments, f"new/out.{suffix}") == 0  # also into a directory that was not there
    expected, found = dict(read("out.csv")), dict(read(f"new/out.{suffix}"))
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_arrays_know_their_units_and_where_they_come_from(suffix: str, place: Path) -> None:
    assert vcal("predict", "run", "--at", "at.csv", "--samples", "2", "--seed", "3", "-o", f"out.{suffix}") == 0
    path = f"out.{suffix}"
    with xr.open_dataset(path, engine="h5netcdf") if suffix == "nc" else xr.open_zarr(path) as dataset:
        assert dict(dataset.sizes) == {"row": 23, "sample": 2}
        assert dataset["T_mean"].attrs == {"units": "K", "long_name": "mean of the process"}
        assert dataset["depth"].attrs["units"] == "m"
        about = {key: dataset.attrs[key] for key in ("problem", "what", "seed", "quantiles")}
    assert about == {"problem": "tiny", "what": "process", "seed": "3", "quantiles": "of 1000 samples"}


@pytest.mark.usefixtures("files")
def test_predictions_can_be_predicted_at() -> None:
    assert vcal("predict", "run", "--at", "at.csv", "-o", "out.zarr") == 0
    first, again = predicted("--at", "at.csv"), predicted("--at", "out.zarr")
    np.testing.assert_array_equal(first["T_mean"], again["T_mean"])


def test_names_that_clash_stay_apart() -> None:
    assert prediction_files.distinct(["row", "flow_mean", "sample", "flow_mean"], prediction_files.RESERVED) == [
        "row_",
        "flow_mean",
        "sample_",
        "flow_mean_",
    ]


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_an_input_may_be_called_as_a_dimension(suffix: str, tmp_path: Path) -> None:
    fields = [predictions.Field("sample", "m", ""), predictions.Field("y_sample", "", "", 3)]
    blocks = [[np.arange(2.0), np.ones((2, 3))], [np.array([2.0]), np.zeros((1, 3))]]
    path = tmp_path / f"out.{suffix}"
    prediction_files.write(path, fields, blocks, rows=3, block_rows=2, about={})
    found = dict(read(str(path)))
    np.testing.assert_array_equal(found["sample_"], [0, 1, 2])
    np.testing.assert_array_equal(found["y_sample_2"], [1, 1, 0])


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["out.csv", "out.zarr"])
def test_what_exists_is_replaced_only_when_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("predict", "run", "--at", "at.csv", "-o", name) == 0
    before = dict(read(name))["T_q05"]
    again = ("run", "--at", "at.csv", "--seed", "9", "-o", name)
    assert f"{name} exists; choose another path, or replace it with --overwrite" in refused(capsys, 1, *again)
    np.testing.assert_array_equal(dict(read(name))["T_q05"], before)
    assert vcal("predict", *again, "--overwrite") == 0
    assert (dict(read(name))["T_q05"] != before).any()
    assert not list(Path().glob(".out*"))


@pytest.mark.usefixtures("files")
def test_data_are_never_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = storage.open(place / "data.zarr").runs.rows
    target = str(place / "data.zarr")
    said = refused(capsys, 1, "run", "--at", "at.csv", "-o", target, "--overwrite")
    assert "not made by `vcal predict`" in said
    assert storage.open(target).runs.rows == rows
    assert "also what is predicted at" in refused(capsys, 1, "run", "--at", "at.csv", "-o", "at.csv", "--overwrite")
    assert "accepted: .csv, .parquet, .nc, .zarr" in refused(capsys, 1, "run", "--at", "at.csv", "-o", "out.xlsx")
    assert "is a URL" in refused(capsys, 1, "run", "--at", "at.csv", "-o", "s3://bucket/out.csv")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.nc", "out.zarr"])
def test_an_end_in_the_middle_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Iterator[list[Array]]:
        yield next(original(*arguments))
        raise KeyboardInterrupt

    original = predictions.predicted
    monkeypatch.setattr(predictions, "predicted", broken)
    monkeypatch.setattr(predictions, "MOST_ROWS", 7)
    before = sorted(item.name for item in Path().iterdir())
    assert vcal("predict", "run", "--at", "at.csv", "-o", name) == 130
    assert sorted(item.name for item in Path().iterdir()) == before


@pytest.mark.usefixtures("files")
def test_a_place_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert "cannot write file/out.csv" in refused(capsys, 1, "run", "--at", "at.csv", "-o", "file/out.csv")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("suffix", ["csv", "npz"])
def test_missing_columns_are_named(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv("few.csv", {"Depth": [1.0], "k": [1.0]})
    np.savez("few.npz", Depth=[1.0], k=[1.0])
    said = refused(capsys, 1, "run", "--at", f"few.{suffix}")
    assert "did you mean 'Depth" in said
    assert "Missing are 'depth', 'flow rate'" in said
    write_csv("few.csv", {"depth": [1.0], "flow rate": [2.0], "k": [1.0]})
    said = refused(capsys, 1, "run", "--at", "few.csv", "--what", "emulator", "--t", "from-file")
    assert "column 'c' is missing" in said
    assert "Missing are" not in said


@pytest.mark.usefixtures("files")
def test_a_store_of_another_problem_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = PROBLEM | {"control_inputs": [{"name": "height", "bounds": [0, 1]}]}
    store = storage.create("other.zarr", other)
    assert "observations have no column 'depth', 'flow rate'" in refused(capsys, 1, "run", "--at", "other.zarr")
    store = storage.create("empty.zarr", PROBLEM)
    assert store.runs.rows == 0
    assert "has no observations" in refused(capsys, 1, "run", "--at", "empty.zarr")


@pytest.mark.usefixtures("files")
def test_faulty_rows_are_named_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.csv").write_text("depth,flow rate\n1,2\n11,2\n12,2\nabc,2\n3,\n4,2,7\n")
    said = refused(capsys, 1, "run", "--at", "bad.csv", "-o", "out.csv")
    assert "bad.csv: column 'depth': 2 values out of bounds [0, 10], first in row 2: 11" in said
    assert "column 'depth': 1 value not a number, first in row 4: 'abc'" in said
    assert "column 'flow rate': 1 value missing (NaN), first in row 5: nan" in said
    assert "1 row with a wrong number of fields, first row 6" in said
    assert "--extrapolate" in said
    assert "out of bounds" not in refused(capsys, 1, "run", "--at", "bad.csv", "--extrapolate")
    assert not Path("out.csv").exists()


@pytest.mark.usefixtures("files")
def test_outside_the_bounds_is_predicted_on_request(posterior: Posterior, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv("out of.csv", {"depth": [12.0], "flow rate": [2.0]})
    assert "out of bounds [0, 10], first in row 1: 12" in refused(capsys, 1, "run", "--at", "out of.csv")
    found = predicted("--at", "out of.csv", "--extrapolate")
    np.testing.assert_array_equal(found["T_mean"], posterior.predict([[12.0, 2.0]], extrapolate=True).mean[:, 0])
    found = predicted("--at", "at.csv", "--what", "emulator", "--t", "k=2.5", "c=0", "--extrapolate")
    np.testing.assert_array_equal(found["k"], 2.5)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no.csv", None, "no such file"),
        ("empty.csv", "", "is empty"),
        ("rows.csv", "depth,flow rate\n", "has columns but no rows"),
        ("at.txt", "depth,flow rate\n1,2\n", "the format is not known by its suffix"),
        ("broken.nc", "depth", "cannot be read as netcdf"),
        ("broken.npz", "depth", "cannot be read as npz"),
        ("broken.parquet", "depth", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(
    name: str, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path(name).write_text(content)
    found = refused(capsys, 1, "run", "--at", name)
    assert name in found
    assert said in found


@pytest.mark.usefixtures("files")
def test_columns_of_different_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("uneven.npz", **{"depth": np.ones(3), "flow rate": np.ones(4)})
    assert "'depth' 3, 'flow rate' 4" in refused(capsys, 1, "run", "--at", "uneven.npz")


@pytest.mark.usefixtures("files")
def test_a_file_that_changes_while_it_is_read_is_noticed(posterior: Posterior) -> None:
    rows = open_rows("at.csv", posterior.problem)
    text = Path("at.csv").read_text().splitlines()
    Path("at.csv").write_text("\n".join(text[:-1]) + "\n")
    with pytest.raises(storage.IngestError, match="changed while it was read"):
        list(rows.blocks(10))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["k=1"], "c is missing; all must be given: k=VALUE c=VALUE"),
        (["k=1", "c=0", "z=3"], "'z' is no calibration input; they are k, c"),
        (["k=1", "c=2"], "'c' is 2, out of its bounds -1 to 1"),
        (["k=1", "c=nan"], "'c' is nan"),
        (["k=1", "k=1"], "'k' is given twice"),
        (["k=one", "c=0"], "'one', given for 'k', is not a number"),
        (["from-file", "k=1"], "'from-file' is no NAME=VALUE"),
    ],
)
def test_wrong_calibration_inputs(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, 2, "run", "--at", "at.csv", "--what", "emulator", "--t", *given)


@pytest.mark.usefixtures("files")
def test_t_belongs_to_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --what emulator" in refused(capsys, 2, "run", "--at", "at.csv", "--t", "k=1", "c=0")


def test_a_name_may_hold_a_sign_of_equality() -> None:
    calibration = [{"name": "a=b", "bounds": [0, 1]}]
    problem = parse_problem(PROBLEM | {"calibration_inputs": calibration})
    assert command.parse_t(["a=b=0.5"], problem, extrapolate=False) == {"a=b": 0.5}


@pytest.mark.usefixtures("files")
def test_what_is_no_finished_run_is_said(capsys: pytest.CaptureFixture[str], place: Path, s3_url: str) -> None:
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("")
    for path, said in (
        ("nowhere", "there is no run at nowhere"),
        ("data.zarr", "data.zarr is a store of data, not a run; train one from it with: vcal train"),
        ("folder", "folder is not a run: it has neither posterior.safetensors nor config.yaml, but notes.txt"),
        ("at.csv", "at.csv is not a whole safetensors file"),
        (f"{s3_url}/nothing", f"there is no run at {s3_url}/nothing"),
    ):
        assert said in refused(capsys, 1, path, "--at", "at.csv")
    begun = Path("begun")
    begun.mkdir()
    for name in ("config.yaml", "versions.json"):
        (begun / name).write_bytes((place / "run" / name).read_bytes())
    said = refused(capsys, 1, "begun", "--at", "at.csv")
    assert "the run in begun is not finished: no checkpoint yet" in said
    assert "go on with: vcal train begun/config.yaml output=begun" in said  # it lies elsewhere than where it began


@pytest.mark.usefixtures("files")
def test_a_run_may_lie_in_an_object_store(capsys: pytest.CaptureFixture[str], s3_url: str) -> None:
    fsspec.filesystem("s3").put("run", f"{s3_url}/predicted", recursive=True)
    printed = []
    for run in ("run", f"{s3_url}/predicted"):
        assert vcal("predict", run, "--at", "at.csv", "--json") == 0
        printed.append(json.loads(capsys.readouterr().out) | {"run": None})
    assert printed[0] == printed[1]


# --- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("files")
def test_without_a_file_the_first_rows_are_shown(capsys: pytest.CaptureFixture[str], x: Array) -> None:
    assert vcal("predict", "run", "--at", "at.csv", "--samples", "1") == 0
    captured = capsys.readouterr()
    for text in ("Prediction of the process", "T_q95", "p_sample_0", "row 9", "quantiles of 1000 samples", "13 more"):
        assert text in captured.out
    assert "row 10" not in captured.out
    assert "ignored columns: site" in captured.err
    assert vcal("predict", "run", "--at", "at.csv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["what"], found["ignored"]) == (23, "process", ["site"])
    assert found["first_rows"]["depth"] == x[:10, 0].tolist()
    assert len(found["first_rows"]["T_mean"]) == 10


@pytest.mark.usefixtures("files")
def test_json_says_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("predict", "run", "--at", "at.csv", "-o", "out.csv", "--what", "discrepancy", "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["output"], found["rows"]) == ("out.csv", 23)
    assert found["quantiles"] == "of a normal distribution"
    assert captured.err == ""


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    for terminal in (True, False):
        file = io.StringIO()
        monkeypatch.setattr(command, "stderr", lambda file=file, on=terminal: Console(file=file, force_terminal=on))
        assert list(command._progress(iter("abc"), 25, 10)) == ["a", "b", "c"]
        assert ("25/25" in file.getvalue()) == terminal
        assert list(command._progress(iter("a"), 10, 10)) == ["a"]


def test_the_help_names_the_number_of_samples(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("predict", "--help") == 0
    assert f"those of {predictions.QUANTILE_SAMPLES} samples" in " ".join(capsys.readouterr().out.split())
