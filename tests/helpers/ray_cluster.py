"""A small Ray cluster on this machine, with two replicas of a tiny model."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.serving import http, wait_for

MARK = "WINDFALL_TEST_CLUSTER"  # environment variable that the processes of this cluster have
OWN = uuid.uuid4().hex
PORT = 8873


@contextmanager
def cluster(**options: Any) -> Iterator[str]:
    """The address of an application with these options."""
    os.environ.update({MARK: OWN, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"})  # its processes inherit them
    import ray
    from ray import serve

    import windfall.ray

    small = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False, "log_to_driver": False}
    ray.init(**small, _system_config={"metrics_report_interval_ms": 1000})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(windfall.ray.build({**options, "cpus": 0.5, "device": "cpu"}), name="windfall", route_prefix="/")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> list[int]:
    """The process ids of the replicas."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and _is_replica(each)]


def _is_replica(process: Path) -> bool:
    try:
        named = (process / "cmdline").read_bytes().startswith(b"ray::ServeReplica:windfall")
        return named and f"{MARK}={OWN}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def _ticks(pid: int) -> int:
    """The CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def kill_the_busiest() -> int:
    """Kill the replica that works most now; returns its process id."""
    known = replicas()
    before = [_ticks(pid) for pid in known]
    time.sleep(0.3)
    spent = [_ticks(pid) - old for pid, old in zip(known, before, strict=True)]
    busiest = known[spent.index(max(spent))]
    os.kill(busiest, signal.SIGKILL)
    return busiest


def metrics(url: str, session: str) -> dict[str, float]:
    """The metrics of the replica that has this session."""
    lines = http().get(f"{url}/metrics", headers={"X-Session-Id": session}).text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def exported() -> list[Any]:
    """The samples of windfall's metrics at Ray's Prometheus endpoint of this machine."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    (node,) = ray.nodes()
    text = http().get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples if sample.name.startswith("ray_windfall_")]


def wait_for_replicas(count: int) -> None:
    """Wait until this number of replicas answers requests."""
    from ray import serve

    def running() -> int:
        known = serve.status().applications.get("windfall")
        states = known.deployments["windfall"].replica_states if known and known.deployments else {}
        return sum(number for state, number in states.items() if state == "RUNNING")

    wait_for(lambda: running() == count == len(replicas()), 90)
