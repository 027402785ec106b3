"""One server for all tests of this folder: a real socket, the tiny random base, six adapters."""

import contextlib
import dataclasses
import http.client
import json
import threading
import time
from pathlib import Path

import numpy as np
import openai
import pytest
from flax import nnx

from molora_jax.adapters import Adapter, AdapterBank, HotSet, save_adapter
from molora_jax.generation import Engine, Generation, Profile, Request, Sampling
from molora_jax.models import load_base
from molora_jax.routing import LearnedRouter, VocabularyRouter
from molora_jax.serving.app import Service
from molora_jax.serving.catalog import Catalog
from molora_jax.serving.server import Server, bind
from tests.adapters.make import arrays_for, modules_of

NAMES, PROFILES = ("a", "b", "c", "d"), ("molora", "vocab")
ROWS, CONTEXT, MAX_WAITING = 4, 96, 12
# What is asked over HTTP beside the model, and of the engine itself: (body, request).
CASES = {
    "base": ({"model": "tiny"}, {}),
    "adapter": ({"model": "a"}, {"adapter": "a"}),
    "base and adapter": ({"model": "tiny:b"}, {"adapter": "b"}),
    "table": ({"model": "vocab"}, {"profile": "vocab"}),
    "learned": ({"model": "molora"}, {"profile": "molora"}),
    "some adapters": (
        {"model": "molora", "adapters": ["a", "c"]},
        {"profile": "molora", "among": ("a", "c")},
    ),
    "sampled": (
        {"model": "d", "temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "n": 2},
        {"adapter": "d", "sampling": Sampling(temperature=0.9, top_p=0.9, top_k=50), "seed": 7},
    ),
    "loaded later": ({"model": "e"}, {"adapter": "e"}),
    "its next content": ({"model": "e"}, {"adapter": "f"}),
}
TOKENS = 14
LATER = {"e": 10, "f": 11}  # adapters in the server's adapter root, by their seeds


@pytest.fixture(scope="session")
def base():
    return load_base("tiny-random")


def weights(base, seed, *, size=0.5, rank=4):
    """A LoRA that changes the answers: B is not zero."""
    arrays = arrays_for(modules_of(base.config), rank, seed=seed, config=base.config)
    arrays = {name: (size * a, size * b) for name, (a, b) in arrays.items()}
    return Adapter.from_arrays("x", arrays, alpha=1.0, num_layers=base.config.num_layers)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


@dataclasses.dataclass
class Served:
    """A running server, the engine in it, and ways to ask both."""

    engine: Engine
    service: Service
    server: Server
    port: int
    root: Path
    expected: dict[str, list[Generation]]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0
        )

    def call(self, method, path, body=None, *, headers=None, raw=False):
        """(status, parsed answer or text, headers) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            head = {"Content-Type": "application/json"} | (headers or {})
            connection.request(method, path, data, {k: v for k, v in head.items() if v is not None})
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.headers.get("content-type", "")
            parsed = json.loads(text) if "json" in kind and not raw else text
            return answer.status, parsed, answer.headers

    def complete(self, **fields):
        """The answer to a case's prompt, greedy unless told otherwise; fails on any error."""
        body = {"model": "tiny", "prompt": "", "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"temperature": 0} | fields
        status, answer, _ = self.call("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def metric(self, name, **labels):
        """A sample of /metrics; 0 where there is none."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        _, text, _ = self.call("GET", "/metrics")
        for line in text.splitlines():
            head, _, value = line.rpartition(" ")
            given, _, inner = head.partition("{")
            if given == name and wanted == set(filter(None, inner.rstrip("}").split(","))):
                return float(value)
        return 0.0

    def settle(self, seconds=20.0):
        """Waits until nothing runs; then no adapter may be held."""
        until(lambda: self.engine.idle, seconds)
        bank = self.engine.hot_set.bank
        assert not any(bank.holds(each.digest) for each in bank.list())


def prompt_of(name: str) -> str:
    """Another for every case, so that answers cannot be mistaken for each other."""
    return f"{name} = café 日本: "


def expected_answers(engine) -> dict[str, list[Generation]]:
    """Of every case, by the engine alone; adapters e and f are there for this only."""
    found = {}
    for name, seed in LATER.items():
        engine.hot_set.add(weights(engine.base, seed), name=name)
    for name, (body, fields) in CASES.items():
        ids = engine.base.tokenizer.encode(prompt_of(name))
        request = Request(prompt=ids, max_tokens=TOKENS, ignore_eos=True, logprobs=2, **fields)
        found[name] = engine.run(request.samples(body.get("n", 1)))
        assert all(each.finish_reason == "length" for each in found[name])
    for name in LATER:
        engine.hot_set.remove(name)
    return found


def make_engine(base, **settings) -> Engine:
    """Four rows and four slots, a learned profile `molora` and `vocab`, a table of token ids."""
    c = base.config
    hot = HotSet(AdapterBank(c, num_slots=4, max_rank=4))
    for seed, name in enumerate(NAMES):
        hot.add(weights(base, seed), name=name)
    learned = LearnedRouter(c.hidden_size, 3, top_k=2, num_layers=c.num_layers, rngs=nnx.Rngs(3))
    bound = ("d", "a", "c")
    profiles = {
        "molora": Profile(
            router=learned, adapters=bound, digests=[hot.version(name).digest for name in bound]
        ),
        "vocab": Profile(
            router=VocabularyRouter(np.arange(c.vocab_size) % 3 - 1), adapters=("a", "b")
        ),
    }
    fields = {"rows": ROWS, "context": CONTEXT, "buckets": (CONTEXT,)} | settings
    return Engine(base, hot, profiles=profiles, max_waiting=MAX_WAITING, **fields)


@contextlib.contextmanager
def serving(engine, root, *, expected=None, grace_seconds=1.0):
    """Serves the engine from a thread until the block ends."""
    profiles = {name: engine.profiles[name] for name in PROFILES if engine.hot_set}
    catalog = Catalog(engine, base_id="tiny", profiles=profiles, adapter_root=root)
    service = Service(engine, catalog)
    ready = threading.Event()
    with bind("127.0.0.1", 0) as sock:
        server = Server(service, grace_seconds=grace_seconds, on_ready=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        assert ready.wait(30)
        try:
            yield Served(engine, service, server, sock.getsockname()[1], root, expected or {})
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")  # what one module compiled may be let go of before the next
def served(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    for name, seed in LATER.items():
        save_adapter(weights(base, seed), root / name)
    engine = make_engine(base)
    engine.warm_up()
    with serving(engine, root, expected=expected_answers(engine)) as found:
        yield found
