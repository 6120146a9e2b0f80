"""Prometheus metrics. Rates such as tokens per second come from the counters: `rate(…[1m])`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvjax.engine import EngineStats, Request

SECONDS_BUCKETS = [0.005 * 2**i for i in range(16)]
"""From 5 ms to 164 s."""
INTERVAL_BUCKETS = [0.001 * 2**i for i in range(13)]
"""From 1 ms to 4 s."""
SHARE_BUCKETS = [i / 10 for i in range(1, 11)]


class Metrics:
    """The metrics of one server."""

    def __init__(self):
        self._registry = registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"kvjax_{name}", text, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvjax_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: list[float]) -> Histogram:
            return Histogram(f"kvjax_{name}", text, buckets=buckets, registry=registry)

        self._gauges = {
            "running": gauge("requests_running", "Answers that are being decoded."),
            "waiting": gauge("requests_waiting", "Requests that wait, or whose prompts are being read."),
            "paused": gauge("requests_paused", "Answers that wait in host memory for pages."),
            "forks": gauge("forks", "Kept contexts and prompts that later prompts may continue."),
            "pages": gauge("pool_pages_used", "Pages of the pool in use."),
            "pool_pages": gauge("pool_pages", "Pages of the pool."),
        }
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._cached_tokens = counter(
            "cached_tokens", "Tokens of prompts that were read with an earlier prompt."
        )
        self._generated_tokens = counter("generation_tokens", "Tokens of answers.")
        self._requests = counter("requests", "Requests that ended.", ("finish_reason",))
        self.refused = counter("requests_refused", "Requests that were refused because the queue was full.")
        self._time_to_first = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", SECONDS_BUCKETS
        )
        self._time_between = histogram(
            "time_between_tokens_seconds", "Time from a token to the next.", INTERVAL_BUCKETS
        )
        self._duration = histogram("request_seconds", "Time from arrival to the end.", SECONDS_BUCKETS)
        self._kv_ratio = histogram(
            "kv_ratio", "Entries held at a request's end, as a share of a full cache's.", SHARE_BUCKETS
        )

    def update(self, stats: EngineStats) -> None:
        """Update the gauges from the engine's state."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))

    def count_tokens(self, request: Request, tokens: int, age: float, since: float) -> None:
        """Count new tokens of an answer.

        Args:
            request: the answer's request.
            tokens: number of new tokens.
            age: seconds since the request arrived.
            since: seconds since the answer's last tokens before these.
        """
        self._generated_tokens.inc(tokens)
        if len(request.tokens) == tokens:
            self._time_to_first.observe(age)
            self._prompt_tokens.inc(request.prompt.size)
            self._cached_tokens.inc(request.cached)
        else:
            for _ in range(tokens):
                self._time_between.observe(since / tokens)

    def count_end(self, request: Request, age: float) -> None:
        """Count a request that ended `age` seconds after it arrived."""
        self._requests.labels(request.finish_reason).inc()
        if request.finish_reason != "abort":
            self._duration.observe(age)
            self._kv_ratio.observe(request.kv_ratio)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)
