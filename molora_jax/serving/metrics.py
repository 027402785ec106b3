"""Numbers about a server for Prometheus, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from molora_jax.generation import Engine

OTHER = "(unknown)"  # the label of every name that nobody serves (any more)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What `/metrics` tells: counted as it happens, or read from the engine when asked.

    known  whether a name is served now; others share one label, so that a flood of names, or
           adapters that come and go, cannot fill the memory
    """

    def __init__(self, engine: Engine, *, known: Callable[[str], bool]):
        self._known = known
        self.registry = CollectorRegistry()
        self.compiled: list[str] = []
        self._requests = Counter(
            "molora_requests",
            "Requests over HTTP by outcome: completed, cancelled (the client went away), refused, "
            "queue_full, failed.",
            ["model", "outcome"],
            registry=self.registry,
        )
        self._prompt = Counter(
            "molora_prompt_tokens", "Tokens read as prompts.", ["model"], registry=self.registry
        )
        self._generated = Counter(
            "molora_generated_tokens", "Tokens generated.", ["model"], registry=self.registry
        )
        self._first = Histogram(
            "molora_time_to_first_token_seconds",
            "From a request's arrival in the queue to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._next = Histogram(
            "molora_time_per_token_seconds",
            "Between two tokens of one answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_FromEngine(engine, self))

    def request(self, label: str, outcome: str) -> None:
        """One request over HTTP has ended."""
        self._requests.labels(self._label(label), outcome).inc()

    def tokens(self, label: str, *, prompt: int, generated: int) -> None:
        """What one request read and wrote."""
        self._prompt.labels(self._label(label)).inc(prompt)
        self._generated.labels(self._label(label)).inc(generated)

    def first_token(self, seconds: float) -> None:
        """An answer has begun."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """An answer has gone on."""
        self._next.observe(seconds)

    def forget(self, label: str) -> None:
        """Drops the series of a name that is served no longer."""
        for each in (self._prompt, self._generated):
            each.remove_by_labels({"model": label})
        self._requests.remove_by_labels({"model": label})

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _label(self, name: str) -> str:
        return name if self._known(name) else OTHER


class _FromEngine(Collector):
    def __init__(self, engine: Engine, metrics: Metrics):
        self._engine, self._metrics = engine, metrics

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield GaugeMetricFamily(
            "molora_requests_running", "Answers being decoded.", engine.num_running
        )
        yield GaugeMetricFamily(
            "molora_requests_waiting", "Answers without a row yet.", engine.num_waiting
        )
        yield GaugeMetricFamily("molora_rows", "Answers decoded together at most.", engine.rows)
        yield CounterMetricFamily(
            "molora_compilations_since_warm_up",
            "Programs compiled since the server was ready: 0, or something recompiles.",
            len(self._metrics.compiled),
        )
        if engine.hot_set is None:
            return
        bank = engine.hot_set.bank
        resident = bank.list()
        # Ids are given in order and never twice, so the largest tells how many slots were written.
        writes = max((each.id for each in resident), default=-1) + 1
        yield GaugeMetricFamily(
            "molora_adapters_loaded", "Adapters on the host.", len(engine.hot_set.list())
        )
        yield GaugeMetricFamily("molora_adapter_slots", "Slots of the bank.", bank.num_slots)
        yield GaugeMetricFamily("molora_adapters_resident", "Slots in use.", len(resident))
        yield CounterMetricFamily(
            "molora_adapter_slot_writes", "Adapters copied into a slot.", writes
        )
        yield CounterMetricFamily(
            "molora_adapter_evictions",
            "Slots taken from an idle adapter for another.",
            writes - len(resident),
        )
