"""The jobs of a Ray cluster: reaching it, what jobs there are, what they say, stopping them, and how they ended."""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from storage.errors import VcalError
from vcal_dist.errors import ConfigError

if TYPE_CHECKING:
    from ray.dashboard.modules.job.pydantic_models import JobDetails
    from ray.job_submission import JobSubmissionClient

HERE = "http://127.0.0.1:8265"
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # in the order in which Ray looks at them
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # it stands in URLs and in names of files
ANSWER_SECONDS = 10.0
LOST_SECONDS = 60.0  # how long a log is followed without a connection: forwarded ports break
STOP_SECONDS = 120.0


class RayJobsError(VcalError):
    """A cluster that does not take, know or tell what it is asked for."""


def checked(name: str) -> str:
    """A job's name, if it can be one."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name}' cannot name a job; accepted: up to 100 ASCII letters, digits, '-', '_' and '.', "
            "beginning with a letter or a digit"
        )
    return name


def address(given: str | None = None) -> str:
    """Where jobs are submitted: as given, or as Ray's variables say, or on this machine."""
    known = (value for value in map(os.environ.get, ADDRESSES) if value and value.startswith("http"))
    found = given or next(known, HERE)
    try:
        parts = urlsplit(found)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of brackets, and of ports that are no number
        fits = False
    if not fits:
        raise ConfigError(f"the address '{found}' is not that of a dashboard; write it as {HERE}")
    return found.rstrip("/")


def is_here(where: str) -> bool:
    """Whether an address is on this machine's loopback."""
    host = urlsplit(where).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def connect(where: str) -> JobSubmissionClient:
    """A client of the cluster; Ray's own would wait without end for one that does not answer."""
    _ask(where)
    from ray.job_submission import JobSubmissionClient

    for module in ("dashboard_sdk", "job.sdk"):  # they tell of every upload and every connection that is closed
        logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
    before = os.environ.get(ADDRESSES[0])
    os.environ[ADDRESSES[0]] = where  # the client prefers Ray's variables to the address that it is given
    try:
        with told(where):
            return JobSubmissionClient(where)
    finally:
        if before is None:
            del os.environ[ADDRESSES[0]]
        else:
            os.environ[ADDRESSES[0]] = before


def _ask(where: str) -> None:
    """Raises unless a Ray dashboard answers."""
    try:
        with urllib.request.urlopen(f"{where}/api/version", timeout=ANSWER_SECONDS) as answer:  # noqa: S310 - http(s)
            is_ray = "ray_version" in json.load(answer)
    except urllib.error.HTTPError as error:
        is_ray = error.code in (401, 403)  # it wants a token, which Ray's client has or asks for
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise RayJobsError(_unreachable(where, getattr(reason, "strerror", None) or str(reason))) from None
    except (ValueError, TypeError, http.client.HTTPException):
        is_ray = False
    if not is_ray:
        raise RayJobsError(_unreachable(where, "something else listens there"))


def _unreachable(where: str, why: str) -> str:
    return (
        f"no Ray dashboard answers at {where} ({why}); start a cluster with 'ray start --head', or forward the port of "
        "one with 'ray dashboard cluster.yaml', and give its address with --address"
    )


@contextmanager
def told(where: str, name: str = "") -> Iterator[None]:
    """Turns what Ray's client raises into errors with their cure."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        why = str(error).partition("\n")[0]
        raise RayJobsError(
            f"the Ray cluster at {where} wants a token ({why}): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH"
        ) from None
    except OSError as error:  # of the network, as those of requests are
        raise RayJobsError(_unreachable(where, str(error))) from None
    except RuntimeError as error:
        said = str(error).strip()
        if "status code 404" in said:
            raise RayJobsError(f"the Ray cluster at {where} has no job {name}; see: vcal jobs list") from None
        if "already exists" in said:
            raise RayJobsError(f"there is a job {name} at {where} already; give this one another --name") from None
        raise RayJobsError(f"the Ray cluster at {where} refused: {said.splitlines()[-1]}") from None


def all_jobs(cluster: JobSubmissionClient) -> list[JobDetails]:
    """The jobs that were submitted, the newest first."""
    with told(cluster.get_address()):
        found = [job for job in cluster.list_jobs() if job.submission_id]
    return sorted(found, key=lambda job: job.start_time or 0, reverse=True)


def details(cluster: JobSubmissionClient, name: str) -> JobDetails:
    """What the cluster knows about a job."""
    with told(cluster.get_address(), name):
        return cluster.get_job_info(checked(name))


def logs(cluster: JobSubmissionClient, name: str) -> str:
    """What a job has said so far."""
    with told(cluster.get_address(), name):
        return cluster.get_job_logs(checked(name))


def follow(cluster: JobSubmissionClient, name: str, say: Callable[[str], object]) -> JobDetails:
    """Says what a job says until it has ended; a connection that breaks is made anew."""
    details(cluster, name)
    return asyncio.run(_follow(cluster, name, say))


async def _follow(cluster: JobSubmissionClient, name: str, say: Callable[[str], object]) -> JobDetails:
    said = 0  # characters
    lost: float | None = None  # since when the cluster does not answer
    while True:
        passed = 0  # a log is told from its beginning
        async for text in _tail(cluster, name):
            say(text[max(said - passed, 0) :])
            passed += len(text)
            said = max(said, passed)
        try:
            found = details(cluster, name)
            if found.status.is_terminal():
                return found
            lost = None
        except RayJobsError as error:
            lost = lost or time.monotonic()
            if time.monotonic() - lost > LOST_SECONDS:
                raise RayJobsError(f"{error}. The job may go on; to see it: vcal jobs logs {name} --follow") from None
        await asyncio.sleep(1)


async def _tail(cluster: JobSubmissionClient, name: str) -> AsyncIterator[str]:
    """A job's log, until the job ends or the connection breaks."""
    from aiohttp import ClientError

    try:
        async for text in cluster.tail_job_logs(name):
            yield text
    except (ClientError, OSError, RuntimeError):  # Ray raises the latter when a connection breaks
        return


def stop(cluster: JobSubmissionClient, name: str) -> tuple[bool, JobDetails]:
    """Stops a job and waits for its end; whether it was still there to stop, and how it ended."""
    with told(cluster.get_address(), name):
        running = cluster.stop_job(checked(name))
    end = time.monotonic() + STOP_SECONDS
    while not (found := details(cluster, name)).status.is_terminal():
        if time.monotonic() > end:
            raise RayJobsError(
                f"the job {name} was told to stop and has not within {STOP_SECONDS:g} s; see: vcal jobs logs {name}"
            )
        time.sleep(0.5)
    return running, found


def exit_status(job: JobDetails) -> int:
    """Of the job's command where it is known, as a shell would say it; otherwise 0 after success and 1."""
    code = job.driver_exit_code
    if code is None:
        return 0 if job.status == "SUCCEEDED" else 1
    return code if code >= 0 else 128 - code
