"""Several posteriors as one: weighed by evidence, pooled by the laws of total expectation and variance, kept whole."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import storage
from jobs.cli import main
from jobs.run_state import load_posterior
from storage.priors import LogNormal
from tests.vcal_dist.test_posterior import LOG, everything, inputs, posterior
from vcal_dist import Averaged, Posterior
from vcal_dist.config import Config
from vcal_dist.errors import ModelError
from vcal_dist.inference_data import import_arviz
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.mixed import MEMBERS, MIXTURE
from vcal_dist.posterior import DRAWS_FILE, FILE
from vcal_dist.prediction_kinds import KINDS
from vcal_dist.training import train

Array = NDArray[np.float64]
ROWS = {"runs": 300, "observations": 40}
W = np.array([0.6, 0.3, 0.1])


@pytest.fixture
def members(kit: Any) -> list[Posterior]:
    """One problem under different settings: components, features, discrepancies, families, layers."""
    return [
        posterior(kit, "additive", components=2, features=8),
        posterior(kit, "general", hidden=(2,), seed=8),
        posterior(kit, "none", family="mean_field", free_kappa=True),
    ]


@pytest.fixture
def averaged(members: list[Posterior]) -> Averaged:
    return Averaged(members, np.log(W) + 100)  # not normalised


def with_record(found: Posterior, **record: Any) -> Posterior:
    found.record = {"bound": -10.0, "rows": ROWS} | record
    return found


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_by_evidence_are_a_softmax_of_the_bounds(members: list[Posterior]) -> None:
    bounds = [-98_765.5, -98_764.2, -98_770.0]
    for member, bound in zip(members, bounds, strict=True):
        with_record(member, bound=bound)
    found = Averaged.by_evidence(members)
    odds = [math.exp(bound - bounds[1]) for bound in bounds]
    np.testing.assert_allclose(found.weights, [odd / sum(odds) for odd in odds], rtol=1e-12)
    assert found.record["weights"] == found.weights.tolist()
    assert [record["bound"] for record in found.record["members"]] == bounds
    assert found.problem == members[2].problem


def trained(seed: int = 0, **data: Any) -> dict[str, Any]:
    return {"seed": seed, "output": f"runs/{seed}", "data": {"holdout": 0.05, "holdout_rows": 2000} | data}


MANY = {"runs": 5000, "observations": 40}


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({}, {"bound": None}, r"posterior 1 has the bound None on its evidence, .*'meanfield' have none"),
        ({}, {"bound": math.nan}, "posterior 1 has the bound nan"),
        ({}, {"bound": "-3"}, "posterior 1 has the bound -3"),
        ({"bound": None, "config": trained()}, {}, r"posterior 0 \(runs/0\) has the bound None"),
        ({"rows": MANY, "config": trained()}, {"rows": MANY}, "data.holdout is None, not 0.05"),
        ({}, {"rows": None}, "record of posterior 1 does not say its 'rows'"),
        (
            {},
            {"rows": {"runs": 300, "observations": 41}, "config": trained(4)},
            r"posterior 1 \(runs/4\) was trained on other rows than posterior 0: the number of obs.* is 41, not 40",
        ),
        *(
            ({"rows": MANY, "config": a}, {"rows": MANY, "config": b}, message)
            for message, values in (
                ("data.holdout is 0.1, not 0.05", (trained(), trained(holdout=0.1))),
                ("data.holdout is 0.05, not 0.0", (trained(holdout=0.0), trained())),
                ("data.holdout is 0.0, not 0.05", (trained(), trained(holdout=0.0))),
                ("data.holdout_rows is 7, not 2000", (trained(), trained(holdout_rows=7))),
            )
            for a, b in [values]
        ),
    ],
)
def test_evidence_of_other_data_or_none_is_refused_by_name(kit: Any, one: Any, other: Any, message: str) -> None:
    pair = [with_record(posterior(kit), **one), with_record(posterior(kit, "general"), **other)]
    with pytest.raises(ModelError, match=message):
        Averaged.by_evidence(pair)


@pytest.mark.parametrize(
    "records",
    [
        [{"config": trained(0)}, {"config": trained(1, holdout=0.3)}],  # so few rows are all learnt from
        [{"rows": MANY, "config": trained(seed)} for seed in (0, 1)],  # the same are kept out
        [{"rows": MANY, "config": trained(3) | {"output": name}} for name in ("a", "b")],
    ],
)
def test_the_same_rows_are_known_as_such(kit: Any, records: Any) -> None:
    pair = [with_record(posterior(kit), **record) for record in records]
    np.testing.assert_allclose(Averaged.by_evidence(pair).weights, [0.5, 0.5])


def test_posteriors_of_other_problems_are_refused_by_name(kit: Any) -> None:
    first = posterior(kit)
    for other, message in (
        (posterior(kit, controls=1), "control_inputs differ"),
        (posterior(kit, outputs=2), "outputs differ"),
        (posterior(kit, priors=(LogNormal(mu=0.5, sigma=0.7),) * 2), "calibration_inputs differ"),
    ):
        with pytest.raises(ModelError, match=rf"posterior 2 is of another problem than posterior 0, their {message}"):
            Averaged([first, first, other], [0.0, 0.0, 0.0])
        with pytest.raises(ModelError, match="posterior 1 is of another problem"):
            Averaged.by_evidence([with_record(first), with_record(other)])


@pytest.mark.parametrize(
    ("log_weights", "message"),
    [
        ([0.0], "there are 2 posteriors and 1 log weights"),
        ([0.0, -math.inf], "the log weight of posterior 1 is -inf; leave that posterior out"),
        ([math.nan, 0.0], "the log weight of posterior 0 is nan"),
    ],
)
def test_log_weights_that_weigh_nothing_are_refused(kit: Any, log_weights: list[float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Averaged([posterior(kit)] * 2, log_weights)


def test_an_average_of_nothing_is_refused() -> None:
    for make in (lambda: Averaged([], []), lambda: Averaged.by_evidence([])):
        with pytest.raises(ModelError, match="there are 0 posteriors and 0 log weights"):
            make()


# --- θ ----------------------------------------------------------------------------------------------------------------


def test_the_summary_is_that_of_draws_of_the_members_in_proportion(
    members: list[Posterior], averaged: Averaged
) -> None:
    count = 200_000
    pooled = np.concatenate(
        [m.sample(round(w * count), seed=i) for i, (m, w) in enumerate(zip(members, W, strict=True))]
    )
    draws = averaged.sample(count, seed=9)
    each = [member.summary() for member in members]
    assert len(averaged.theta.log_weights) == 2 + 1 + 1
    for j, row in enumerate(averaged.summary()):
        mean = sum(w * s[j].mean for w, s in zip(W, each, strict=True))
        var = sum(w * (s[j].sd ** 2 + (s[j].mean - mean) ** 2) for w, s in zip(W, each, strict=True))
        assert (row.mean, row.sd) == pytest.approx((mean, math.sqrt(var)))
        for values in (pooled[:, j], draws[:, j]):
            assert abs(values.mean() - row.mean) < 5 * row.sd / math.sqrt(count)
            assert values.std() == pytest.approx(row.sd, rel=0.02)
            for end, probability in ((row.low, 0.05), (row.median, 0.5), (row.high, 0.95)):
                assert np.mean(values < end) == pytest.approx(probability, abs=5 * 0.5 / math.sqrt(count))
    assert averaged.correlation()[0, 1] == pytest.approx(np.corrcoef(pooled.T)[0, 1], abs=0.02)
    assert averaged.summary(0.5)[0].low > averaged.summary(0.9)[0].low
    text = repr(averaged)
    assert "posterior of 'made up': an average of 3, weights 0.6, 0.3, 0.1, 90 % intervals" in text
    assert len(text.splitlines()) == 3


def test_the_density_is_the_weighted_one_of_the_members(members: list[Posterior], averaged: Averaged) -> None:
    theta = torch.from_numpy(averaged.sample(50))
    expected = sum(w * m.theta.log_density(theta).exp() for w, m in zip(W, members, strict=True))
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(averaged.theta.log_density(theta).exp(), expected)


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", KINDS)
def test_mean_and_sd_are_those_of_pooled_samples_and_of_the_closed_formula(
    members: list[Posterior], averaged: Averaged, what: Any
) -> None:
    x, count = inputs(3), 20_000
    found = averaged.predict(x, what, draws=512, seed=3)
    each = [
        member.predict(x, what, draws=512, samples=round(w * count), seed=3)
        for member, w in zip(members, W, strict=True)
    ]
    mean = sum(w * part.mean for w, part in zip(W, each, strict=True))
    square = sum(w * (part.sd**2 + part.mean**2) for w, part in zip(W, each, strict=True))
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.sd, np.sqrt(square - mean**2), rtol=1e-8)
    pooled = np.concatenate([part.samples for part in each if part.samples is not None])
    assert len(pooled) == count
    np.testing.assert_allclose((pooled.mean(0) - found.mean) / found.sd, 0, atol=0.05)
    np.testing.assert_allclose(pooled.std(0) / found.sd, 1, atol=0.05)
    between = sum(w * (part.mean - mean) ** 2 for w, part in zip(W, each, strict=True))
    if what != "observation":
        assert (between > 1e-3 * found.sd**2).any()  # so that what is between the members counts
    assert found.samples is None


@pytest.mark.parametrize("what", KINDS)
def test_samples_have_the_mean_and_sd_that_are_predicted(averaged: Averaged, what: Any) -> None:
    found = averaged.predict(inputs(3), what, draws=512, samples=20_000, seed=5)
    assert found.samples is not None
    assert found.samples.shape == (20_000, 3, 1)
    np.testing.assert_allclose((found.samples.mean(0) - found.mean) / found.sd, 0, atol=0.05)
    np.testing.assert_allclose(found.samples.std(0) / found.sd, 1, atol=0.05)


def test_samples_come_from_members_in_proportion_and_in_mixed_order(kit: Any) -> None:
    """One member predicts about 50, the other a million more: a sample says whose it is."""
    pair = [posterior(kit), posterior(kit)]
    pair[0].scaling.outputs.mean.add_(1e6)
    x = inputs(1)
    for samples in (1, 7, 400):
        drawn = Averaged(pair, np.log([0.3, 0.7])).predict(x, samples=samples, seed=samples).samples
        assert drawn is not None
        first = drawn[:, 0, 0] > 5e5
        assert abs(first.sum() - 0.3 * samples) < 1
        if samples == 400:
            assert 40 < first[:200].sum() < 80  # 60 ± 3 standard deviations
    chosen = [bool((Averaged(pair, [0.0, 0.0]).predict(x, samples=1, seed=s).samples > 5e5).all()) for s in range(20)]  # type: ignore[operator]
    assert len({*chosen}) == 2


def test_a_sample_is_one_function_in_all_blocks_and_calls(averaged: Averaged) -> None:
    x = inputs(9)
    f: Any = "process_without_residual"
    whole = averaged.predict(x, f, samples=11, seed=3)
    assert whole.samples is not None
    parts = [*averaged.predict_batches([x[:4], {"x": x[4:]}], f, samples=11, seed=3)]
    for i, axis in ((0, 0), (1, 0), (2, 1)):
        np.testing.assert_allclose(np.concatenate([part[i] for part in parts], axis), whole[i], rtol=1e-9)  # type: ignore[misc]
    again = averaged.predict(x[[7, 2]], f, samples=11, seed=3).samples
    np.testing.assert_allclose(again, whole.samples[:, [7, 2]], rtol=1e-9)  # type: ignore[arg-type]
    assert not np.isclose(averaged.predict(x, f, samples=11, seed=4).samples, whole.samples).any()  # type: ignore[arg-type]
    # The residual is that of a row's number, whatever the blocks.
    whole = averaged.predict(x, samples=11, seed=3)
    parts = [*averaged.predict_batches([x[:4], {"x": x[4:]}], samples=11, seed=3)]
    np.testing.assert_allclose(np.concatenate([part.samples for part in parts], 1), whole.samples, rtol=1e-9)  # type: ignore[misc, arg-type]


def test_members_bring_their_own_residuals(kit: Any) -> None:
    """Var = E[var] + Var[mean], and so E[κ²σ_z²] is added."""
    pair = [posterior(kit, likelihood_z=LikelihoodSettings(noise=sigma)) for sigma in (0.1, 0.7)]
    averaged = Averaged(pair, np.log([0.25, 0.75]))
    added = (0.25 * 0.1**2 + 0.75 * 0.7**2) * 8**2  # 8 is the output's standard deviation
    for full, part in (("process", "process_without_residual"), ("emulator", "emulator_without_residual")):
        found, alone = (averaged.predict(inputs(), what, samples=4000) for what in (full, part))  # type: ignore[arg-type]
        np.testing.assert_allclose(found.sd**2 - alone.sd**2, added)
        left = found.samples - alone.samples  # type: ignore[operator]
        np.testing.assert_allclose(left.std(0), math.sqrt(added), rtol=0.06)


def test_blocks_are_read_one_at_a_time(averaged: Averaged) -> None:
    read: list[int] = []

    def blocks() -> Any:
        for i in range(3):
            read.append(i)
            yield inputs(2, seed=i)

    predictions = averaged.predict_batches(blocks())
    next(predictions)
    assert read == [0]
    assert len([*predictions]) == 2


@pytest.mark.parametrize("what", KINDS)
def test_one_member_alone_is_itself(members: list[Posterior], what: Any) -> None:
    for member in members:
        alone = Averaged([member], [-7.0])
        found, expected = (p.predict(inputs(), what, samples=6, seed=2) for p in (alone, member))
        for mine, its in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-13)  # type: ignore[arg-type]
        np.testing.assert_allclose(alone.sample(20, seed=1), member.sample(20, seed=1), rtol=1e-12)
        assert [(s.name, s.unit, s.prior) for s in alone.summary()] == [
            (s.name, s.unit, s.prior) for s in member.summary()
        ]
        for row, its_row in zip(alone.summary(), member.summary(), strict=True):
            assert (row.mean, row.sd, row.low, row.high) == pytest.approx(
                (its_row.mean, its_row.sd, its_row.low, its_row.high), rel=1e-12
            )


def test_two_copies_are_one_but_draw_functions_of_their_own(members: list[Posterior]) -> None:
    member = members[0]
    twice = Averaged([member, member], [0.0, 1.0])
    for what in KINDS:
        found, expected = (p.predict(inputs(), what, seed=2) for p in (twice, member))  # type: ignore[arg-type]
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(found.sd, expected.sd, rtol=1e-12)
    for row, its in zip(twice.summary(), member.summary(), strict=True):
        assert (row.mean, row.sd, row.low, row.high) == pytest.approx((its.mean, its.sd, its.low, its.high), rel=1e-12)
    for what in ("process", "observation"):
        samples = twice.predict(inputs(1), what, samples=200).samples  # type: ignore[arg-type]
        assert samples is not None
        assert len(np.unique(samples)) == 200


def test_a_member_of_no_weight_changes_nothing(kit: Any, members: list[Posterior]) -> None:
    infinite = posterior(kit, transform=LOG)
    infinite.scaling.outputs.sd.mul_(1e6)  # e to the power of a million
    assert not np.isfinite(infinite.predict(inputs()).mean).all()
    found = Averaged([members[0], infinite], [0.0, -800.0]).predict(inputs(), samples=50)
    expected = Averaged([members[0]], [0.0]).predict(inputs(), samples=50)
    for mine, its in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, its)  # type: ignore[arg-type]


def test_the_emulator_at_chosen_inputs_and_an_observations_own_noise_reach_the_members(averaged: Averaged) -> None:
    x = inputs()
    at = averaged.predict(x, "emulator", t=[2.0, 3.0], draws=8)
    np.testing.assert_allclose(
        at.mean,
        sum(w * m.predict(x, "emulator", t=[2.0, 3.0], draws=8).mean for w, m in zip(W, averaged.members, strict=True)),
    )
    plain, noisy = (averaged.predict(x, "observation", noise=n) for n in (None, np.full((4, 1), 9.0)))
    np.testing.assert_allclose(noisy.sd**2 - plain.sd**2, 81)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "proces"}, r"what is 'proces'; accepted: process"),
        ({"x": [[5.0, 99.0]]}, r"x: column 'x1': 1 value out of bounds"),
        ({"t": [2.0, 3.0]}, r"t is given for 'process'"),
        ({"samples": -1}, r"samples is -1"),
        ({"samples": 2, "seed": -2}, r"seed is -2"),
        ({"seed": 2**63}, r"seed is 9223372036854775808"),
        ({"draws": 0}, r"the number of draws is 0"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(averaged: Averaged, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        averaged.predict(**{"x": inputs(2), **change})


def test_counts_stay_counts(kit: Any) -> None:
    counts = LikelihoodSettings(kind="poisson")
    options: dict[str, Any] = {"likelihood_y": counts, "likelihood_z": counts, "standardise": False}
    pair = [posterior(kit, "none", **options), posterior(kit, "none", features=4, **options)]
    found = Averaged(pair, [0.0, 0.0]).predict(inputs(), "observation", samples=300, draws=2048)
    assert found.samples is not None
    np.testing.assert_array_equal(found.samples, found.samples.round())
    each = [member.predict(inputs(), "observation", draws=2048) for member in pair]
    np.testing.assert_allclose(found.mean, (each[0].mean + each[1].mean) / 2)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_loaded_average_is_the_same_to_the_last_bit(averaged: Averaged, tmp_path: Path) -> None:
    averaged.save(tmp_path / "averaged")
    for path in (tmp_path / "averaged", tmp_path / "averaged" / MIXTURE):
        loaded = Averaged.load(path)
        for mine, its in zip(everything(loaded), everything(averaged), strict=True):
            np.testing.assert_array_equal(mine, its)
        np.testing.assert_array_equal(loaded.weights, averaged.weights)
        assert loaded.summary() == averaged.summary()
        np.testing.assert_array_equal(loaded.correlation(), averaged.correlation())
    found = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*") if f.is_file())
    own = [f"averaged/{MEMBERS}/{i}/{name}" for i in range(3) for name in (DRAWS_FILE, FILE)]
    assert found == sorted([*own, f"averaged/{MIXTURE}", f"averaged/{DRAWS_FILE}"])
    draws = import_arviz().from_netcdf(tmp_path / "averaged" / DRAWS_FILE)
    np.testing.assert_array_equal(draws.posterior["loss"].values[0], averaged.sample(4000)[:, 1])
    assert isinstance(load_posterior(tmp_path / "averaged"), Averaged)
    member = load_posterior(tmp_path / "averaged" / MEMBERS / "1")
    np.testing.assert_array_equal(member.sample(5), averaged.members[1].sample(5))


def test_inspect_shows_theta_and_the_weights(
    averaged: Averaged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    averaged.save(tmp_path)
    for options in (["--json"], []):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(tmp_path), *options])
        assert not ended.value.code
    shown, _, text = capsys.readouterr().out.partition("\n}\n")
    found = json.loads(shown + "}")
    assert found["weights"] == averaged.weights.tolist()
    assert [row["mean"] for row in found["parameters"]] == [row.mean for row in averaged.summary()]
    assert repr(averaged) in text


def test_weights_are_not_normalised_twice(averaged: Averaged, tmp_path: Path) -> None:
    for log_weights in ([0.0, -i / 10, -i / 7] for i in range(1, 200)):
        found = Averaged(averaged.members, log_weights)
        if not torch.equal(found.log_weights.log_softmax(0), found.log_weights):
            break
    else:
        pytest.fail("no weights whose last bit would change")
    found.save(tmp_path)
    assert torch.equal(Averaged.load(tmp_path).log_weights, found.log_weights)


def test_an_average_takes_the_place_of_another_whole(averaged: Averaged, tmp_path: Path) -> None:
    averaged.save(tmp_path)
    Averaged(averaged.members[:2], [0.0, 0.0]).save(tmp_path)
    assert sorted(f.name for f in (tmp_path / MEMBERS).iterdir()) == ["0", "1"]
    assert Averaged.load(tmp_path).weights.tolist() == [0.5, 0.5]
    averaged.members[1].record = {"no": object()}  # which no file can hold
    with pytest.raises(ModelError, match="object"):
        averaged.save(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .*mixture\.json: No such file"):
        Averaged.load(tmp_path)


def test_an_average_does_not_mix_with_a_run(averaged: Averaged, tmp_path: Path) -> None:
    averaged.members[0].save(tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with pytest.raises(ModelError, match=rf"holds other things \('{FILE}', …\); a mixture needs one of its own"):
        averaged.save(tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
    with pytest.raises(ModelError, match="choose another path"):
        averaged.save(tmp_path / FILE)


@pytest.fixture(scope="module")
def saved(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an average of two."""
    place = tmp_path_factory.mktemp("saved")
    Averaged([posterior(kit), posterior(kit, "general")], [0.0, -1.0]).save(place)
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


