"""What this machine offers to calibration, and what to fix: versions, devices, memory, disk, Ray.

Each check returns plain values and the sentences for "what to fix". A sentence in `broken` means that nothing
will run; one in `advice` means that something will run slowly or not at all until it is mended.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "vcal-dist"
MIB = 2**20
GIB = 2**30


@dataclass
class Report:
    """Facts by topic, and what to fix."""

    facts: dict[str, Any] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def examine(path: Path) -> Report:
    """Run every check; `path` is the directory whose disk is measured."""
    # Here, so that the parts below can be used without loading each other's packages.
    from jobs.ray_probe import probe

    report = Report()
    check_packages(report)
    check_processor(report)
    check_torch(report)
    check_memory(report)
    check_disk(report, path)
    found = probe()
    report.facts["ray"] = {"address": found.address, "reachable": found.reachable, "detail": found.detail}
    if found.configured and not found.reachable:
        report.advice.append(
            f"RAY_ADDRESS is {found.address}, which does not answer ({found.detail}): start that cluster or unset it."
        )
    return report


def check_packages(report: Report) -> None:
    """Installed versions against the ranges that this distribution declares; imports none of them."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    report.facts["python"] = {"version": platform.python_version(), "executable": sys.executable}
    packages: dict[str, Any] = {}
    report.facts["packages"] = packages
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        report.broken.append(f"{DISTRIBUTION} itself is not installed: run `pip install -c constraints.txt -e .`.")
        return
    packages[DISTRIBUTION] = {"installed": metadata.version(DISTRIBUTION), "required": "", "ok": True}
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        required = str(requirement.specifier)
        try:
            installed: str | None = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            installed = None
        # A local part such as +cpu or +cu128 names a build, not another version.
        ok = installed is not None and requirement.specifier.contains(Version(installed).base_version, prereleases=True)
        packages[requirement.name] = {"installed": installed, "required": required, "ok": ok}
        if not ok:
            have = f"is {installed}" if installed else "is missing"
            report.broken.append(
                f"{requirement.name} {have}, needed is {required or 'any version'}: "
                f"run `pip install '{requirement.name}{required}'`."
            )


def check_processor(report: Report) -> None:
    """Cores of the machine and those that this process may use."""
    report.facts["processor"] = {"cores": os.cpu_count(), "usable_cores": usable_cores(), "machine": platform.machine()}


def usable_cores() -> int:
    """Cores that this process may run on (schedulers and containers narrow them)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_torch(report: Report) -> None:
    """Threads and CUDA devices as torch sees them."""
    try:
        import torch
    except Exception as error:  # a wrong build raises OSError, a half-removed one ImportError or AttributeError
        report.facts["torch"] = {"error": str(error)}
        report.broken.append(f"torch does not import ({error}): run `pip install --force-reinstall torch`.")
        return
    threads, cores = torch.get_num_threads(), usable_cores()
    devices = [
        {"name": torch.cuda.get_device_name(i), "memory_bytes": torch.cuda.get_device_properties(i).total_memory}
        for i in range(torch.cuda.device_count())
    ]
    report.facts["torch"] = {"threads": threads, "cuda_build": torch.version.cuda, "cuda_devices": devices}
    if threads > cores:
        report.advice.append(
            f"torch would use {threads} threads on {cores} usable cores, which is slow: set OMP_NUM_THREADS={cores}."
        )
    if not devices and Path("/dev/nvidiactl").exists():
        report.advice.append(
            "this machine has an NVIDIA driver, but torch sees no CUDA device: install the CUDA build of torch, "
            "and check `nvidia-smi` and CUDA_VISIBLE_DEVICES."
        )


def check_memory(report: Report) -> None:
    """Main memory, the container's limit on it, and the shared memory that Ray and data loaders use."""
    import psutil

    memory = psutil.virtual_memory()
    limit = _container_limit()
    report.facts["memory"] = {"total_bytes": memory.total, "available_bytes": memory.available, "limit_bytes": limit}
    if memory.available < 2 * GIB:
        report.advice.append(
            f"only {memory.available / GIB:.1f} GiB of memory are free: stop other programs or lower the memory budget."
        )
    shared = Path("/dev/shm")
    if not shared.is_dir():  # macOS and Windows have none
        report.facts["shared_memory"] = None
        return
    usage = shutil.disk_usage(shared)
    report.facts["shared_memory"] = {"total_bytes": usage.total, "free_bytes": usage.free}
    if usage.total < GIB:
        report.advice.append(
            f"{shared} holds only {usage.total / MIB:.0f} MiB, so Ray falls back to slow files: "
            "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium Memory)."
        )


def _container_limit() -> int | None:
    """The memory limit of the control group, if there is one."""
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if limit < 2**60 else None  # version 1 says "no limit" with a huge number
    return None


def check_disk(report: Report, path: Path) -> None:
    """Free space of a directory's disk, and the speed of one file written through and read back."""
    try:
        free = shutil.disk_usage(path).free
        write, read = disk_speed(path)
    except OSError as error:
        report.facts["disk"] = {"path": str(path), "error": error.strerror or str(error)}
        report.advice.append(
            f"{path} cannot be written ({error.strerror or error}): choose another one with --path, or mend its rights."
        )
        return
    report.facts["disk"] = {
        "path": str(path.resolve()),
        "free_bytes": free,
        "write_bytes_per_s": write,
        "read_bytes_per_s": read,
    }
    if free < 5 * GIB:
        report.advice.append(f"only {free / GIB:.1f} GiB are free under {path}: make room before writing large stores.")
    if write < 50 * MIB:
        report.advice.append(
            f"{path} takes only {write / MIB:.0f} MiB/s: write stores and checkpoints to a faster or a local disk."
        )


def disk_speed(path: Path, blocks: int = 8, block_bytes: int = 8 * MIB) -> tuple[float, float]:
    """Bytes per second of writing a file through to the disk and of reading it back."""
    block = os.urandom(block_bytes)  # random, because some file systems compress
    with tempfile.TemporaryFile(dir=path, prefix=".vcal-doctor-", buffering=0) as file:
        start = time.perf_counter()
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
        write_seconds = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # otherwise the read measures memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(block_bytes):
            pass
        read_seconds = time.perf_counter() - start
    return blocks * block_bytes / write_seconds, blocks * block_bytes / read_seconds
