"""`vcal submit kubernetes`: what would be sent is what Kubernetes, KubeRay and the shells on the way understand."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jobs.cli import main
from jobs.config import load
from jobs.submission.kubernetes import Pods, documents, dump, entrypoint, job_name, unseen
from jobs.submission.request import Request, request
from vcal_dist.errors import ConfigError

KUBERNETES = "1.37"
ODD = "/data/a b'c\"d$(touch x)`touch y`;&|>z\n\t\\ ü😀 #: {e}"

# Fields that KubeRay 1.5.1 and all later versions know, from the types that its CRD ray.io_rayjobs.yaml is made of:
# https://github.com/ray-project/kuberay/tree/master/ray-operator/apis/ray/v1 (rayjob_types.go, raycluster_types.go).
# Each with the ones that must be there.
RAY_JOB_SPEC = (
    {
        "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "entrypoint", "entrypointNumCpus",
        "entrypointNumGpus", "entrypointResources", "jobId", "metadata", "rayClusterSpec", "runtimeEnvYAML",
        "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
        "ttlSecondsAfterFinished",
    },
    set[str](),
)  # fmt: skip
RAY_CLUSTER_SPEC = (
    {
        "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "headGroupSpec", "headServiceAnnotations",
        "rayVersion", "suspend", "workerGroupSpecs",
    },
    {"headGroupSpec"},
)  # fmt: skip
HEAD_GROUP_SPEC = (
    {"enableIngress", "headService", "rayStartParams", "serviceType", "template"},
    {"rayStartParams", "template"},
)
WORKER_GROUP_SPEC = (
    {
        "groupName",
        "maxReplicas",
        "minReplicas",
        "numOfHosts",
        "rayStartParams",
        "replicas",
        "scaleStrategy",
        "template",
    },
    {"groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"},
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text("store: s3://bucket/store.zarr\noutput: s3://bucket/runs/Try 1\n", encoding="utf-8")
    return str(path)


def rendered(asked: Request, pods: Pods | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob as a reader of the YAML sees them."""
    sent = documents(asked, pods or Pods("vcal:1"))
    config_map, job = yaml.safe_load_all(dump(*sent))
    assert [config_map, job] == sent
    return config_map, job


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    [only] = group["template"]["spec"]["containers"]
    return only


