"""Clients that go away, come all at once, or meet a server that ends."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import openai
import pytest

from molora_jax.generation import Engine
from tests.serving.conftest import CASES, MAX_WAITING, prompt_of, serving, until, weights

LONG = {"max_tokens": 80, "ignore_eos": True, "temperature": 0}


def connection(served, body, path="/v1/completions"):
    """A socket on which the request was sent."""
    data = json.dumps(body).encode()
    opened = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    opened.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return opened


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows(served, stream):
    """All of its answers, three here; the one beside them does not notice."""
    before = served.metric("molora_requests_total", model="b", outcome="cancelled")
    made = served.metric("molora_generated_tokens_total", model="b")
    body = {"model": "b", "prompt": "away", "n": 3, "stream": stream} | LONG
    with contextlib.closing(connection(served, body)) as opened:
        until(lambda: served.engine.num_running == 3)
        if stream:
            assert opened.recv(4096).startswith(b"HTTP/1.1 200")
    beside = served.complete(prompt=prompt_of("adapter"), model="a")
    assert beside["choices"][0]["text"] == served.expected["adapter"][0].text
    served.settle()
    until(lambda: served.metric("molora_requests_total", model="b", outcome="cancelled") > before)
    # Three whole answers would be 240 tokens; none of them came to its end.
    assert served.metric("molora_generated_tokens_total", model="b") - made < 3 * 80


def test_clients_that_go_away_while_they_wait_leave_the_queue(served):
    """Before a row is free: not one of their tokens is computed."""
    waiting = {"model": "d", "prompt": "wait"} | LONG
    before = served.metric("molora_requests_total", model="d", outcome="cancelled")
    made = served.metric("molora_generated_tokens_total", model="d")
    holding = [connection(served, {"model": "c", "prompt": "hold"} | LONG) for _ in range(4)]
    until(lambda: served.engine.num_running == 4)
    opened = [connection(served, waiting | {"stream": bool(i % 2)}) for i in range(4)]
    until(lambda: served.engine.num_waiting == 4)
    for each in opened:
        each.close()
    until(lambda: not served.engine.num_waiting)
    for each in holding:
        each.close()
    served.settle()
    until(
        lambda: served.metric("molora_requests_total", model="d", outcome="cancelled") == before + 4
    )
    assert served.metric("molora_generated_tokens_total", model="d") == made


def test_a_flood_gets_429_and_the_server_recovers(served):
    """Whoever is answered gets the right answer."""
    name, count = "learned", 60
    expected = served.expected[name][0].text

    def one(_):
        body = {"prompt": prompt_of(name), "max_tokens": 14, "ignore_eos": True, "temperature": 0}
        return served.call("POST", "/v1/completions", body | CASES[name][0])

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(one, range(count)))
    full = [(answer, headers) for status, answer, headers in answers if status == 429]
    good = [answer for status, answer, _ in answers if status == 200]
    assert len(full) + len(good) == count and full and len(good) >= MAX_WAITING
    assert all(answer["choices"][0]["text"] == expected for answer in good)
    for answer, headers in full:
        assert int(headers["Retry-After"]) >= 1
        assert answer["error"]["code"] == "queue_full"
        assert f"max_waiting {MAX_WAITING}" in answer["error"]["message"]
    assert served.metric("molora_requests_total", model="molora", outcome="queue_full") >= len(full)
    served.settle()
    assert one(0)[1]["choices"][0]["text"] == expected


def test_choices_that_do_not_all_fit_the_queue_are_not_begun(served):
    hold = [connection(served, {"model": "c", "prompt": "hold"} | LONG) for _ in range(8)]
    until(lambda: served.engine.num_waiting == 4)
    with pytest.raises(openai.RateLimitError):
        served.client.completions.create(model="a", prompt="x", n=12)
    for each in hold:
        each.close()
    served.settle()


def test_an_adapter_that_overflows_is_an_error_of_its_own_request(served, base):
    """The engine's words; a stream ends with them too, and the others get their tokens."""
    served.engine.hot_set.add(weights(base, 50, size=1e18), name="wild")
    served.service.catalog._adapters["wild"] = served.service.catalog._adapters["a"]
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            beside = pool.submit(served.complete, model="a", prompt=prompt_of("adapter"))
            with pytest.raises(openai.InternalServerError, match="logits are not finite"):
                served.client.completions.create(model="wild", prompt="x")
            with pytest.raises(openai.APIError, match="logits are not finite"):
                list(served.client.completions.create(model="wild", prompt="x", stream=True))
            assert beside.result()["choices"][0]["text"] == served.expected["adapter"][0].text
        assert served.metric("molora_requests_total", model="wild", outcome="failed") == 2
    finally:
        del served.service.catalog._adapters["wild"]
        served.engine.hot_set.remove("wild")
        served.service.metrics.forget("wild")
    served.settle()


class Broken(Engine):
    """An engine whose steps do as they are told; nothing of it is compiled."""

    def step(self):
        return self.stepping(self)


def broken(base, step):
    engine = Broken(base, rows=2, context=32)
    engine.stepping = step
    return engine


def test_a_step_that_raises_ends_every_request_and_health_says_so(base, caplog):
    arrived = threading.Event()

    def step(engine):
        arrived.wait(20)
        raise RuntimeError("the device is gone")

    body = {"model": "tiny", "prompt": "x", "max_tokens": 4}
    with (
        serving(broken(base, step), None) as served,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        calls = [
            pool.submit(served.call, "POST", "/v1/completions", body | {"stream": stream, "n": n})
            for stream, n in ((False, 1), (True, 2), (False, 2))
        ]
        until(lambda: served.engine.num_waiting == 5)
        arrived.set()
        answers = [call.result() for call in calls]
        for status, answer, _ in (answers[0], answers[2]):
            assert status in (400, 500) and "the engine has stopped" in answer["error"]["message"]
            assert "device" not in str(answer)
        assert "the engine has stopped" in answers[1][1]
        assert answers[1][1].endswith("data: [DONE]\n\n")
        assert served.call("GET", "/health")[0] == 500
        status, answer, _ = served.call("POST", "/v1/completions", body)
        assert status == 503 and "the engine has stopped" in answer["error"]["message"]
        assert served.call("GET", "/metrics")[0] == 200
    assert "the device is gone" in caplog.text


def test_a_server_that_is_told_to_stop_ends_what_is_under_way(base):
    """Within its grace; whoever is left then is told."""

    def step(engine):
        time.sleep(0.01)
        return Engine._drop_cancelled(engine)

    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with serving(broken(base, step), None, grace_seconds=0.3) as served:
            call = pool.submit(served.call, "POST", "/v1/completions", body)
            until(lambda: served.engine.num_waiting == 1)
        status, text, _ = call.result()
    assert status == 200 and "the server is shutting down" in text
    assert served.engine.idle
    with pytest.raises(ConnectionRefusedError):
        served.call("GET", "/health")
