"""Whether to trust a calibration: checks in plain words, each with a threshold that is written beside it.

A check looks at one thing and says `good`, `care` or `bad`, in a sentence, with advice where it is not good. More of
them go into `CHECKS`. The verdict is that of the worst one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vcal_dist.report.check import RANK, Check
from vcal_dist.report.content import Status
from vcal_dist.report.design_checks import design_of_the_runs
from vcal_dist.report.discrepancy_checks import sensitivity_to_discrepancy, theta_and_discrepancy
from vcal_dist.report.emulator_checks import emulator_error, emulator_error_in_theta
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.outlier_check import outliers
from vcal_dist.report.row_checks import coverage_of_observations, coverage_of_runs, left_out, pit_uniformity
from vcal_dist.report.theta_checks import at_bound, contraction, correlations, prior_conflict, several_modes
from vcal_dist.report.training_checks import settled, state_of_the_run
from vcal_dist.report.way_checks import how_theta_was_found, importance_weights, starts_agree

Look = Callable[[Gathered], list[Check]]
CHECKS: tuple[Look, ...] = (
    coverage_of_observations,
    pit_uniformity,
    outliers,
    design_of_the_runs,
    emulator_error,
    emulator_error_in_theta,
    coverage_of_runs,
    left_out,
    how_theta_was_found,
    importance_weights,
    starts_agree,
    contraction,
    prior_conflict,
    at_bound,
    several_modes,
    correlations,
    theta_and_discrepancy,
    sensitivity_to_discrepancy,
    settled,
    state_of_the_run,
)


@dataclass(frozen=True)
class Verdict:
    """All checks, and the worst of them."""

    status: Status
    checks: list[Check]

    @property
    def reasons(self) -> list[Check]:
        """The checks that are not good, the worst first."""
        found = [check for check in self.checks if check.status != "good"]
        return sorted(found, key=lambda check: -RANK[check.status])


def diagnose(gathered: Gathered) -> Verdict:
    """Every check that the run allows."""
    checks = [check for look in CHECKS for check in look(gathered)]
    return Verdict(max((check.status for check in checks), key=RANK.__getitem__, default="care"), checks)