def vcal(*arguments: str) -> int:
    """Run `vcal` in this process and return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


FULL = Pods("example.com/vcal:1", "mine", "lab", 2, 4, 8, "64Gi", "results:/data", "s3-keys")


@pytest.mark.parametrize("pods", [Pods("vcal:1"), FULL], ids=["least", "everything"])
def test_kubernetes_accepts_the_pods_and_the_configuration(config: str, pods: Pods) -> None:
    config_map, job = rendered(request(["train", config]), pods)
    kubernetes_validate.validate(config_map, KUBERNETES, strict=True)
    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        for group in groups(job)
    ]
    for template in templates:
        kubernetes_validate.validate(template, KUBERNETES, strict=True)
    wrong = copy.deepcopy(templates[0])
    wrong["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):  # the schema does refuse what it does not know
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_the_job_has_only_fields_that_kuberay_knows(config: str) -> None:
    _, job = rendered(request(["train", config, "--workers", "2:4"]), FULL)
    assert (job["apiVersion"], job["kind"], set(job)) == (
        "ray.io/v1",
        "RayJob",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    cluster = job["spec"]["rayClusterSpec"]
    head, worker = groups(job)
    for found, (known, required) in (
        (job["spec"], RAY_JOB_SPEC),
        (cluster, RAY_CLUSTER_SPEC),
        (head, HEAD_GROUP_SPEC),
        (worker, WORKER_GROUP_SPEC),
    ):
        assert required <= set(found) <= known
    for group in (head, worker):  # `ray start` takes texts
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_cluster_ends_with_the_job_and_its_head_does_no_work(config: str) -> None:
    _, job = rendered(request(["train", config]))
    spec, (head, worker) = job["spec"], groups(job)
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] > 0
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "num-cpus" not in worker["rayStartParams"]
    import ray

    assert spec["rayClusterSpec"]["rayVersion"] == ray.__version__


def test_every_mount_has_its_volume_and_shared_memory_is_in_memory(config: str) -> None:
    config_map, job = rendered(request(["train", config]), FULL)
    for group in groups(job):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(group)["volumeMounts"]}
        assert len(mounts) == len(volumes)
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert mounts["/data"]["persistentVolumeClaim"] == {"claimName": "results"}
        assert container(group)["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
        assert container(group)["image"] == "example.com/vcal:1"
    head = groups(job)[0]
    [mount] = [mount for mount in container(head)["volumeMounts"] if mount["mountPath"] == "/etc/vcal"]
    [volume] = [volume for volume in head["template"]["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert mount["readOnly"] is True
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert f"/etc/vcal/{next(iter(config_map['data']))}" in shlex.split(job["spec"]["entrypoint"])
    assert {config_map["metadata"]["namespace"], job["metadata"]["namespace"]} == {"lab"}


def test_the_size_of_workers_is_what_was_asked(config: str) -> None:
    _, job = rendered(request(["train", config]), FULL)
    size = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container(groups(job)[1])["resources"] == {"limits": size, "requests": size}
    _, job = rendered(request(["train", config]))
    assert "nvidia.com/gpu" not in container(groups(job)[1])["resources"]["limits"]


@pytest.mark.parametrize(
    ("pods", "options", "processes", "replicas"),
    [
        ({}, [], "1", (1, 1)),
        ({"workers": 3}, [], "3", (3, 3)),
        ({"workers": 2, "gpus": 4}, [], "8", (2, 2)),  # one process a GPU
        ({}, ["--workers", "3"], "3", (3, 3)),
        ({"gpus": 4}, ["--workers", "6"], "6", (2, 2)),
        ({"workers": 2}, ["--workers", "5"], "5", (2, 2)),  # several on the CPUs of one worker
        ({}, ["--workers", "2:5"], "2:5", (2, 5)),
        ({"gpus": 2}, ["--workers", "2:5"], "2:5", (1, 3)),
        ({"workers": 4}, ["--workers", "2:5"], "2:5", (4, 4)),
    ],
)
def test_workers_and_processes_follow_each_other(
    config: str, pods: dict[str, int], options: list[str], processes: str, replicas: tuple[int, int]
) -> None:
    _, job = rendered(request(["train", config, *options]), Pods("vcal:1", **pods))  # type: ignore[arg-type]
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[words.index("--workers") + 1] == processes
    assert words[words.index("--on") + 1] == "ray"
    group = groups(job)[1]
    assert (group["minReplicas"], group["maxReplicas"]) == replicas
    assert group["replicas"] == replicas[0]
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is (replicas[0] < replicas[1])


@pytest.mark.parametrize(
    ("pods", "options", "said"),
    [
        ({"workers": 1, "gpus": 2}, ["--workers", "3"], "asks for 3 process(es) with 1 CPU and 1 GPU each"),
        ({"workers": 1, "cpus": 2}, ["--workers", "3"], "room for 2"),
        ({"workers": 1}, ["--workers", "1", "--gpus-per-worker", "1"], "room for 0"),
        ({}, ["--workers", "4:2"], "'4:2'"),
        ({}, ["--workers", "0"], "'0'"),
        ({}, ["--workers", "many"], "'many'"),
        ({}, ["--on", "ray", "--address", "ray://there:10001"], "a Ray cluster of its own"),
        ({}, ["devices.accelerator=gpu"], "give --gpus-per-worker 1"),
    ],
)
def test_what_cannot_run_is_refused_at_once(config: str, pods: dict[str, int], options: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        documents(request(["train", config, *options]), Pods("vcal:1", **pods))  # type: ignore[arg-type]


def test_a_sweep_keeps_its_section_and_gets_room_for_a_trial(config: str) -> None:
    asked = request(["sweep", config, "output=/data/sweep", "sweep.workers=4", "sweep.trials=3"])
    config_map, job = rendered(asked, Pods("vcal:1", gpus=2))
    assert shlex.split(job["spec"]["entrypoint"])[:3] == ["vcal", "sweep", "/etc/vcal/config.yaml"]
    assert "--on" not in job["spec"]["entrypoint"]
    assert yaml.safe_load(config_map["data"]["config.yaml"])["sweep"]["trials"] == 3
    assert groups(job)[1]["maxReplicas"] == 2
    with pytest.raises(ConfigError, match="room for 2"):
        documents(asked, Pods("vcal:1", gpus=2, workers=1))
    assert unseen(asked, Pods("vcal:1", volume="results:/data")) == []
    with pytest.raises(ConfigError, match="--trial"):
        documents(request(["sweep", config, "output=/data/sweep", "--trial", "0"]), Pods("vcal:1"))


def test_odd_names_stay_in_the_configuration(config: str, tmp_path: Path) -> None:
    overrides = [f"{key}={json.dumps(ODD + key)}" for key in ("store", "output")]
    overrides.append(f"transforms={json.dumps({ODD: {'kind': 'log'}})}")
    config_map, job = rendered(request(["train", config, *overrides]))
    assert job["spec"]["entrypoint"] == "vcal train /etc/vcal/config.yaml --on ray --workers 1"
    assert "touch x" not in dump(job)
    path = tmp_path / "received.yaml"
    path.write_text(config_map["data"]["config.yaml"], encoding="utf-8")
    assert load(path) == load(config, overrides)
    assert load(path).store == ODD + "store"


def test_the_command_passes_every_shell_unchanged(config: str) -> None:
    asked = request(["train", config, "--workers", "2:4", "--gpus-per-worker", "0.5", "--retries", "7", "--json"])
    _, job = rendered(asked, Pods("vcal:1", gpus=1))
    expected = ["vcal", *asked.on_ray().arguments("/etc/vcal/config.yaml")]
    assert {"2:4", "0.5", "7", "--json"} <= set(expected)

    def words(line: str) -> list[str]:
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    line = job["spec"]["entrypoint"]
    # KubeRay's submitter puts it into a shell's script; `ray job submit` joins what arrives, for a shell on the head.
    assert words(line) == expected
    assert words(subprocess.list2cmdline(words(line))) == expected


@pytest.mark.parametrize("word", ["a b", "$(touch x)", "x;y", "", "it's", "a\nb", "*", "~", "{1,2}", "ü"])
def test_no_word_that_a_shell_could_change_gets_into_the_command(word: str) -> None:
    with pytest.raises(ConfigError, match="shells on the way"):
        entrypoint(Request("train", {}, ("--option", word)))


@given(st.text(max_size=80))
def test_every_output_gives_a_name_that_kuberay_takes(text: str) -> None:
    name = job_name(f"vcal-{text}")
    assert Pods("vcal:1", name=name).name == name
    assert len(name) <= 47


@given(st.text(st.characters(codec="utf-8")))
def test_texts_stay_texts_in_the_yaml(text: str) -> None:
    assert yaml.safe_load(dump({"key": text})) == {"key": text}


@pytest.mark.parametrize("text", ["y", "n", "1e3", "0o17", "12", "1_0", ".5", "-", "=", "true", "null", "2026-01-01"])
def test_what_other_readers_take_for_numbers_or_truth_is_quoted(text: str) -> None:
    assert re.fullmatch("""key: (['"])(.*)\\1\n""", dump({"key": text}))


def test_a_configuration_has_a_name_of_its_own(config: str) -> None:
    names = [
        [part["metadata"]["name"] for part in documents(request(["train", config, f"seed={seed}"]), Pods("vcal:1"))]
        for seed in (1, 1, 2)
    ]
    assert names[0] == names[1]
    assert names[0][0] != names[2][0]  # one that was left behind is not taken for this
    assert {name for _, name in names} == {"vcal-try-1"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("image", ""), ("image", "a b"), ("image", "-x"), ("image", "a\n"),
        ("name", ""), ("name", "Mine"), ("name", "1st"), ("name", "a-"), ("name", "a.b"), ("name", "a" * 48),
        ("namespace", "a_b"), ("namespace", "a" * 64), ("secret", "A"), ("secret", "a..b"),
        ("memory", "16"), ("memory", "16GB"), ("memory", "16m"), ("memory", "0Gi"), ("memory", "-1Gi"), ("memory", "x"),
        ("volume", "claim"), ("volume", "claim:data"), ("volume", ":/data"), ("volume", "claim:/"),
        ("volume", "claim:/data:ro"), ("volume", "claim:/etc/vcal"), ("volume", "claim:/dev"), ("volume", "claim:/etc"),
        ("volume", "claim:/data/../etc/vcal"),
    ],
)  # fmt: skip
def test_values_that_kubernetes_would_refuse_or_misread_are_refused_here(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--{option} is '{value}'")):
        Pods(**{"image": "vcal:1", option: value})


def test_warns_of_paths_that_pods_do_not_share(config: str) -> None:
    asked = request(["train", config, "store=/data/store.zarr", "output=/data/../home/run"])
    assert [line.split()[0] for line in unseen(asked, Pods("vcal:1"))] == ["store", "output"]
    assert [line.split()[0] for line in unseen(asked, Pods("vcal:1", volume="results:/data"))] == ["output"]
    assert [line.split()[0] for line in unseen(asked, Pods("vcal:1", volume="results:/dat"))] == ["store", "output"]
    assert unseen(request(["train", config]), Pods("vcal:1")) == []


# No API server runs here: this takes kubectl's place, writes down what it is given, and answers as kubectl would.
KUBECTL = """#!/bin/sh
{ echo "$@"; cat; } > "$RECORDED/$1"
case "$RECORDED" in *taken*) test "$1" = create && echo 'Error (AlreadyExists): rayjobs exists' >&2 && exit 1;; esac
exit 0
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a `kubectl` on the PATH writes its arguments and its input, a file for each verb."""
    programs, recorded = tmp_path / "bin", tmp_path / "recorded"
    programs.mkdir()
    recorded.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("RECORDED", str(recorded))
    return recorded


def test_sends_what_the_dry_run_prints(config: str, kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["submit", "kubernetes", "--image", "vcal:1", "--namespace", "lab", "--workers", "2"]
    command = ["--", "train", config, "seed=7"]
    assert vcal(*asked, "--dry-run", *command) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert list(kubectl.iterdir()) == []
    assert vcal(*asked, *command) == 0
    verbs = ("apply", "create")
    assert {file.name for file in kubectl.iterdir()} == set(verbs)
    sent = [(kubectl / verb).read_text(encoding="utf-8").split("\n", 1) for verb in verbs]
    assert [arguments for arguments, _ in sent] == ["apply --filename -", "create --filename -"]
    assert [yaml.safe_load(text) for _, text in sent] == printed
    assert [document["kind"] for document in printed] == ["ConfigMap", "RayJob"]
    assert "seed: 7" in printed[0]["data"]["config.yaml"]
    out = capsys.readouterr().out
    assert "kubectl get rayjob vcal-try-1 --watch --namespace lab" in out
    assert "kubectl logs --follow job/vcal-try-1 --namespace lab" in out
    [instance] = {document["metadata"]["labels"]["app.kubernetes.io/instance"] for document in printed}
    assert f"kubectl delete rayjob,configmap --selector app.kubernetes.io/instance={instance} --namespace lab" in out


def test_a_job_that_is_there_already_is_left_alone(
    config: str, kubectl: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = kubectl / "taken"
    taken.mkdir()
    monkeypatch.setenv("RECORDED", str(taken))
    assert vcal("submit", "kubernetes", "--image", "vcal:1", "--", "train", config) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "rayjobs exists" in said
    assert "give another --name, or first: kubectl delete" in said


def test_without_kubectl_it_says_so_and_the_dry_run_works(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ["submit", "kubernetes", "--image", "vcal:1"]
    assert vcal(*asked, "--", "train", config) == 1
    said = capsys.readouterr().err
    assert "kubectl is not on the PATH" in said
    assert "--dry-run" in said
    assert vcal(*asked, "--dry-run", "--", "train", config, "output=/tmp/run") == 0
    printed = capsys.readouterr()
    assert "kind: RayJob" in printed.out
    assert "warning: output is /tmp/run" in printed.err


def test_nobody_uses_the_cluster_without_its_token(config: str) -> None:
    _, job = rendered(request(["train", config]))
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
