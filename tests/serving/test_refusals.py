"""What cannot be answered is refused in one form, and the next request is served all the same."""

import json
import socket

import numpy as np
import openai
import pytest

from molora_jax.serving import app as app_module
from tests.serving.conftest import CONTEXT, MAX_WAITING, prompt_of

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = {"model": "tiny", "prompt": "x", "max_tokens": 2}
TURN = {"role": "user", "content": "x"}
TALK = {"model": "tiny", "messages": [TURN], "max_tokens": 2}

# Of a completion: fields beside those of ASK, the field that is blamed, words of the message.
COMPLETIONS = [
    ({"model": None}, "model", "model is missing"),
    ({"model": 7}, "model", "model is 7; expected a text"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "expected a text, a list of texts"),
    ({"prompt": 5}, "prompt", "prompt is 5"),
    ({"prompt": {}}, "prompt", "prompt is {}"),
    ({"prompt": [[]]}, "prompt", "prompt is []"),
    ({"prompt": ["x", [1]]}, "prompt", "mixes texts and token ids"),
    ({"prompt": [[1], ["x"]]}, "prompt[1]", "prompt[1] is ['x']"),
    ({"prompt": [1, True]}, "prompt[0]", "is 1; expected"),
    ({"prompt": [1, 2.0]}, "prompt[0]", "expected a text"),
    ({"prompt": [[[1]]]}, "prompt", "expected a text"),
    ({"prompt": [1, 260]}, "prompt", "token id 260; the vocabulary has 260"),
    ({"prompt": [[5], [-1]]}, "prompt[1]", "token id -1"),
    ({"prompt": [10**30]}, "prompt", "token id 1000000000"),
    ({"prompt": "x" * 200}, "prompt", "has 200 tokens and max_tokens 2; both together may have 96"),
    ({"prompt": ["x", "y" * 95]}, "prompt[1]", "has 95 tokens and max_tokens 2"),
    ({"prompt": "x", "max_tokens": 96}, "prompt", "has 1 tokens and max_tokens 96; both together"),
    ({"prompt": ["x"] * 13}, "prompt", "holds 13 prompts; the queue takes 12"),
    ({"n": 13}, "n", "13 answers; the queue takes 12"),
    ({"n": 0}, "n", "n is 0; expected a whole number, 1 or more"),
    ({"n": True}, "n", "n is True"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
    ({"max_tokens": -5}, "max_tokens", "max_tokens is -5"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens is '5'"),
    ({"max_tokens": 10**25}, "prompt", "max_tokens 1000000"),
    ({"temperature": -0.1}, "temperature", "temperature is -0.1; expected 0 to 2"),
    ({"temperature": 1e300}, "temperature", "expected 0 to 2"),
    ({"temperature": "hot"}, "temperature", "expected a number"),
    ({"temperature": True}, "temperature", "expected a number"),
    ({"top_p": 0}, "top_p", "more than 0"),
    ({"top_p": 1.1}, "top_p", "expected 0 to 1"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"seed": -1}, "seed", "seed is -1"),
    ({"seed": 2**32}, "seed", "0 to 4294967295"),
    ({"stop": 5}, "stop", "stop is 5"),
    ({"stop": [""]}, "stop", "1 to 1024 characters"),
    ({"stop": ["x" * 1025]}, "stop", "1 to 1024 characters"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 texts, not 17"),
    ({"stop": [["x"]]}, "stop", "a list of texts"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "logprobs is True"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream: true"),
    (
        {"stream_options": {"usage": True}, "stream": True},
        "stream_options",
        "unknown field 'usage'",
    ),
    ({"stream_options": [], "stream": True}, "stream_options", "expected a JSON object"),
    ({"return_routing": 1}, "return_routing", "true or false"),
    ({"ignore_eos": "no"}, "ignore_eos", "true or false"),
    ({"temprature": 0.5}, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
    ({"messages": []}, "messages", "unknown field 'messages'"),
    ({"best_of": 3}, "best_of", "best_of is not supported: only n, which is 1"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "only null or 0 is taken"),
    ({"presence_penalty": -1}, "presence_penalty", "not supported"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not supported"),
    ({"logit_bias": {"5": 100}}, "logit_bias", "not supported"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"echo": True}, "echo", "not supported"),
    ({"min_p": 0.1}, "min_p", "not supported"),
    ({"stop_token_ids": [5]}, "stop_token_ids", "not supported"),
    ({"adapter_weights": {"a": 0.5}}, "adapter_weights", "only null is taken"),
    ({"adapters": ["a"]}, "adapters", "chooses among those of a learned routing profile"),
    ({"adapters": ["a"], "model": "a"}, "adapters", "name the adapter as model"),
    ({"adapters": ["a"], "model": "vocab"}, None, "among is for learned profiles"),
    ({"adapters": ["b"], "model": "molora"}, None, "profile 'molora' has d, a, c"),
    ({"adapters": [], "model": "molora"}, None, "among is []"),
    ({"adapters": "", "model": "molora"}, "adapters", "a list of texts"),
]
CHATS = [
    ({"messages": None}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "messages is []"),
    ({"messages": "hi"}, "messages", "expected a list of messages"),
    ({"messages": [5]}, "messages[0]", "expected role and content"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
    ({"messages": [{"content": "x"}]}, "messages[0]", "role is None"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "role is 'tool'"),
    ({"messages": [TURN | {"name": "bob"}]}, "messages[0]", "name is not supported"),
    ({"messages": [TURN | {"tool_calls": [{}]}]}, "messages[0]", "tool_calls is not supported"),
    ({"messages": [TURN | {"contents": 1}]}, "messages[0]", "did you mean 'content'"),
    ({"messages": [TURN, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[1]", "only parts of type text are read"),
    ({"messages": [TURN | {"content": []}]}, "messages[0]", "content is []"),
    ({"messages": [TURN | {"content": [{"type": "text", "text": 5}]}]}, "messages[0]", "a part of"),
    ({"messages": [TURN | {"content": "x" * 100}]}, "messages", "both together may have 96"),
    ({"messages": [TURN | {"content": "x" * 100}], "max_tokens": None}, "messages", "tokens; both"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs: true"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "0 to 20"),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"max_completion_tokens": 5}, "max_tokens", "give one"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"prompt": "x"}, "prompt", "unknown field 'prompt'"),
    ({"store": True}, "store", "not supported"),
]  # fmt: skip


def refused(served, path, body, **headers):
    """(status, error) of a request that must be refused."""
    status, answer, _ = served.call("POST", path, body, headers=headers)
    assert 400 <= status < 500, answer
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert "Traceback" not in str(answer)
    return status, answer["error"]


@pytest.mark.parametrize(
    ("path", "ask", "cases"), [(COMPLETE, ASK, COMPLETIONS), (CHAT, TALK, CHATS)]
)
def test_what_is_wrong_in_a_body_is_named_and_the_next_is_served(served, path, ask, cases):
    for fields, param, words in cases:
        status, error = refused(served, path, ask | fields)
        assert (status, error["param"]) == (400, param), (fields, error)
        assert words in error["message"], (fields, error)
    assert served.call("POST", path, ask)[0] == 200
    served.settle()


ODD = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, 5e-324, "", "x", "a",
    "tiny", "\x00", "é" * 300, "<|im_end|>", [], {}, [0], [[0]], ["x"], [None], [[[]]], {"a": 1},
    [1, "x"], {"type": "text"}, [{"role": "user", "content": "x"}], [{"role": "user"}], "molora",
]  # fmt: skip


@pytest.mark.parametrize(("path", "ask"), [(COMPLETE, ASK), (CHAT, TALK)])
def test_random_bodies_are_answered_or_refused(served, path, ask):
    """Nasty values in random fields: no status of the 500s, and the server stays."""
    names = [
        *ask, "n", "temperature", "top_p", "top_k", "seed", "stop", "logprobs", "top_logprobs",
        "stream", "stream_options", "adapters", "return_routing", "ignore_eos", "user", "tools",
        "logit_bias", "best_of", "max_completion_tokens", "response_format", "x",
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(150):
        chosen = rng.choice(names, size=rng.integers(1, 4), replace=False)
        body = ask | {str(name): ODD[rng.integers(len(ODD))] for name in chosen}
        status, answer, _ = served.call("POST", path, body)
        seen.add(status)
        assert status in (200, 400, 404), (body, answer)
        assert "engine_error" not in str(answer)
    assert {200, 400} <= seen
    assert served.complete(model="a", prompt=prompt_of("adapter"))["choices"][0]["text"] == (
        served.expected["adapter"][0].text
    )
    served.settle()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b"{}", b'{"model": "tiny"}',
        b'{"model": NaN}', b'{"model": "tiny", "model": "a"}', b"[" * 5000, b'{"a":' * 300,
        b'{"model": "tiny", "prompt": "\\ud83d"}', b'{"model": "tiny", "prompt": 1e999}',
        b'{"model": "\\u0000", "prompt": "x"}', b"model=tiny&prompt=x", b"\x80\x04K\x05.",
    ],
)  # fmt: skip
def test_nonsense_is_no_request(served, body):
    for path in (COMPLETE, CHAT, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        refused(served, path, body)
    assert served.complete(prompt="x")["choices"]


def test_an_unknown_model_is_404_with_the_names_that_are_known(served):
    for model in ("aa", "tiny:x", "other:a", "a:b", ":a", "molor", "x" * 5000, "../a", "💥"):
        status, error = refused(served, COMPLETE, ASK | {"model": model})
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "tiny, a, b, c, d, molora, vocab" in error["message"]
    _, error = refused(served, COMPLETE, ASK | {"model": "molor"})
    assert "Did you mean 'molora'?" in error["message"]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.client.completions.create(model="gpt-4", prompt="x")


def test_a_flood_of_names_makes_one_series(served):
    def names():
        _, text, _ = served.call("GET", "/metrics")
        return {
            line.split('model="')[1].split('"')[0]
            for line in text.splitlines()
            if 'model="' in line
        }

    for number in range(30):
        refused(served, COMPLETE, ASK | {"model": f"name-{number}"})
    assert "(unknown)" in names()
    assert names() <= {"(unknown)", "tiny", "a", "b", "c", "d", "molora", "vocab"}


def test_fields_that_change_nothing_are_taken(served):
    neutral = {
        "user": "me", "metadata": {"k": "v"}, "frequency_penalty": 0, "presence_penalty": 0.0,
        "logit_bias": {}, "best_of": 1, "suffix": "", "echo": False, "n": 1, "min_p": 0,
        "repetition_penalty": 1.0, "service_tier": "auto", "store": False, "stream": False,
        "stream_options": None, "stop": None, "logprobs": None, "seed": None, "top_p": 1,
        "top_k": -1, "adapter_weights": None, "skip_special_tokens": True,
    }  # fmt: skip
    assert served.call("POST", COMPLETE, ASK | neutral)[0] == 200
    talk = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": [],
        "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": None,
        "prediction": None, "max_completion_tokens": 2, "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    assert served.call("POST", CHAT, TALK | talk)[0] == 200


def test_a_body_of_another_type_or_too_large_is_not_read(served):
    for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
        status, error = refused(served, COMPLETE, ASK, **{"Content-Type": kind})
        assert status == 415 and "expected application/json" in error["message"]
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.call("POST", COMPLETE, ASK, headers=fine)[0] == 200
    limit = served.service.max_body_bytes
    status, error = refused(served, COMPLETE, ASK | {"prompt": "x" * limit})
    assert status == 413 and f"at most {limit}" in error["message"]
    assert served.complete(prompt="x")["choices"]


def raw(served, *parts, read=True):
    """What comes back, until the server closes the connection."""
    found = b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while read and (data := connection.recv(2**16)):
                found += data
        except (ConnectionResetError, BrokenPipeError):
            assert len(parts) > 50  # it went on sending what nobody reads
    return found


def test_a_body_that_lies_about_its_size_or_never_ends_is_cut_off(served, monkeypatch):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%s\r\n" % (2**17, b" " * 2**17)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    found = raw(served, chunked, *[chunk] * 12, b"0\r\n\r\n")
    assert b" 413 " in found.splitlines()[0] and b"body_too_large" in found
    raw(served, chunked, *[chunk] * 1000)
    found = raw(served, head + b"Content-Length: 99999999999\r\n\r\n")
    assert b" 413 " in found.splitlines()[0]
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)
    found = raw(served, head + b"Content-Length: 50\r\n\r\n{")
    assert b" 408 " in found.splitlines()[0] and b"did not come within" in found
    raw(served, head + b"Content-Length: 50\r\n\r\n{", read=False)
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n"):
        raw(served, garbage, b"\r\n\r\n", read=False)
    assert served.complete(prompt="x")["choices"]


def test_other_paths_and_methods_have_the_same_form(served):
    for method, path, expected in (
        ("GET", "/", 404), ("GET", "/v1/embeddings", 404), ("GET", COMPLETE, 405),
        ("DELETE", "/v1/models/a", 405), ("POST", "/health", 405), ("GET", "/v1/models/x", 404),
        ("GET", "/v1/models/..%2f..%2fetc", 404), ("GET", "/v1//completions", 404),
    ):  # fmt: skip
        status, answer, _ = served.call(method, path)
        assert (status, answer["error"]["param"] in (None, "model")) == (expected, True), path
        assert json.dumps(answer)


def test_an_unexpected_failure_is_500_without_a_trace(served, monkeypatch):
    def fail(body, catalog, engine):
        raise RuntimeError("secret words")

    before = served.metric("molora_requests_total", model="(unknown)", outcome="failed")
    monkeypatch.setattr(app_module, "read_completion", fail)
    status, answer, _ = served.call("POST", COMPLETE, ASK)
    monkeypatch.undo()
    assert status == 500 and "secret" not in str(answer)
    assert answer["error"]["type"] == "server_error"
    assert served.metric("molora_requests_total", model="(unknown)", outcome="failed") == before + 1
    assert served.complete(prompt="x")["choices"]
    assert (CONTEXT, MAX_WAITING) == (96, 12)  # which the tables above spell out
