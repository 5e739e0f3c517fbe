"""Numbers of the server for Prometheus."""

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardlib.engine import EngineStats, Request
from shardlib.serve.engine_thread import EngineThread

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServerMetrics:
    """The numbers of a server. It observes the thread of the engine."""

    def __init__(self, thread: EngineThread):
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(_EngineCollector(thread))
        self._first_token = prometheus_client.Histogram(
            "shardlib_time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._next_token = prometheus_client.Histogram(
            "shardlib_inter_token_seconds",
            "Time from a token to the next one of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._answers = prometheus_client.Counter(
            "shardlib_answers",
            "Answers that ended, by their reason.",
            ["finish_reason"],
            registry=self.registry,
        )
        self._responses = prometheus_client.Counter(
            "shardlib_responses",
            "Responses of HTTP, by their status.",
            ["status"],
            registry=self.registry,
        )

    def first_token(self, seconds: float) -> None:
        """Counts a first token, `seconds` after its request."""
        self._first_token.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        """Counts `count` tokens, `seconds` after the one before them."""
        for _ in range(count):
            self._next_token.observe(seconds / count)

    def finished(self, request: Request) -> None:
        """Counts an answer that has ended."""
        self._answers.labels(request.finish_reason).inc()

    def responded(self, status: int) -> None:
        """Counts a response."""
        self._responses.labels(status).inc()

    def text(self) -> bytes:
        """Returns all numbers in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)


class _EngineCollector(Collector):
    """The numbers of the engine after its last step."""

    def __init__(self, thread: EngineThread):
        self._thread = thread

    def collect(self) -> Iterator[Metric]:
        stats: EngineStats = self._thread.stats
        pages = GaugeMetricFamily("shardlib_pages", "Pages of the cache.", labels=["state"])
        pages.add_metric(["used"], stats.pages_used)
        pages.add_metric(["idle"], stats.pages_idle)
        pages.add_metric(["free"], stats.pages - stats.pages_used - stats.pages_idle)
        yield pages
        for name, text, value in (
            ("ready", "Whether requests are answered.", self._thread.is_ready),
            ("slots", "Requests that can run at once.", self._thread.num_slots),
            ("running", "Requests that run.", stats.num_running),
            ("waiting", "Prompts that wait for a slot.", stats.num_waiting),
        ):
            yield GaugeMetricFamily(f"shardlib_{name}", text, value)
        for name, text, value in (
            ("steps", "Steps of the engine.", stats.num_steps),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts found in the cache.", stats.cached_tokens),
            ("answer_tokens", "Tokens of answers.", stats.answer_tokens),
            ("guessed_tokens", "Tokens that speculation guessed.", stats.guessed_tokens),
            ("right_tokens", "Guessed tokens that were right.", stats.right_tokens),
            ("preemptions", "Requests sent back for lack of pages.", stats.num_preemptions),
        ):
            yield CounterMetricFamily(f"shardlib_{name}", text, value)
