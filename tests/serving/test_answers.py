"""Answers over HTTP are those of the engine, in the forms that OpenAI's client reads."""

import concurrent.futures
import json
import time

import openai
import pytest

from molora_jax.generation.text_stream import TextStream
from molora_jax.serving.answers import token_bytes, token_text
from tests.serving.conftest import CASES, TOKENS, prompt_of

SERVED = [name for name in CASES if CASES[name][0]["model"] != "e"]


def texts(base, generation):
    return [token_text(base.tokenizer, token) for token in generation.tokens]


def ask(served, name, **fields):
    body = {"prompt": prompt_of(name), "logprobs": 0} | CASES[name][0] | fields
    return served.complete(**body)


@pytest.mark.parametrize("name", SERVED)
def test_an_answer_has_the_engines_tokens(served, base, name):
    answer, expected = ask(served, name), served.expected[name]
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    for choice, each in zip(answer["choices"], expected, strict=True):
        assert choice["logprobs"]["tokens"] == texts(base, each)
        assert choice["text"] == each.text
        assert choice["finish_reason"] == "length"
    prompt = len(base.tokenizer.encode(prompt_of(name)))
    made = TOKENS * len(expected)
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
    }  # fmt: skip
    assert answer["model"] == CASES[name][0]["model"]


def test_mixed_answers_at_once_are_the_same_and_compile_nothing(served, base):
    """The answers all differ, so that one given to another client would be seen."""
    assert len({tuple(each.tokens) for name in SERVED for each in served.expected[name]}) == 8
    compiled = served.metric("molora_compilations_since_warm_up_total")
    before = served.metric("molora_requests_total", model="a", outcome="completed")
    names = SERVED * 2
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # fewer than may wait
        answers = list(pool.map(lambda name: ask(served, name), names))
    for name, answer in zip(names, answers, strict=True):
        for choice, each in zip(answer["choices"], served.expected[name], strict=True):
            assert choice["logprobs"]["tokens"] == texts(base, each), name
    assert served.metric("molora_requests_total", model="a", outcome="completed") == before + 2
    assert served.metric("molora_compilations_since_warm_up_total") == compiled
    served.settle()


@pytest.mark.parametrize("name", ["base and adapter", "learned", "sampled"])
def test_a_stream_of_the_real_client_adds_up_to_the_answer(served, name):
    fields = dict(CASES[name][0])
    extra = {key: fields.pop(key) for key in ("top_k", "adapters") if key in fields}
    stream = served.client.completions.create(
        prompt=prompt_of(name), max_tokens=TOKENS, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True, **extra},
        **({"temperature": 0} | fields),
    )  # fmt: skip
    *chunks, last = stream
    for index, each in enumerate(served.expected[name]):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == each.text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
        assert len(mine) > 4
        assert "\ufffd" not in each.text or any("\ufffd" in choice.text for choice in mine)
    assert last.choices == []
    assert last.usage.completion_tokens == TOKENS * len(served.expected[name])


