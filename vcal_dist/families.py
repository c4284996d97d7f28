"""Families of weights as tensors and plain values, and back."""

from __future__ import annotations

from typing import Any

from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, FullRank, factorise
from vcal_dist.weights import MeanField, Weights


def to_state(q: Weights) -> dict[str, Any]:
    """The family's name, its shape and its tensors."""
    assert isinstance(q, FullRank | MeanField)
    shape = [q.theta_dim, q.outputs, q.width]
    if isinstance(q, FullRank):
        return {"family": "fullrank", "shape": shape, "absorbed": q.absorbed, "tensors": dict(q.state_dict())}
    return {"family": "meanfield", "shape": shape, "tensors": dict(q.state_dict())}


def from_state(state: dict[str, Any]) -> Weights:
    """The family of a state, on the device of its tensors."""
    tensors, (theta, outputs, width) = state["tensors"], state["shape"]
    if tensors["theta_mean"].shape != (theta,) or tensors["mean"].shape != (outputs, width):
        raise ModelError(f"a q(θ̃, w) of the shape {[theta, outputs, width]} has a mean {tuple(tensors['mean'].shape)}")
    q: FullRank | MeanField
    if state["family"] == "fullrank":
        if not isinstance(state["absorbed"], bool):
            raise ModelError(f"absorbed is {state['absorbed']!r}; accepted: true, false")
        if factorise(Arrow(*(tensors[f"precision_{part}"] for part in Arrow._fields))) is None:
            raise ModelError("the precision of q(θ̃, w) is not positive definite")
        q = FullRank(*state["shape"], absorbed=state["absorbed"], device=tensors["mean"].device)
    elif state["family"] == "meanfield":
        q = MeanField(*state["shape"], dtype=tensors["mean"].dtype).to(tensors["mean"].device)
    else:
        raise ModelError(f"a q(θ̃, w) is of the family '{state['family']}'; accepted: fullrank, meanfield")
    q.load_state_dict(tensors)
    return q
