"""Waits until the nodes of a Ray cluster have joined: python -m jobs.submission.ray_nodes ADDRESS NODES PID."""

from __future__ import annotations

import logging
import sys
import time

from jobs.console import stderr

PATIENCE = 300.0  # seconds; many nodes that read Python's modules from one file system take minutes


def joined(address: str, nodes: int, starter: int) -> bool:
    """Whether so many nodes are there; False if they do not come, or the process that starts them has ended."""
    import psutil
    import ray

    end, found = time.monotonic() + PATIENCE, 0
    while time.monotonic() < end and psutil.pid_exists(starter):
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
            found = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:
            pass
        finally:
            ray.shutdown()
        if found >= nodes:
            return True
        time.sleep(1)
    stderr().print(f"error: {found} of {nodes} nodes of the Ray cluster at {address} have started", style="red")
    return False


if __name__ == "__main__":
    sys.exit(not joined(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