def json_with(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


SECOND = f"{MEMBERS}/1/{FILE}"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (MIXTURE, lambda data: data[:-9], "is not a whole JSON file"),
        (MIXTURE, lambda _: b"\xff\x00", "is not a whole JSON file"),
        (MIXTURE, lambda _: b"[" * 100_000, "is not a whole JSON file"),
        (MIXTURE, lambda _: b"[1]", "is a JSON file, but no mixture"),
        (MIXTURE, json_with(format="another"), "is a JSON file, but no mixture"),
        (MIXTURE, json_with(schema=2), "has schema 2; this version of vcal-dist reads schema 1"),
        (MIXTURE, json_with(log_weights=None), "log_weights is None"),
        (MIXTURE, json_with(log_weights=["0.0"]), r"log_weights is \['0.0'\]"),
        (MIXTURE, json_with(log_weights=[True, 0.0]), "log_weights is"),
        (MIXTURE, json_with(log_weights=[math.nan, 0.0]), "not a sound mixture: the log weight of posterior 0 is nan"),
        (MIXTURE, json_with(log_weights=[]), "not a sound mixture: there are 0 posteriors"),
        (MIXTURE, json_with(log_weights=[0.0] * 3), rf"cannot read .*{MEMBERS}/2.*: No such file"),
        (SECOND, lambda data: data[:-1], "is not a whole safetensors file"),
        (SECOND, lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its digest differs"),
    ],
)
def test_damage_is_named(
    saved: dict[str, bytes], tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    for path, data in saved.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(change(data) if path == name else data)
    for load in (Averaged.load, load_posterior):
        with pytest.raises(ModelError, match=message) as caught:
            load(tmp_path)
        assert str(tmp_path) in str(caught.value)


def test_a_member_of_another_problem_is_noticed(kit: Any, averaged: Averaged, tmp_path: Path) -> None:
    averaged.save(tmp_path)
    posterior(kit, outputs=2).save(tmp_path / MEMBERS / "2")
    with pytest.raises(ModelError, match=r"mixture\.json is not a sound mixture: posterior 2 is of another problem"):
        Averaged.load(tmp_path)


# --- from the data to the command line --------------------------------------------------------------------------------


def test_trained_posteriors_are_averaged_and_predict_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    problem = {
        "name": "tiny",
        "control_inputs": [{"name": "depth", "bounds": [0, 1]}],
        "calibration_inputs": [{"name": "k", "bounds": [0, 1]}],
        "outputs": [{"name": "T"}],
    }
    store = storage.create("data.zarr", problem, dtype="float64")
    x, t = rng.random((60, 1)), rng.random((60, 1))
    store.append_runs(x, t, np.sin(4 * x + t))
    x = rng.random((12, 1))
    store.append_observations(x, np.sin(4 * x + 0.4) + 0.1 * x + 0.02 * rng.normal(size=(12, 1)))
    quick = {"emulator": {"steps": 20}, "theta": {"steps": 10}, "joint": {"steps": 3}, "evaluations": 0}
    found = []
    for features in (8, 12):
        small = {"features": {"features": features}}
        settings = {
            "model": {"eta": small, "delta": small},
            "fit": quick,
            "devices": {"accelerator": "cpu", "threads": 1},
        }
        config = Config.parse({"store": "data.zarr", "output": f"runs/{features}", **settings})
        found.append(train(config, progress=False))
    averaged = Averaged.by_evidence([Posterior.load(f"runs/{features}") for features in (8, 12)])
    odds = math.exp(found[0].record["bound"] - found[1].record["bound"])
    np.testing.assert_allclose(averaged.weights, [odds / (1 + odds), 1 / (1 + odds)], atol=1e-12)
    averaged.save("runs/averaged")
    Path("at.csv").write_text("depth\n0.25\n0.75\n", encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["predict", "runs/averaged", "--at", "at.csv", "--samples", "2", "-o", "out.csv"])
    assert not end.value.code
    with Path("out.csv").open(encoding="utf-8", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    expected = averaged.predict([0.25, 0.75], samples=1000)
    assert expected.samples is not None
    for i, row in enumerate(rows):
        assert row["T_mean"] == expected.mean[i, 0]
        assert row["T_sd"] == expected.sd[i, 0]
        assert [row["T_sample_0"], row["T_sample_1"]] == expected.samples[:2, i, 0].tolist()
        assert np.mean(expected.samples[:, i, 0] <= row["T_q95"]) == pytest.approx(0.95, abs=0.0011)
