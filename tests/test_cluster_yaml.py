"""The cluster files, for AWS and for machines of one's own: this Ray accepts them, and versions are the pinned."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

TOKEN = "~/.ray/auth_token"  # where Ray looks for it, here and there


@pytest.fixture(scope="module")
def cloud(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "cluster.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lab(root: Path) -> dict[str, Any]:
    """The one in the documentation."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (root / "docs/clusters.md").read_text(encoding="utf-8"), re.M | re.S)
    [block] = [block for block in blocks if block.startswith("cluster_name: vcal-lab")]
    return yaml.safe_load(block)


@pytest.fixture(params=["cloud", "lab"])
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def test_matches_rays_schema(cluster: dict[str, Any]) -> None:
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema does refuse what it does not know
        jsonschema.validate({**cluster, "max_worker": 1}, schema)


def test_ray_accepts_it_with_its_defaults_filled_in(cluster: dict[str, Any]) -> None:
    # What `ray up` does before it first asks AWS, or a machine, for anything.
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(cluster)
    validate_config(prepared)
    workers = {name: kind["max_workers"] for name, kind in prepared["available_node_types"].items()}
    if cluster["provider"]["type"] == "local":
        assert sum(workers.values()) == prepared["max_workers"] == len(cluster["provider"]["worker_ips"])
    else:
        assert workers["head"] == 0


def test_every_mounted_path_exists_and_is_what_the_install_needs(cluster: dict[str, Any], root: Path) -> None:
    mounts = {target: local for target, local in cluster["file_mounts"].items() if target != TOKEN}
    assert all((root / local).exists() for local in mounts.values())
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.partition(".")[0] for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    assert set(mounts) == {f"~/vcal-dist/{name}" for name in packages | files}
    assert "cd ~/vcal-dist && python -m pip install -c constraints.txt -e ." in cluster["setup_commands"]


def test_the_head_does_no_work_and_workers_have_gpus(cloud: dict[str, Any], lab: dict[str, Any]) -> None:
    types = cloud["available_node_types"]
    assert types[cloud["head_node_type"]]["resources"]["CPU"] == 0
    workers = [item for name, item in types.items() if name != cloud["head_node_type"]]
    assert all(item["resources"]["GPU"] >= 1 for item in workers)
    assert max(item["max_workers"] for item in workers) <= cloud["max_workers"]
    assert "--num-cpus=0" in lab["head_start_ray_commands"][-1]
    assert "--num-cpus" not in lab["worker_start_ray_commands"][-1]


def test_all_nodes_have_an_image_with_a_driver_and_may_read_the_store(cloud: dict[str, Any]) -> None:
    nodes = [item["node_config"] for item in cloud["available_node_types"].values()]
    assert len(nodes) == 2
    for node in nodes:
        # Ray's own choices are an image of Ubuntu 18.04, and a role for the head alone.
        assert node["ImageId"].startswith("ami-")
        assert node["IamInstanceProfile"]


def test_nobody_joins_the_cluster_without_its_token(cluster: dict[str, Any]) -> None:
    assert cluster["file_mounts"][TOKEN] == TOKEN
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        [start] = [command for command in commands if "ray start" in command]
        assert start.index("export RAY_AUTH_MODE=token;") < start.index("ray start")


def test_processes_get_threads_for_their_cpus(cluster: dict[str, Any]) -> None:
    import inspect

    from ray.autoscaler._private import command_runner

    assert "OMP_NUM_THREADS=1" in inspect.getsource(command_runner)  # else the commands need not undo it
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        [start] = [command for command in commands if "ray start" in command]
        assert start.startswith("unset OMP_NUM_THREADS;")


def test_images_hold_the_pinned_ray(cluster: dict[str, Any], root: Path) -> None:
    pinned = re.search(r"^ray==(\S+)$", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    images = [image for key, image in cluster["docker"].items() if key.endswith("image")]
    assert images
    for image in images:
        assert image.split(":")[1].split("-")[:2] == [pinned[1], "py311"]
