"""Metrics in Prometheus' form. Rates, such as tokens per second, are those of the counters: `rate(…[1m])`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvjax.engine import EngineStats, Request

SECONDS = [0.005 * 2**i for i in range(16)]
"""Bounds of the histograms' buckets, from 5 ms to 164 s."""
BETWEEN = [0.001 * 2**i for i in range(13)]
SHARES = [i / 10 for i in range(1, 11)]


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
            "waiting": gauge("requests_waiting", "Requests that wait, or whose prompt is being read."),
            "paused": gauge("requests_paused", "Answers that wait in host memory for pages."),
            "forks": gauge("forks", "Contexts, and ends of prompts that later prompts may go on from."),
            "pages": gauge("pool_pages_used", "Pages of the pool in use."),
            "pool_pages": gauge("pool_pages", "Pages of the pool."),
        }
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_tokens", "Tokens of prompts that an earlier prompt had read.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        self._ended = counter("requests", "Requests that ended.", ("finish_reason",))
        self.refused = counter("requests_refused", "Requests that were refused since the queue was full.")
        self._first = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", SECONDS
        )
        self._between = histogram("time_between_tokens_seconds", "Time from a token to the next.", BETWEEN)
        self._whole = histogram("request_seconds", "Time from arrival to the end.", SECONDS)
        self._kept = histogram(
            "kv_ratio", "Entries held at a request's end, as a share of a full cache's.", SHARES
        )

    def holds(self, stats: EngineStats) -> None:
        """Note what the engine holds."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))

    def came(self, request: Request, tokens: int, age: float, since: float) -> None:
        """Note new tokens of an answer: how many, how many seconds after it arrived, and since its last ones."""
        self._generated.inc(tokens)
        if len(request.tokens) == tokens:
            self._first.observe(age)
            self._prompt.inc(request.prompt.size)
            self._cached.inc(request.cached)
        else:
            for _ in range(tokens):
                self._between.observe(since / tokens)

    def ended(self, request: Request, age: float) -> None:
        """Note that a request ended so many seconds after it arrived."""
        self._ended.labels(request.finish_reason).inc()
        if request.finish_reason != "abort":
            self._whole.observe(age)
            self._kept.observe(request.kv_ratio)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self._registry)
