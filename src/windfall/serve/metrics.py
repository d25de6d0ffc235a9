"""GET /metrics: what the engine and the server count, in the format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from windfall.engine.counters import Counters, Histogram
from windfall.serve.backend import Answers, Backend, Figures
from windfall.serve.guard import OPEN_PATHS

OWN, VLLM = "windfall:", "vllm:"  # prefixes of names
OF_ONE_PROCESS = ("process_start_time_seconds", "process_max_fds")
REFUSALS = {  # reasons by status
    HTTPStatus.BAD_REQUEST: "bad_request",
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "unsupported_content_type",
    HTTPStatus.TOO_MANY_REQUESTS: "queue_full",
    HTTPStatus.SERVICE_UNAVAILABLE: "shutting_down",
}


class Metrics:
    """The metrics of one application, in a registry of its own.

    The engine counts plain numbers during its rounds; they become metrics when somebody asks for them.
    """

    def __init__(self, backend: Backend, model_name: str):
        self._backend, self._labels = backend, {"model_name": model_name}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(ProcessMetrics(backend))

    def add_answer(self, route: str, status: int) -> None:
        """Count an answer of this process."""
        self._backend.answers[route, status] += 1

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus_client asks for them. Any thread may ask."""
        figures = self._backend.figures
        counters = figures.counters
        yield from self._gauges(figures)
        yield from self._counts(counters)
        yield from self._histograms(counters)
        yield from self._drafts(counters)
        yield from self._http(figures.answers)

    def _gauges(self, figures: Figures) -> Iterator[Metric]:
        running = figures.running
        memory = figures.memory if running else 0.0
        budget = figures.budget if running else None
        waiting = figures.waiting + figures.expected
        yield self._gauge("num_requests_waiting", "texts that wait in the queue", waiting)
        yield self._gauge("num_requests_running", "texts that run", running)
        yield self._gauge("kv_cache_usage_perc", "share of the memory for KV caches in use; 1 is all of it", memory)
        about = "that the requests of a batch share in the last round; absent if none is shared"
        yield self._gauge("budget_rows", f"rows of the verify pass {about}", budget and budget.rows)
        yield self._gauge("budget_draft_passes", f"draft passes {about}", budget and budget.passes)

    def _counts(self, counters: Counters) -> Iterator[Metric]:
        for name, about, value in (
            ("prompt_tokens", "tokens of prompts", counters.prompt_tokens),
            ("generation_tokens", "generated tokens", counters.tokens),
            ("num_preemptions", "requests that went back to the queue because memory was short", counters.preemptions),
            ("target_passes", "verify passes of the target", counters.rounds),
            ("draft_passes", "draft passes", counters.draft_passes),
        ):
            yield self._count(OWN + name, about, value)

    def _histograms(self, counters: Counters) -> Iterator[Metric]:
        first, between = counters.first_token, counters.between_tokens
        yield self._histogram("time_to_first_token_seconds", "seconds from the submission to the first token", first)
        yield self._histogram("inter_token_latency_seconds", "seconds per token after the first cycle", between)
        about = "tokens that a cycle adds to a text: accepted ones, and one of the target's own"
        yield self._histogram("accepted_length", about, counters.lengths)
        yield self._histogram("rows_per_pass", "rows of a verify pass, of all requests together", counters.rows)
        about = "seconds from the submission to the end of a text, by finish reason"
        ended = HistogramMetricFamily(f"{OWN}e2e_request_latency_seconds", about, labels=[*self._labels, "reason"])
        for reason, durations in dict(counters.durations).items():
            ended.add_metric([*self._labels.values(), reason], _buckets(durations), durations.sum)
        yield ended

    def _drafts(self, counters: Counters) -> Iterator[Metric]:
        """Under vLLM's names, which dashboards know, and windfall's own."""
        for prefix in (OWN, f"{VLLM}spec_decode_"):
            about = "cycles in which drafted tokens were verified"
            yield self._count(f"{prefix}num_drafts", about, counters.drafts)
            yield self._count(f"{prefix}num_draft_tokens", "drafted tokens that were verified", counters.verified)
            yield self._count(f"{prefix}num_accepted_tokens", "drafted tokens that were accepted", counters.accepted)
            name, about = f"{prefix}num_accepted_tokens_per_pos", "accepted tokens by depth in the tree, from 0"
            by_depth = CounterMetricFamily(name, about, labels=[*self._labels, "position"])
            for depth, count in sorted(dict(counters.accepted_by_depth).items()):
                by_depth.add_metric([*self._labels.values(), str(depth - 1)], count)
            yield by_depth

    def _http(self, counted: Answers) -> Iterator[Metric]:
        answers = CounterMetricFamily(f"{OWN}http_requests", "answers by route and status", labels=["route", "status"])
        refused: Counter[str] = Counter(dict.fromkeys(REFUSALS.values(), 0))
        for (route, status), count in sorted(dict(counted).items()):
            answers.add_metric([route, str(status)], count)
            if status in REFUSALS and route not in OPEN_PATHS:
                refused[REFUSALS[HTTPStatus(status)]] += count
        refusals = CounterMetricFamily(f"{OWN}requests_refused", "refused requests by reason", labels=["reason"])
        for reason, count in refused.items():
            refusals.add_metric([reason], count)
        yield from (answers, refusals)

    def _gauge(self, name: str, about: str, value: float | None) -> Metric:
        made = GaugeMetricFamily(OWN + name, about, labels=list(self._labels))
        if value is not None:
            made.add_metric(list(self._labels.values()), value)
        return made

    def _count(self, name: str, about: str, value: int) -> Metric:
        made = CounterMetricFamily(name, about, labels=list(self._labels))
        made.add_metric(list(self._labels.values()), value)
        return made

    def _histogram(self, name: str, about: str, values: Histogram) -> Metric:
        made = HistogramMetricFamily(OWN + name, about, labels=list(self._labels))
        made.add_metric(list(self._labels.values()), _buckets(values), values.sum)
        return made


class ProcessMetrics:
    """Memory, CPU time and open files of all processes of the server; start and limits are those of the first."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client asks for them."""
        found = [each for each in map(_of_process, self._backend.figures.processes) if each]
        for name, family in found[0].items() if found else ():
            if name not in OF_ONE_PROCESS:
                value = sum(other[name].samples[0].value for other in found if name in other)
                family.samples = [family.samples[0]._replace(value=value)]
            yield family


def _of_process(process: int) -> dict[str, Metric]:
    return {family.name: family for family in ProcessCollector(pid=lambda: process, registry=None).collect()}


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    return list(zip([*map(str, map(float, values.bounds)), "+Inf"], values.cumulative, strict=True))


def metric_routes(backend: Backend, metrics: Metrics) -> APIRouter:
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def read() -> Response:
        """Numbers for Prometheus."""
        await backend.refresh(answers=True)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes
