"""Exports the metrics of a replica through Ray, so that the Prometheus endpoint of each machine has them."""

from __future__ import annotations

import logging
import threading
from typing import Any

from prometheus_client.core import Metric
from ray.serve import metrics as ray_metrics

from windfall.serve.metrics import Metrics

log = logging.getLogger(__name__)

EXPORT_SECONDS = 5.0  # between two exports; Ray reports every 10 seconds


class RayExport:
    """Copies all metrics of a server into metrics of Ray, which adds the names of deployment, replica and application.

    Counters stay counters. Gauges, and the buckets, sums and counts of histograms, are gauges of Ray: it takes single
    values of a histogram only, and these are counted already. Ray allows no colon in a name and puts `ray_` before it.
    """

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._made: dict[str, Any] = {}  # Ray's metrics by name
        self._known: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # values by name and labels
        self._ended = threading.Event()

    def start(self) -> None:
        """Export from now on, in a thread."""
        threading.Thread(target=self._run, name="windfall-metrics", daemon=True).start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EXPORT_SECONDS):
            try:
                self.export()
            except Exception as error:  # the next export may work
                log.warning("metrics were not exported: %s: %s", type(error).__name__, error)

    def export(self) -> None:
        """Give Ray the present values."""
        missing = {key for key in self._known if not isinstance(self._made[key[0]], ray_metrics.Counter)}
        for family in self._metrics.collect():
            for sample in family.samples:
                counts = family.type == "counter"
                name = (family.name if counts else sample.name).replace(":", "_")  # Ray adds `_total` to counters
                key = (name, tuple(sample.labels.items()))
                missing.discard(key)
                self._record(family, key, sample.value)
        for name, labels in missing:  # Ray would go on with the last value
            self._made[name].set(0, tags=dict(labels))

    def _record(self, family: Metric, key: tuple[str, tuple[tuple[str, str], ...]], value: float) -> None:
        name, labels = key
        counts = family.type == "counter"
        if name not in self._made:
            make = ray_metrics.Counter if counts else ray_metrics.Gauge
            self._made[name] = make(name, family.documentation, tuple(label for label, _ in labels))
        if not counts:
            self._made[name].set(value, tags=dict(labels))
        elif (more := value - self._known.get(key, 0)) > 0:
            self._made[name].inc(more, tags=dict(labels))
        self._known[key] = value
