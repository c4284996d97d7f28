"""A request as what Kubernetes understands: a ConfigMap with the configuration and a RayJob of KubeRay.

The template `jobs/kubernetes/rayjob.yaml` is read as data, and values are set in it: no text is put together. The
command that Ray runs goes through two shells on its way, and holds only words that mean the same to any number of them.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
import shutil
import subprocess
import unicodedata
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import PurePosixPath
from typing import Any

import yaml

from jobs.ray_cluster import Capacity, worker_range
from jobs.submission.request import Request
from vcal_dist.errors import ConfigError

CONFIG = "/etc/vcal/config.yaml"
INSTANCE = "app.kubernetes.io/instance"  # the label that tells what belongs together
GPU = "nvidia.com/gpu"
NAME_LENGTH = 47  # KubeRay appends to it, and a service's name has 63 letters at most

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
# Of each option: what is accepted, how long it may be, and how to say so.
ACCEPTED = {
    "--image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", 500, "an image such as registry.example.com/vcal:0.1"),
    "--name": (LABEL, NAME_LENGTH, f"at most {NAME_LENGTH} small letters, digits and -, the first a letter"),
    "--namespace": (r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63, "at most 63 small letters, digits and -"),
    "--secret": (SUBDOMAIN, 253, "the name of a secret: small letters, digits, - and ."),
    # Without a unit these would be bytes, and m would be thousandths of one.
    "--memory": (r"[1-9][0-9]*(\.[0-9]+)?(Mi|Gi|Ti|M|G|T)", 20, "a number with its unit, such as 16Gi"),
    "--volume": (
        SUBDOMAIN + r":(/[^/:\x00-\x1f]+)+/?",
        500,
        "the name of a PersistentVolumeClaim and an absolute path, such as results:/data",
    ),
}


@dataclass(frozen=True)
class Pods:
    """What is asked of Kubernetes. CPUs, memory and GPUs are those of one worker."""

    image: str
    name: str | None = None  # of the job; None: from the output's
    namespace: str | None = None  # None: of kubectl's context
    workers: int | None = None  # None: as many as the processes need
    gpus: int = 0
    cpus: int = 4
    memory: str = "16Gi"
    volume: str | None = None  # CLAIM:/path
    secret: str | None = None  # its entries become environment variables

    def __post_init__(self) -> None:
        for option, (pattern, length, accepted) in ACCEPTED.items():
            value = getattr(self, option.removeprefix("--"))
            if value is not None and (len(value) > length or not re.fullmatch(pattern, value)):
                raise ConfigError(f"{option} is '{value}'; accepted: {accepted}")
        for path in (PurePosixPath(CONFIG).parent, PurePosixPath("/dev/shm")):
            if self.mounted is not None and (self.mounted.is_relative_to(path) or path.is_relative_to(self.mounted)):
                raise ConfigError(f"--volume is '{self.volume}', which hides {path}; choose a path such as /data")

    @property
    def mounted(self) -> PurePosixPath | None:
        """Where pods see the volume."""
        return PurePosixPath(posixpath.normpath(self.volume.partition(":")[2])) if self.volume else None


def documents(request: Request, pods: Pods) -> list[dict[str, Any]]:
    """The ConfigMap and the RayJob."""
    request, replicas = _sized(request.on_ray(), pods)
    config_map, job = yaml.safe_load_all(resources.files("jobs").joinpath("kubernetes/rayjob.yaml").read_text("utf-8"))
    name = pods.name or job_name(request.name)
    # With a name of its own, a configuration that was left behind is never taken for another.
    config_name = f"{name}-{hashlib.sha256(request.text.encode()).hexdigest()[:10]}"
    config_map["data"] = {PurePosixPath(CONFIG).name: request.text}
    for document, own in ((config_map, config_name), (job, name)):
        document["metadata"]["name"] = own
        document["metadata"]["labels"][INSTANCE] = name
        if pods.namespace:
            document["metadata"]["namespace"] = pods.namespace

    spec = job["spec"]
    spec["entrypoint"] = entrypoint(request)
    cluster = spec["rayClusterSpec"]
    cluster["rayVersion"] = metadata.version("ray")
    least, most = replicas
    cluster["enableInTreeAutoscaling"] = least < most
    [group] = cluster["workerGroupSpecs"]
    group |= {"replicas": least, "minReplicas": least, "maxReplicas": most}
    head, worker = (part["template"]["spec"] for part in (cluster["headGroupSpec"], group))
    next(volume for volume in head["volumes"] if volume["name"] == "config")["configMap"]["name"] = config_name
    size = {"cpu": str(pods.cpus), "memory": pods.memory} | ({GPU: str(pods.gpus)} if pods.gpus else {})
    worker["containers"][0]["resources"] = {"limits": size, "requests": size}
    for pod in (head, worker):
        [container] = pod["containers"]
        container["image"] = pods.image
        if pods.secret:
            container["envFrom"] = [{"secretRef": {"name": pods.secret}}]
        if pods.volume:
            claim = {"claimName": pods.volume.partition(":")[0]}
            pod["volumes"].append({"name": "data", "persistentVolumeClaim": claim})
            container["volumeMounts"].append({"name": "data", "mountPath": str(pods.mounted)})
    return [config_map, job]


def entrypoint(request: Request) -> str:
    """The command for Ray, of words that are the same before and after any shell."""
    words = ["vcal", *request.arguments(CONFIG)]
    for word in words:
        if shlex.quote(word) != word:
            raise ConfigError(f"the option '{word}' cannot go to Kubernetes: shells on the way may read it otherwise")
    return shlex.join(words)


def job_name(text: str) -> str:
    """The nearest name that a RayJob can have."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain)[:NAME_LENGTH].strip("-")