def test_a_chat_reads_the_template_whole_and_streamed(served, base):
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None},
        {"role": "user", "content": "d"},
    ]
    prompt = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = served.complete(model="a", prompt=prompt, max_tokens=6, logprobs=1)["choices"][0]
    common = {
        "model": "a", "messages": turns, "temperature": 0, "logprobs": True, "top_logprobs": 1,
        "max_completion_tokens": 6, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = served.client.chat.completions.create(**common)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.message.content == plain["text"]
    entries = choice.logprobs.content
    assert [each.token for each in entries] == plain["logprobs"]["tokens"]
    assert [each.logprob for each in entries] == plain["logprobs"]["token_logprobs"]
    assert [each.top_logprobs[0].token for each in entries] == [
        max(top, key=top.get) for top in plain["logprobs"]["top_logprobs"]
    ]
    chunks = list(served.client.chat.completions.create(stream=True, **common))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain["text"]
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [bytes(each.bytes) for each in streamed] == [bytes(each.bytes) for each in entries]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_length_may_fill_the_context(served, base):
    turns = [{"role": "user", "content": "x"}]
    body = {"model": "tiny", "messages": turns, "temperature": 0, "ignore_eos": True}
    status, answer, _ = served.call("POST", "/v1/chat/completions", body)
    assert status == 200
    assert answer["usage"]["total_tokens"] == served.engine.context
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_may_be_texts_or_ids_alone_or_in_a_list(served, base):
    one, two = "first: ", "the second one: "
    ids = [base.tokenizer.encode(each) for each in (one, two)]
    alone = [served.complete(prompt=each, model="b")["choices"][0]["text"] for each in (one, two)]
    assert alone[0] != alone[1]
    assert served.complete(prompt=ids[0], model="b")["choices"][0]["text"] == alone[0]
    for prompts in ([one, two], ids):
        answer = served.complete(prompt=prompts, model="b", n=2)
        # n answers of the first prompt, then n of the second.
        assert [c["text"] for c in answer["choices"]] == [alone[0]] * 2 + [alone[1]] * 2
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_seeds_repeat_and_without_one_answers_differ(served):
    def draw(**fields):
        return served.complete(prompt="x", temperature=2.0, **fields)["choices"][0]["text"]

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert draw() != draw()
    greedy = served.complete(prompt="x")["choices"][0]["text"]
    assert draw(seed=3, top_k=1) == draw(seed=4, top_k=1) == greedy
    assert draw(seed=3, top_k=10**15) == draw(seed=3) == draw(seed=3, top_k=-1)  # all tokens


def test_stop_texts_and_end_tokens_end_an_answer(served, base):
    free = served.expected["adapter"][0]
    fields = {"model": "a", "prompt": prompt_of("adapter"), "logprobs": 0}
    at = next(i for i in range(2, len(free.text)) if free.text[i] != "\ufffd")
    stop = free.text[at]
    answer = served.complete(stop=["never", stop], **fields)
    (choice,) = answer["choices"]
    assert choice["text"] == free.text[: free.text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) <= TOKENS
    assert served.complete(stop=stop, **fields)["choices"][0]["text"] == choice["text"]
    real = base.tokenizer.eos_ids
    try:
        base.tokenizer.eos_ids = (free.tokens[3],)
        ended = served.complete(ignore_eos=False, **fields)
    finally:
        base.tokenizer.eos_ids = real
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == free.tokens.index(free.tokens[3]) + 1


def test_logprobs_are_the_engines(served, base):
    for name in ("base", "learned"):
        (expected,) = served.expected[name]
        found = ask(served, name, logprobs=2)["choices"][0]["logprobs"]
        assert found["token_logprobs"] == pytest.approx([e.logprob for e in expected.logprobs])
        for top, each in zip(found["top_logprobs"], expected.logprobs, strict=True):
            names = [token_text(base.tokenizer, token) for token, _ in each.top]
            assert list(top)[:2] == names
            assert [top[n] for n in names] == pytest.approx([p for _, p in each.top])
        shown = TextStream(base.tokenizer)
        lengths = [len(shown.push(token)) for token in expected.tokens]
        assert found["text_offset"] == [sum(lengths[:at]) for at in range(TOKENS)]
    assert ask(served, "base", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None
    assert ask(served, "base", logprobs=None)["choices"][0]["logprobs"] is None


def test_tokens_that_are_no_whole_character_are_told_by_their_bytes(base):
    whole = [token_bytes(base.tokenizer, token) for token in base.tokenizer.encode("é a")]
    assert b"".join(whole) == "é a".encode()
    assert token_text(base.tokenizer, 0xC3) == "bytes:\\xc3"
    assert token_text(base.tokenizer, 97) == "a"
    assert token_bytes(base.tokenizer, 257) == b"<|im_start|>"


def test_routing_names_the_adapter_of_every_token(served, base):
    prompt = base.tokenizer.encode(prompt_of("table"))
    found = ask(served, "table", return_routing=True)["choices"][0]["routing"]
    read = [*prompt, *served.expected["table"][0].tokens[:-1]]
    names = [[None, "a", "b"][token % 3] for token in read]
    assert found["tokens"] == names and {"a", "b", None} == set(names)
    assert found["adapters"] == ["a", "b"]
    assert found["layers"] == [[-1 if n is None else found["adapters"].index(n) for n in names]]
    learned = ask(served, "some adapters", return_routing=True)["choices"][0]["routing"]
    assert learned["adapters"] == ["a", "c"] and set(learned["tokens"]) == {"a", "c"}
    assert len(learned["layers"]) == base.config.num_layers
    assert {at for layer in learned["layers"] for at in layer} == {0, 1}
    assert set(ask(served, "base", return_routing=True)["choices"][0]["routing"]["tokens"]) == {
        None
    }
    assert "routing" not in ask(served, "table")["choices"][0]


def test_models_are_listed_with_parents_and_found_by_name(served):
    models = {each.id: each for each in served.client.models.list()}
    assert list(models) == ["tiny", "a", "b", "c", "d", "molora", "vocab"]
    assert models["tiny"].parent is None
    assert all(models[name].parent == "tiny" for name in models if name != "tiny")
    for each in models.values():
        assert each.object == "model" and each.owned_by == "molora-jax" and each.root
        assert abs(each.created - time.time()) < 3600
    assert models["vocab"].adapters == ["a", "b"]
    assert models["a"].digest == "sha256:" + served.engine.hot_set.version("a").digest
    assert served.client.models.retrieve("tiny:a").id == "a"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'molora'"):
        served.client.models.retrieve("molara")


def test_a_stream_is_server_sent_events(served):
    body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 3, "ignore_eos": True}
    status, text, headers = served.call("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert text.endswith("data: [DONE]\n\n")
    events = text.split("\n\n")[:-2]
    assert all("usage" not in json.loads(each.removeprefix("data: ")) for each in events)


def test_health_and_metrics_tell_of_the_engine(served):
    assert served.call("GET", "/health")[:2] == (200, {"status": "ok"})
    before = served.metric("molora_generated_tokens_total", model="c")
    first = served.metric("molora_time_to_first_token_seconds_count")
    between = served.metric("molora_time_per_token_seconds_count")
    served.complete(model="c", prompt="12345", max_tokens=5)
    assert served.metric("molora_generated_tokens_total", model="c") == before + 5
    assert served.metric("molora_prompt_tokens_total", model="c") >= 5
    assert served.metric("molora_time_to_first_token_seconds_count") == first + 1
    assert served.metric("molora_time_per_token_seconds_count") == between + 4
    assert served.metric("molora_adapters_loaded") == 4
    slots = served.metric("molora_adapter_slots")
    assert slots == 4 >= served.metric("molora_adapters_resident") > 0
    assert served.metric("molora_requests_running") == served.metric("molora_requests_waiting") == 0
