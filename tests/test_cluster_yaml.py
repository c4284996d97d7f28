"""The cluster file is one that this version of Ray accepts, and agrees with the pinned versions."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml


@pytest.fixture(scope="module")
def cluster(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "cluster.yaml").read_text(encoding="utf-8"))


def test_matches_rays_schema(cluster: dict[str, Any]) -> None:
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema does refuse what it does not know
        jsonschema.validate({**cluster, "max_worker": 1}, schema)


def test_ray_accepts_it_with_its_defaults_filled_in(cluster: dict[str, Any]) -> None:
    # What `ray up` does before it first asks AWS for anything.
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(cluster)
    validate_config(prepared)
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


def test_every_mounted_path_exists_and_is_what_the_install_needs(cluster: dict[str, Any], root: Path) -> None:
    mounts = cluster["file_mounts"]
    assert all((root / local).exists() for local in mounts.values())
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    assert set(mounts) == {f"~/vcal-dist/{name}" for name in packages | files}


def test_the_head_does_no_work_and_workers_have_gpus(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    assert types[cluster["head_node_type"]]["resources"]["CPU"] == 0
    workers = [item for name, item in types.items() if name != cluster["head_node_type"]]
    assert all(item["resources"]["GPU"] >= 1 for item in workers)
    assert max(item["max_workers"] for item in workers) <= cluster["max_workers"]


def test_images_hold_the_pinned_ray(cluster: dict[str, Any], root: Path) -> None:
    pinned = re.search(r"^ray==(\S+)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    for key in ("image", "head_image"):
        assert cluster["docker"][key].split(":")[1].split("-")[0] == pinned[1]