def _sized(request: Request, pods: Pods) -> tuple[Request, tuple[int, int]]:
    """The request with its number of processes, one for each GPU or else each worker; and least and most workers."""
    given = dict(zip(request.options, request.options[1:], strict=False))
    for option in ("--address", "--trial"):
        if option in given:
            raise ConfigError(f"{option} cannot go to Kubernetes: a job runs there on a Ray cluster of its own")
    if given.get("--on") == "here":
        raise ConfigError("--on here cannot go to Kubernetes: the head has no CPU to train with; leave it out")
    each = max(1, pods.gpus)
    if request.command == "sweep":  # decides itself how many trials find room; one at least must
        settings = request.plain["sweep"]
        least = most = settings["workers"]
        cpus, gpus = settings["cpus"] or 1, settings["gpus"]
    else:
        if "--workers" not in given:
            given["--workers"] = str((pods.workers or 1) * each)
            request = Request("train", request.plain, (*request.options, "--workers", given["--workers"]))
        least, most = worker_range(given["--workers"])
        cpus, gpus = 1, given.get("--gpus-per-worker")
    accelerator = request.plain["devices"]["accelerator"]
    if accelerator == "gpu" and not pods.gpus:
        raise ConfigError("devices.accelerator is 'gpu', but the workers have none; give --gpus-per-worker 1")
    if gpus is None:
        gpus = pods.gpus > 0 and accelerator != "cpu"
    replicas = (pods.workers,) * 2 if pods.workers else (-(-least // each), -(-most // each))
    # Told here, and not by the job when images are loaded and pods run.
    has = Capacity([(pods.cpus, pods.gpus)] * replicas[1], [])
    has.refuse(request.command, least, cpus, float(gpus))
    return request, replicas


def unseen(request: Request, pods: Pods) -> list[str]:
    """What of the request's data lies where pods do not see it, or lose it."""
    places = {key: str(request.plain[key]).removeprefix("file://") for key in ("store", "output")}
    return [
        f"{key} is {place}, which is in no volume that pods share: what is there now they do not see, and what they "
        "write is gone with them; use a path below that of --volume CLAIM:/path"
        + ("" if (request.command, key) == ("sweep", "output") else ", or an s3:// URL")
        for key, place in places.items()
        if "://" not in place
        and not (pods.mounted and PurePosixPath(posixpath.normpath(place)).is_relative_to(pods.mounted))
    ]


class _Dumper(yaml.SafeDumper):
    """YAML that other readers understand alike, with texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Kubernetes' reader takes y for true and 1e3 for a number, which PyYAML writes without quotes.
    style = None if len(text) > 1 and (text[0].isalpha() or text[0] == "/") else '"'
    if "\n" in text:  # a block, unless there are characters that readers take for line breaks, each in its own way
        style = "|" if all(line.isprintable() for line in text.split("\n")) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(*parts: dict[str, Any]) -> str:
    """The documents as YAML."""
    text: str = yaml.dump_all(parts, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def send(config_map: dict[str, Any], job: dict[str, Any]) -> None:
    """Gives both to kubectl. The same configuration may be there already; a job of the same name must not."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ConfigError(
            "kubectl is not on the PATH; install it, or add --dry-run and give the YAML that it prints to whatever "
            "reaches your cluster"
        )
    for verb, document in (("apply", config_map), ("create", job)):
        command = [kubectl, verb, "--filename", "-"]
        done = subprocess.run(command, input=dump(document), capture_output=True, encoding="utf-8", check=False)  # noqa: S603 - no shell
        if done.returncode:
            name = document["metadata"]["name"]
            cure = (
                f"; give another --name, or first: {shlex.join(removal(job))}" if "AlreadyExists" in done.stderr else ""
            )
            raise ConfigError(f"kubectl {verb} refused the {document['kind']} {name}: {done.stderr.strip()}{cure}")


def removal(job: dict[str, Any]) -> list[str]:
    """The command that removes a job and its configuration."""
    return [
        "kubectl",
        "delete",
        "rayjob,configmap",
        "--selector",
        f"{INSTANCE}={job['metadata']['name']}",
        *_where(job),
    ]


def watching(job: dict[str, Any]) -> dict[str, list[str]]:
    """Commands to look after a job, by what they are for."""
    name = job["metadata"]["name"]
    return {
        "state": ["kubectl", "get", "rayjob", name, "--watch", *_where(job)],
        "events": ["kubectl", "describe", "rayjob", name, *_where(job)],
        "log": ["kubectl", "logs", "--follow", f"job/{name}", *_where(job)],
        "remove": removal(job),
    }


def _where(job: dict[str, Any]) -> list[str]:
    namespace = job["metadata"].get("namespace")
    return ["--namespace", namespace] if namespace else []
