"""The section `sweep`: what may be tried, under which conditions, and what is refused before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.config import load as load_config
from jobs.ray_cluster import Capacity
from jobs.sweeps.resources import share
from jobs.sweeps.search import propose
from jobs.sweeps.settings import Sweep, load
from jobs.sweeps.trial import Rung, Trial
from vcal_dist.errors import ConfigError
from vcal_dist.plan import MEANFIELD

CONFIGS = Path(str(files("jobs") / "configs"))
FAMILIES = {"fit.weights": {"choice": ["collapsed", "fullrank", "meanfield"]}}
RATE = {"fit.emulator.rate": {"loguniform": [0.001, 0.1]}}


def sweep(space: dict[str, Any], settings: dict[str, Any] | None = None, **sections: Any) -> Sweep:
    return Sweep.parse({"store": "s", "output": "o", "sweep": {"space": space, **(settings or {})}, **sections})


def refusal(space: dict[str, Any], settings: dict[str, Any] | None = None, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        sweep(space, settings, **sections)
    return str(caught.value)


def proposals(tried: Sweep, count: int = 200) -> Sequence[dict[str, Any]]:
    return [propose(tried, number, []) for number in range(count)]


# --- the section ----------------------------------------------------------------------------------------------------


def test_train_leaves_the_section_aside_and_sweep_reads_it() -> None:
    path = CONFIGS / "sweep.yaml"
    assert load(path).config == load_config(path)
    assert load(path, ["sweep.trials=8", "fit.starts=2"]).settings.trials == 8
    assert load(path, ["sweep.trials=8", "fit.starts=2"]).config.fit.starts == 2


@pytest.mark.parametrize("name", ["sweep.yaml", "borehole.yaml"])
def test_a_sweep_written_out_reads_back_equal(name: str) -> None:
    found = load(CONFIGS / name)
    again = Sweep.parse(yaml.safe_load(yaml.safe_dump(found.plain())))
    assert again == found
    assert Path(found.plain()["output"]).is_absolute()


def test_without_a_space_what_users_guess_is_tried_around_the_configuration() -> None:
    keys = set(sweep({}).space.dimensions)
    guessed = {f"model.{name}.{what}" for name in ("eta", "delta") for what in ("lengthscale", "amplitude")}
    guessed |= {"model.likelihood_z.noise", "model.likelihood_y.noise", "fit.spread", "model.eta.features.features"}
    assert guessed | {f"fit.{stage}.rate" for stage in ("emulator", "theta", "joint")} <= keys
    other = set(sweep({}, model={"discrepancy": "none"}, fit={"weights": "meanfield"}).space.dimensions)
    assert {f"fit.{stage}.rate" for stage in MEANFIELD} <= other
    assert not any(key.startswith(("model.delta", "fit.theta", "fit.discrepancy_rate")) for key in other)


def test_without_a_space_what_is_known_is_not_guessed_at() -> None:
    known = {"eta": {"lengthscale": 0.4, "learn": False}, "likelihood_z": {"noise": 0.02, "learn_noise": False}}
    keys = set(sweep({}, model=known).space.dimensions)
    assert not keys & {"model.eta.lengthscale", "model.eta.amplitude", "model.likelihood_z.noise"}
    assert {"model.delta.lengthscale", "model.delta.amplitude", "model.likelihood_y.noise"} <= keys


def test_the_example_reaches_all_that_the_papers_users_have_to_guess() -> None:
    keys = set(load(CONFIGS / "sweep.yaml").space.dimensions)
    assert {"fit.start.rw", "fit.start.r", "fit.start.Tl", "fit.spread", "fit.weights", "fit.everything.rate"} <= keys
    assert {"fit.emulator.batch_runs", "fit.theta.batch_observations", "model.eta.features.features"} <= keys


def test_an_override_reaches_one_dimension() -> None:
    path = CONFIGS / "sweep.yaml"
    found = load(path, ["sweep.space.fit.spread={uniform: [0.1, 0.2]}"]).space.dimensions
    assert found["fit.spread"].uniform == (0.1, 0.2)
    assert found.keys() == load(path).space.dimensions.keys()


# --- conditions -----------------------------------------------------------------------------------------------------


def test_a_conditional_setting_is_tried_exactly_where_its_condition_holds() -> None:
    space = {
        "fit.everything.rate": {"loguniform": [0.001, 0.1], "when": {"fit.weights": "meanfield"}},
        "fit.theta.rate": {"uniform": [0.01, 0.1], "when": {"fit.weights": ["collapsed", "fullrank"]}},
        "fit.rho": {"uniform": [0.1, 0.5], "when": {"fit.weights": "fullrank", "fit.starts": 3}},
        **FAMILIES,
    }
    found = proposals(sweep(space))
    assert {values["fit.weights"] for values in found} == {"collapsed", "fullrank", "meanfield"}
    for values in found:
        assert ("fit.everything.rate" in values) == (values["fit.weights"] == "meanfield")
        assert ("fit.theta.rate" in values) == (values["fit.weights"] != "meanfield")
        assert ("fit.rho" in values) == (values["fit.weights"] == "fullrank")
    assert not any("fit.rho" in values for values in proposals(sweep(space, fit={"starts": 2})))


def test_stages_of_the_configuration_that_a_family_does_not_have_are_left_out() -> None:
    tried = sweep(FAMILIES, fit={"theta": {"steps": 7}, "emulator": {"steps": 9}})
    assert tried.configured({"fit.weights": "fullrank"}).fit.theta.steps == 7
    paper = tried.configured({"fit.weights": "meanfield"}).fit
    assert (paper.theta.steps, paper.emulator.steps) == (None, 9)


def test_draws_stay_in_their_ranges_and_reach_all_of_them() -> None:
    space = {
        "fit.rho": {"uniform": [0.2, 0.4]},
        "model.eta.lengthscale": {"loguniform": [0.01, 1.0]},
        "model.eta.features.features": {"int": [10, 16], "step": 2},
        "model.eta.hidden": {"choice": [[], [4], [4, 4]]},
    }
    found = proposals(sweep(space))
    scales = [values["model.eta.lengthscale"] for values in found]
    assert 0.01 <= min(scales) < 0.02 < 0.5 < max(scales) <= 1.0
    assert 0.35 < sum(scale < 0.1 for scale in scales) / len(scales) < 0.65  # half of them below the geometric mean
    assert {values["model.eta.features.features"] for values in found} == {10, 12, 14, 16}
    assert {tuple(values["model.eta.hidden"]) for values in found} == {(), (4,), (4, 4)}
    assert 0.2 <= min(v["fit.rho"] for v in found) < max(v["fit.rho"] for v in found) <= 0.4


def test_random_trials_do_not_depend_on_each_other_and_differ() -> None:
    tried = sweep(RATE)
    before = [Trial(0, {"fit.emulator.rate": 0.05}, "done", rungs=(Rung(2, 9, 1.0, 1.0),))]
    assert propose(tried, 5, before) == propose(tried, 5, [])
    assert len({values["fit.emulator.rate"] for values in proposals(tried, 50)}) == 50
    assert propose(sweep(RATE, {"seed": 1}), 5, []) != propose(tried, 5, [])


def test_the_guided_search_goes_where_earlier_trials_were_good() -> None:
    space = {
        **FAMILIES,
        "fit.emulator.rate": {"loguniform": [1e-4, 1.0]},
        "fit.everything.rate": {"loguniform": [0.001, 0.1], "when": {"fit.weights": "meanfield"}},
    }
    tried = sweep(space, {"search": "optuna", "trials": 200})
    known: list[Trial] = []
    for number in range(120):
        values = propose(tried, number, known)
        far = abs(math.log10(values["fit.emulator.rate"]) + 1)  # best at 0.1
        if far > 2.5:
            known.append(Trial(number, values, "failed", "diverged"))
            continue
        state = "stopped" if far > 1 else "done"
        climbed = range(1 if far > 1 else 3)
        known.append(Trial(number, values, state, rungs=tuple(Rung(k, 3**k, -far, 1.0) for k in climbed)))
    known.append(Trial(120, propose(tried, 120, known)))  # still running
    later = [trial.settings["fit.emulator.rate"] for trial in known[60:120]]
    assert sum(0.03 < rate < 0.3 for rate in later) > 30  # by chance a quarter: 15
    assert propose(tried, 121, known) == propose(tried, 121, known)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"fit.emulater.rate": {"uniform": [1, 2]}}, "fit.emulater: unknown key (did you mean 'emulator'?)"),
        ({"fit.emulator.rate": {"uniform": [-1, 2]}}, "fit.emulator.rate: rate is -1.0; accepted: a positive number"),
        ({"fit.rho": {"uniform": [0.5, 1.5]}}, "sweep.space.fit.rho: the value 1.5 does not go into"),
        ({"fit.starts": {"uniform": [1, 3]}}, "a whole number"),
        ({"model.eta.features.features": {"int": [10, 20]}}, "the value 11 does not go into the configuration"),
        ({"model.eta.features.features": {"int": [10, 21], "step": 2}}, "step is 2, which does not lead from 10 to 21"),
        ({"fit.rho": {"uniform": [0.1, 0.2], "choice": [0.1]}}, "needs one of uniform, loguniform, int, choice; got"),
        ({"fit.rho": {}}, "needs one of uniform, loguniform, int, choice; got none"),
        ({"fit.rho": {"uniform": [0.2, 0.1]}}, "the first below the second"),
        ({"fit.rho": {"loguniform": [0.0, 0.1]}}, "sweep.space.fit.rho.loguniform[0]"),
        ({"fit.rho": {"chioce": [0.1]}}, "unknown key (did you mean 'choice'?)"),
        ({"fit.rho": {"choice": [0.1, 0.1]}}, "where a value stands twice"),
        ({"store": {"choice": ["a", "b"]}}, "sweep.space.store: trials with other values of it cannot be compared"),
        ({"data.holdout": {"uniform": [0.1, 0.2]}}, "cannot be compared"),
        ({"devices.precision": {"choice": ["float32"]}}, "cannot be compared"),
        ({"fit": {"choice": [{"rho": 0.1}]}, "fit.rho": {"uniform": [0.1, 0.2]}}, "fit.rho, which is inside it"),
        ({"fit.rho": {"uniform": [0.1, 0.2], "when": {"fit.wieghts": "x"}}}, "(did you mean 'fit.weights'?)"),
        ({"fit.rho": {"uniform": [0.1, 0.2], "when": {"fit.weights": "x"}}, **FAMILIES}, "none of its choices"),
        ({"fit.rho": {"uniform": [0.1, 0.2], "when": {"fit.emulator.rate": 1}}, **RATE}, "a condition needs a choice"),
        (
            {
                "fit.rho": {"choice": [0.1], "when": {"fit.starts": 2}},
                "fit.starts": {"choice": [2], "when": {"fit.rho": 0.1}},
            },
            "conditions go in a circle: fit.rho → fit.starts → fit.rho",
        ),
        (
            {"fit.theta.rate": {"uniform": [0.1, 0.2]}, **FAMILIES},
            "weights_and_theta, everything\nAdd e.g. `when: {fit.weights: collapsed}`",
        ),
    ],
)
def test_a_mistake_in_the_space_is_told_with_its_key(space: dict[str, Any], told: str) -> None:
    assert told in refusal(space)


def test_mistakes_in_the_section_are_told_with_their_keys() -> None:
    assert "sweep.trails: unknown key (did you mean 'trials'?)" in refusal(RATE, {"trails": 3})
    assert "sweep.trials: got 0; accepted: 1 or more" in refusal(RATE, {"trials": 0})
    assert "sweep.scheduler: got 'hyperband'; accepted: asha, none" in refusal(RATE, {"scheduler": "hyperband"})
    assert "'pbt', which exchanges rates in the middle of training" in refusal(RATE, {"scheduler": "pbt"})
    assert "a sweep needs a directory that all nodes see" in refusal(RATE, output="s3://bucket/sweep")


def test_bounds_are_not_asked_of_those_that_have_none() -> None:
    assert "'meanfield' have no bound over all rows, which sweep.metric=bound needs" in refusal(
        FAMILIES, {"metric": "bound"}
    )
    assert "which sweep.mixture needs" in refusal(FAMILIES, {"mixture": 2})
    kinds = {"transforms.flow.kind": {"choice": ["none", "log"]}}
    assert sweep(kinds, {"metric": "bound"}).settings.metric == "bound"  # it counts in the units of the user


# --- rungs and resources --------------------------------------------------------------------------------------------


def test_rungs_shorten_every_stage_and_the_last_is_the_configuration_itself() -> None:
    fit = {"emulator": {"steps": 20}, "theta": {"epochs": 3.0}, "joint": {"steps": 0}}
    tried = sweep(RATE, fit=fit)
    values = {"fit.emulator.rate": 0.01}
    stages = [tried.configured(values, rung).fit for rung in tried.rungs]
    assert [fit.emulator.steps for fit in stages] == [2, 6, 20]
    assert [fit.theta.epochs for fit in stages] == [3.0 / 9, 1.0, 3.0]
    assert [fit.joint.steps for fit in stages] == [0, 0, 0]
    assert [tried.budget(rung) for rung in tried.rungs] == [1, 3, 9]
    assert stages[-1] == tried.configured(values).fit
    default = sweep(RATE, {"reduction": 2000, "rungs": 2})
    assert default.configured(values, 0).fit.emulator.steps == 1
    assert list(sweep(RATE, {"scheduler": "none"}).rungs) == [2]


def test_the_cluster_is_full_and_never_asked_for_more() -> None:
    two, large = Capacity([(2.0, 0.0)], []), Capacity([(8.0, 2.0), (8.0, 2.0)], [])
    assert share(sweep(RATE), two, 8)[:] == (1, 1, 0.0, 2)
    assert share(sweep(RATE), two, 1)[:] == (1, 2, 0.0, 1)
    assert share(sweep(RATE), large, 16)[:] == (1, 4, 1.0, 4)
    assert share(sweep(RATE, {"gpus": 0.5}), large, 16)[:] == (1, 2, 0.5, 8)
    assert share(sweep(RATE, devices={"accelerator": "cpu"}), large, 16)[:] == (1, 1, 0.0, 16)
    assert share(sweep(RATE, {"workers": 2}), two, 8)[:] == (2, 1, 0.0, 1)
    assert share(sweep(RATE, {"workers": 2}), large, 8)[:] == (2, 4, 1.0, 2)
    for asked in ({"cpus": 3}, {"gpus": 1.0}, {"workers": 3}):
        with pytest.raises(ConfigError, match=r"a trial asks for .* has 2 CPU and 0 GPU, room for"):
            share(sweep(RATE, asked), two, 8)
