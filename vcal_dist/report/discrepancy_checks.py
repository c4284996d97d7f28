"""Checks of θ against the discrepancy: whether they can be told apart, and what was assumed of the latter."""

from __future__ import annotations

from collections.abc import Mapping

from vcal_dist.fullrank import FullRank
from vcal_dist.identifiability import shared_with_discrepancy, variance_inflation
from vcal_dist.nature import LENGTHSCALES
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.parameters import learned
from vcal_dist.report.words import figure, listed, percent

PARTLY, HARDLY = 5.0, 10.0  # variance inflation factors: the discrepancy goes with 80 % and 90 % of the variance
SENSITIVE = 0.05
SHARED_THRESHOLD = (
    f"a variance inflation factor of {PARTLY:g} (partly confounded) and {HARDLY:g} (not identifiable separately), the "
    "rules of thumb of regression (O'Brien 2007), of a parameter that was not learned; one that was is known in spite "
    "of the discrepancy"
)
SENSITIVITY_THRESHOLD = f"a power-scaling sensitivity of {SENSITIVE:g} (Kallioinen, Paananen, Bürkner and Vehtari 2023)"


def theta_and_discrepancy(gathered: Gathered) -> list[Check]:
    """Can parameters be told apart from the discrepancy (Kennedy and O'Hagan 2001, Brynjarsdóttir and O'Hagan 2014)?

    With many observations the discrepancy is nearly all that is left uncertain of any parameter (of the borehole's rw,
    known to a thousandth of its range, 98 %): that alone is no harm. It is where the parameter was not learned.

    Nothing is said where there is no δ, where q takes θ̃ and δ to be independent (meanfield), and where g warps η, so
    that no δ stands apart from it.
    """
    member = gathered.member
    components = [q for q in member.components if isinstance(q, FullRank)]
    if member.model.kind != "additive" or len(components) < len(member.components):
        return []
    share = shared_with_discrepancy(components, member.log_weights, member.model.columns_eta)
    known = {row.name: row.kind == "learned" for row in learned(member)}
    shares = dict(zip(known, share.tolist(), strict=True))
    factors = dict(zip(known, variance_inflation(share).tolist(), strict=True))
    groups: dict[str, list[str]] = {"apart": [], "learned": [], "partly": [], "hardly": []}
    for name, factor in factors.items():
        if factor <= PARTLY:
            groups["apart"].append(name)
        elif known[name]:
            groups["learned"].append(name)
        else:
            groups["partly" if factor <= HARDLY else "hardly"].append(name)

    def told(group: str) -> str:
        return listed([f"{name} ({percent(shares[name])})" for name in groups[group]], most=6)

    parts = []
    if groups["hardly"]:
        parts.append(f"Not identifiable separately from the discrepancy, which can do the same: {told('hardly')}.")
    if groups["partly"]:
        parts.append(f"Partly confounded with the discrepancy: {told('partly')}.")
    if groups["learned"]:
        parts.append(
            f"Learned in spite of the discrepancy, which is most of what is left uncertain: {told('learned')}."
        )
    if parts:
        parts.append("In brackets, the share of the variance that would go if the discrepancy were known.")
    if groups["apart"]:
        parts.append(f"Not confounded with the discrepancy: {listed(groups['apart'])}.")
    advice = (
        "Say what is known of the discrepancy (model.delta.amplitude, model.delta.lengthscale, or model.delta.learn="
        "false with both), observe under conditions in which parameter and discrepancy act differently, or fix the "
        "parameter. Predictions where there are observations need only the sum of both."
        if groups["hardly"] or groups["partly"]
        else ""
    )
    status: Status = "care" if advice else "good"
    most = max(factors.values())
    value = f"VIF {figure(most, 2)}"
    return [Check("θ and discrepancy", status, value, " ".join(parts), advice, most, SHARED_THRESHOLD, factors)]


def sensitivity_to_discrepancy(gathered: Gathered) -> list[Check]:
    """Would the answer be another one if something else had been assumed of the discrepancy?"""
    found: Mapping[str, float] | None = (gathered.record.get("theta") or {}).get("sensitivity")
    if not found:
        return []
    moved = {name: value for name, value in found.items() if value > SENSITIVE}
    most = max(found.values())
    sentence = "No parameter's posterior moves much when more or less is made of the discrepancy's prior."
    advice = ""
    if moved:
        names = listed([f"{name} ({figure(value, 2)})" for name, value in moved.items()], most=6)
        sentence = f"The answer for {names} depends on what is assumed of the discrepancy."
        advice = (
            "Say why the discrepancy should be as large and as smooth as model.delta says (amplitude, lengthscale, "
            "spread), or calibrate with other values too and quote both answers."
        )
    if LENGTHSCALES in (gathered.record["theta"].get("as_points") or []):
        sentence += " That is the prior of its amplitude: length scales are taken as training found them."
    status: Status = "care" if moved else "good"
    value = f"at most {figure(most, 2)}"
    return [Check("Prior of the discrepancy", status, value, sentence, advice, most, SENSITIVITY_THRESHOLD, found)]
