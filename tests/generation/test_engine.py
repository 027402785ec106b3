"""The engine: every request gets what it would get alone, whoever else is served with it."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.hot_set import HotSet
from molora_jax.compilations import count_compilations
from molora_jax.generation import Sampling, generate
from molora_jax.generation.engine import Engine, QueueFull
from molora_jax.generation.profiles import Profile
from molora_jax.generation.request import Generation, Request
from molora_jax.models import load_base
from molora_jax.routing import (
    ControlTokenRouter,
    LearnedRouter,
    SequenceRouter,
    VocabularyRouter,
)
from tests.adapters.make import arrays_for, modules_of
from tests.helpers import unchecked_shapes

NAMES = ("a", "b", "c", "d", "e", "f")
SWITCH = {5: 0, 6: 1, 7: -1}  # control token: column of ("b", "c")


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-random")


def weights(base, seed, *, size=0.5):
    """A LoRA that changes the answers: B is not zero."""
    from molora_jax.adapters import Adapter

    arrays = arrays_for(modules_of(base.config), 4, seed=seed, config=base.config)
    arrays = {name: (size * a, size * b) for name, (a, b) in arrays.items()}
    return Adapter.from_arrays("x", arrays, alpha=1.0, num_layers=base.config.num_layers)


@pytest.fixture(scope="module")
def engine(base):
    """Four rows, four slots, six adapters, a rule of every kind; compiled once."""
    c = base.config
    hot = HotSet(AdapterBank(c, num_slots=4, max_rank=4))
    for seed, name in enumerate(NAMES):
        hot.add(weights(base, seed), name=name)
    learned = LearnedRouter(c.hidden_size, 4, top_k=2, num_layers=c.num_layers, rngs=nnx.Rngs(3))
    table = np.arange(c.vocab_size) % 3 - 1
    profiles = {
        "vocabulary": Profile(router=VocabularyRouter(table), adapters=("a", "b")),
        "control": Profile(
            router=ControlTokenRouter.from_tokens(SWITCH, vocab_size=c.vocab_size),
            adapters=("b", "c"),
        ),
        "learned": Profile(router=learned, adapters=("d", "a", "c", "b")),
        "exact": Profile(
            router=VocabularyRouter(np.arange(c.vocab_size) % 2),
            adapters=("a", "b"),
            digests=[hot.version(name).digest for name in ("a", "b")],
        ),
    }
    engine = Engine(base, hot, rows=4, context=48, buckets=(16, 32), profiles=profiles)
    assert engine.warm_up() == 3  # two buckets and the step
    return engine


def prompt(seed, length=9, low=8):
    return np.random.default_rng(seed).integers(low, 250, length).tolist()


def alone(engine, request):
    (answer,) = engine.run([request])
    return answer


def mixed_requests():
    """One of every kind, and more adapters than slots."""
    return [
        Request(prompt=prompt(0), max_tokens=10, ignore_eos=True),
        Request(prompt=prompt(1, 20), max_tokens=12, adapter="a", ignore_eos=True),
        Request(prompt=prompt(2, 3), max_tokens=8, adapter="f", ignore_eos=True),
        Request(prompt=prompt(3), max_tokens=9, profile="vocabulary", ignore_eos=True),
        Request(prompt=[9, 5, 30, 31, 6, 40], max_tokens=9, profile="control", ignore_eos=True),
        Request(prompt=prompt(5, 30), max_tokens=9, profile="learned", ignore_eos=True),
        Request(
            prompt=prompt(6), max_tokens=11, profile="learned", among=("a", "b"), ignore_eos=True
        ),
        Request(prompt=prompt(7), max_tokens=10, adapter="e", ignore_eos=True),
        Request(
            prompt=prompt(8),
            max_tokens=10,
            adapter="b",
            sampling=Sampling(temperature=0.9, top_p=0.9, top_k=40),
            seed=5,
            ignore_eos=True,
        ),
    ]


def test_requests_served_together_get_what_each_gets_alone(engine):
    requests = mixed_requests()
    expected = [alone(engine, request) for request in requests]
    assert len({tuple(each.tokens[:8]) for each in expected}) == len(requests)
    with count_compilations() as compiled:
        for order in ([*range(9)], [8, 3, 1, 0, 7, 6, 2, 5, 4]):
            answers = engine.run([requests[i] for i in order])
            for i, answer in zip(order, answers, strict=True):
                assert answer.tokens == expected[i].tokens, requests[i]
                assert answer.text == expected[i].text
                assert answer.finish_reason == "length"
    assert not compiled
    assert engine.idle and engine.hot_set.bank.num_free == 0
    assert not any(engine.hot_set.bank.holds(each.digest) for each in engine.hot_set.bank.list())


@pytest.mark.parametrize("kind", ["base", "adapter", "vocabulary", "control", "learned"])
def test_answers_are_those_of_generate(engine, base, kind):
    """The same adapters in a bank of their own, the same rule, one prompt, no engine."""
    names, router = {
        "base": ((), None),
        "adapter": (("f",), SequenceRouter(np.array([0]))),
        "vocabulary": (("a", "b"), engine.profiles["vocabulary"].router),
        "control": (("b", "c"), engine.profiles["control"].router),
        "learned": (("d", "a", "c", "b"), engine.profiles["learned"].router),
    }[kind]
    text = prompt(11, 14) if kind != "control" else [9, 5, 30, 31, 6, 40, 7, 41, 5, 42]
    routed = {}
    if router is not None:
        bank = AdapterBank(base.config, num_slots=4, max_rank=4)
        for name in names:
            bank.load(engine.hot_set.version(name).staged.adapter, name=name)
        routed = {"adapters": bank.stacks, "router": router}
        routed["column_to_slot"] = np.arange(4)[: max(len(names), 1)]
    (expected,) = generate(base.decoder, [text], max_new_tokens=12, **routed)
    chosen = {} if kind == "base" else {"profile": kind}
    if kind == "adapter":
        chosen = {"adapter": "f"}
    answer = alone(engine, Request(prompt=text, max_tokens=12, ignore_eos=True, **chosen))
    assert answer.tokens == expected.tokens
    if router is not None:
        name_of = {slot: names.index(n) for n, slot in answer.slots.items()} | {-1: -1}
        ids = np.vectorize(name_of.get)(answer.routing.adapter_ids)
        read = ids.shape[1]  # the last token of an answer is not read
        assert read == len(text) + 11
        want = expected.routing.adapter_ids[:, :read]
        np.testing.assert_array_equal(ids[..., : want.shape[-1]], want)
        assert (ids[..., want.shape[-1] :] == -1).all()
        assert len(np.unique(want)) > (1 if kind != "adapter" else 0)


def test_a_control_token_that_is_generated_switches_too(engine, base):
    """Position by position: the column in force is that of the last control token read."""

    def draw(seed):
        hot = Sampling(temperature=50.0)  # nearly uniform over the 260 tokens
        return alone(
            engine,
            Request(
                prompt=[9, 30],
                max_tokens=30,
                profile="control",
                ignore_eos=True,
                sampling=hot,
                seed=seed,
            ),
        )

    answer = next(a for a in map(draw, range(30)) if {5, 6} & set(a.tokens[:-1]))
    read = [9, 30, *answer.tokens[:-1]]
    force, expected = -1, []
    slots = [answer.slots["b"], answer.slots["c"]]
    for token in read:
        force = SWITCH.get(token, force)
        expected.append(-1 if force < 0 else slots[force])
    np.testing.assert_array_equal(answer.routing.adapter_ids[0, :, 0], expected)


def test_an_adapter_replaced_while_it_is_used_finishes_with_its_old_weights(engine, base):
    request = Request(prompt=prompt(20), max_tokens=24, adapter="a", ignore_eos=True)
    old_weights = engine.hot_set.version("a").staged.adapter
    before = alone(engine, request)
    running = engine.submit(request)
    try:
        for _ in range(8):
            engine.step()
        assert 0 < len(running.tokens) < 20
        engine.hot_set.replace("a", weights(base, 77))
        after = engine.submit(request)
        others = [engine.submit(Request(prompt=prompt(9), adapter=n)) for n in "bcdef"]
        while not engine.idle:
            engine.step()
        assert running.tokens == before.tokens
        assert running.versions["a"].digest != after.versions["a"].digest
        assert after.tokens != before.tokens
        assert all(each.done for each in others)
    finally:
        engine.hot_set.replace("a", old_weights)
    assert alone(engine, request).tokens == before.tokens


@pytest.mark.parametrize("size", [1e6, 1e18])
def test_an_adapter_that_overflows_ends_its_own_request_alone(engine, base, size):
    """Its weights are finite, what they compute is not; the row it had serves the next one.

    At 1e6 only the square in a norm overflows, which would make a plausible hidden state of zeros.
    """
    engine.hot_set.add(weights(base, 50, size=size), name="wild")
    try:
        good = [r for r in mixed_requests() if r.adapter in ("a", "b")]
        expected = [alone(engine, request).tokens for request in good]
        wild = Request(prompt=prompt(30), max_tokens=8, adapter="wild")
        answers = engine.run([good[0], wild, good[1], wild])
        assert [answers[0].tokens, answers[2].tokens] == expected
        for broken in (answers[1], answers[3]):
            assert broken.finish_reason == "error" and "not finite" in broken.error
        again = engine.run(good * 2)
        assert [each.tokens for each in again] == expected * 2
    finally:
        engine.hot_set.remove("wild")


def test_logprobs_are_those_of_the_model(engine, base):
    request = Request(prompt=prompt(40), max_tokens=5, adapter="c", logprobs=3, ignore_eos=True)
    plain = Request(prompt=prompt(41), max_tokens=9, ignore_eos=True)
    _, answer = engine.run([plain, request])
    bank = AdapterBank(base.config, num_slots=1, max_rank=4)
    bank.load(engine.hot_set.version("c").staged)
    text = [*request.prompt, *answer.tokens]
    out = base.decoder(
        jnp.asarray([text]), adapters=bank.stacks, router=SequenceRouter(np.array([0]))
    )
    log_p = np.asarray(jax.nn.log_softmax(base.decoder.logits(out.hidden[0]), axis=-1))
    for at, numbers in enumerate(answer.logprobs):
        row = log_p[len(request.prompt) - 1 + at]
        assert numbers.logprob == pytest.approx(row[answer.tokens[at]], abs=1e-3)
        assert [i for i, _ in numbers.top] == np.argsort(-row)[:3].tolist()
    assert alone(engine, plain).logprobs == []


def test_deltas_stream_the_text_and_end_once(engine):
    seen = []
    generation = engine.submit(
        Request(prompt=prompt(50), max_tokens=12, adapter="b", ignore_eos=True),
        on_delta=seen.append,
    )
    while not engine.idle:
        engine.step()
    assert "".join(delta.text for delta in seen) == generation.text
    assert [delta.token for delta in seen] == generation.tokens
    assert [delta.finish_reason for delta in seen] == [None] * 11 + ["length"]
    assert generation.submitted <= generation.admitted <= generation.first_token
    assert generation.first_token < generation.finished


def test_a_callback_that_fails_costs_no_row_its_tokens(engine, caplog):
    requests = [Request(prompt=prompt(i), max_tokens=8, ignore_eos=True) for i in range(3)]
    expected = [alone(engine, request).tokens for request in requests]

    def fail(delta):
        raise RuntimeError("the connection is gone")

    running = [
        engine.submit(request, on_delta=fail if i == 1 else None)
        for i, request in enumerate(requests)
    ]
    while not engine.idle:
        engine.step()
    assert [each.tokens for each in running] == expected
    assert "its on_delta failed" in caplog.text


def test_stop_texts_end_tokens_and_length(engine, base):
    free = alone(engine, Request(prompt=prompt(60), max_tokens=16, ignore_eos=True))
    at = next(i for i in range(3, 12) if free.text[i].isprintable() and free.text[i].strip())
    stop = free.text[at : at + 2]
    stopped = alone(
        engine, Request(prompt=prompt(60), max_tokens=16, stop=("never", stop), ignore_eos=True)
    )
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(stop)]
    assert len(stopped.tokens) < 16
    end = free.tokens[4]
    real = base.tokenizer.eos_ids
    try:
        base.tokenizer.eos_ids = (end,)
        ended = alone(engine, Request(prompt=prompt(60), max_tokens=16))
    finally:
        base.tokenizer.eos_ids = real
    assert ended.finish_reason == "stop"
    assert ended.tokens == free.tokens[: free.tokens.index(end) + 1]


def test_cancelling_frees_the_row_and_leaves_the_others(engine):
    requests = [
        Request(prompt=prompt(70 + i), max_tokens=20, adapter=n, ignore_eos=True)
        for i, n in enumerate("abcdef")
    ]
    expected = [alone(engine, request).tokens for request in requests]
    running = [engine.submit(request) for request in requests]
    for _ in range(5):
        engine.step()
    engine.cancel(running[1])  # in a row
    engine.cancel(running[5])  # in the queue
    while not engine.idle:
        engine.step()
    engine.cancel(running[0])  # done long ago: nothing
    assert [each.finish_reason for each in running].count("cancelled") == 2
    assert running[1].tokens == expected[1][: len(running[1].tokens)]
    assert running[5].tokens == []
    for i in (0, 2, 3, 4):
        assert running[i].tokens == expected[i]


def test_a_request_whose_adapter_is_removed_while_it_waits_is_told(engine, base):
    engine.hot_set.add(weights(base, 60), name="brief")
    busy = [
        engine.submit(Request(prompt=prompt(i), max_tokens=6, ignore_eos=True)) for i in range(4)
    ]
    engine.step()
    waiting = engine.submit(Request(prompt=prompt(9), adapter="brief"))
    engine.hot_set.remove("brief")
    while not engine.idle:
        engine.step()
    assert waiting.finish_reason == "error"
    assert "no adapter 'brief' is loaded" in waiting.error
    assert all(each.finish_reason == "length" for each in busy)


def test_an_adapter_removed_while_its_request_waits_for_a_slot_ends_that_request_alone(
    engine, base, monkeypatch
):
    """Between the try to lease it and the copy ahead of the next try."""
    hot = engine.hot_set
    hot.add(weights(base, 61), name="gone")
    running = engine.submit(Request(prompt=prompt(1), max_tokens=6, adapter="a", ignore_eos=True))
    engine.step()
    lost = engine.submit(Request(prompt=prompt(2), max_tokens=4, adapter="gone"))
    acquire = hot.acquire

    def no_slot_and_then_removed(names):
        if "gone" not in names:
            return acquire(names)
        monkeypatch.setattr(hot, "acquire", acquire)
        hot.remove("gone")
        return None

    monkeypatch.setattr(hot, "acquire", no_slot_and_then_removed)
    while not engine.idle:
        engine.step()
    assert lost.finish_reason == "error" and "no adapter 'gone' is loaded" in lost.error
    assert running.finish_reason == "length"


def test_a_profile_whose_adapter_changed_is_refused_where_it_names_the_content(engine, base):
    request = Request(prompt=prompt(0), max_tokens=4, profile="exact", ignore_eos=True)
    before = alone(engine, request)
    kept = engine.hot_set.version("b").staged.adapter
    try:
        engine.hot_set.replace("b", weights(base, 61))
        answer = alone(engine, request)
        assert answer.finish_reason == "error" and "made for sha256:" in answer.error
    finally:
        engine.hot_set.replace("b", kept)
    assert alone(engine, request).tokens == before.tokens
    assert not any(engine.hot_set.bank.holds(each.digest) for each in engine.hot_set.bank.list())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": [1, 999]}, r"prompt\[1\] is token id 999"),
        ({"prompt": [1] * 33}, "the prompt may have 32"),
        ({"prompt": [1] * 30, "max_tokens": 19}, r"both together 48 \(the engine's context\)"),
        ({"prompt": [1], "adapter": "bb"}, "Did you mean 'b'"),
        ({"prompt": [1], "profile": "vocab"}, "Did you mean 'vocabulary'"),
        ({"prompt": [1], "profile": "learned", "among": ("a", "f")}, "among names 'f'"),
        ({"prompt": [1], "profile": "control", "among": ("b",)}, "for learned profiles"),
        ({"prompt": [1], "stop": ("",)}, "not empty"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(engine, request_, message):
    with pytest.raises((ValueError, KeyError), match=message):
        engine.submit(Request(**request_))
    assert engine.idle


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": "text"}, "prompt is 'text'; expected a list"),
        ({"prompt": [[1, 2], [3, 4]]}, r"prompt holds \[1, 2\]; expected integer token ids"),
        ({"prompt": [1.0]}, "prompt holds 1.0"),
        ({"stop": "END"}, "stop is 'END'; expected a list"),
        ({"sampling": None}, "sampling is None; expected Sampling"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'"),
        ({"logprobs": 2.5}, "logprobs is 2.5"),
        ({"logprobs": True}, "logprobs is True"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"adapter": 5}, "adapter is 5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"adapter": "a", "profile": "b"}, "has one of them"),
        ({"among": ("a",)}, "of a learned profile"),
    ],
)
def test_requests_check_themselves(fields, message):
    with unchecked_shapes(), pytest.raises(ValueError, match=message):
        Request(**({"prompt": [1]} | fields))


def test_a_prompt_that_grows_after_it_was_submitted_is_served_as_it_was(engine):
    text = prompt(3, 4)
    expected = alone(engine, Request(prompt=text, max_tokens=2, ignore_eos=True)).tokens
    request = Request(prompt=text, max_tokens=2, ignore_eos=True)
    generation = engine.submit(request)
    text.extend([1] * 60)
    engine.run()
    assert generation.tokens == expected


def test_another_engines_generation_cancels_nothing_here(engine):
    mine = engine.submit(Request(prompt=prompt(1), max_tokens=2, ignore_eos=True))
    engine.cancel(Generation(mine.id, mine.request))
    engine.run()
    assert mine.finish_reason == "length"


def test_where_a_step_fails_the_engine_goes_no_further(base):
    """What it was given is gone: a row that went on would be served from nothing."""
    broken = Engine(base, rows=2, context=16, buckets=(8,))
    broken._programs = {name: object() for name in ("prefill 8", "decode")}
    generation = broken.submit(Request(prompt=[1], max_tokens=2))
    with pytest.raises(TypeError):
        broken.step()
    with pytest.raises(RuntimeError, match=r"a step failed before \(TypeError"):
        broken.step()
    assert not generation.done


def test_answers_that_end_at_once_do_not_hold_up_the_others(engine):
    """A step reads no more prompts than there are rows, however many are ready."""
    running = engine.submit(Request(prompt=prompt(1), max_tokens=20, ignore_eos=True))
    engine.step()
    short = [Request(prompt=prompt(2), max_tokens=1, ignore_eos=True)] * 60
    ended = [engine.submit(each) for each in short]
    before = len(running.tokens)
    engine.step()
    assert len(running.tokens) == before + 1
    assert sum(each.done for each in ended) <= engine.rows * engine.pack
    engine.run()


def test_the_queue_is_bounded(engine):
    engine.max_waiting, kept = 2, engine.max_waiting
    try:
        waiting = [engine.submit(Request(prompt=[1])) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests wait already"):
            engine.submit(Request(prompt=[1]))
        for each in waiting:
            engine.cancel(each)
        engine.step()
        assert engine.idle
    finally:
        engine.max_waiting = kept


def test_requests_come_from_many_threads(engine):
    requests = mixed_requests()
    expected = {i: alone(engine, r).tokens for i, r in enumerate(requests)}
    got, threads = {}, []

    def ask(i):
        got[i] = engine.submit(requests[i])

    for i in range(len(requests)):
        threads.append(threading.Thread(target=ask, args=(i,)))
        threads[-1].start()
        engine.step()
    for thread in threads:
        thread.join()
    while not engine.idle:
        engine.step()
    assert {i: each.tokens for i, each in got.items()} == expected


def test_prompts_read_one_at_a_time_give_the_same_answers(engine, base):
    """`pack` is a matter of speed; 1 makes the numbers independent of what else waits."""
    requests = [r for r in mixed_requests() if r.profile is None]
    together = [each.tokens for each in engine.run(requests)]
    single = Engine(base, engine.hot_set, rows=4, context=48, buckets=(32,), pack=1)
    read = []
    call = single._call
    single._call = lambda name, *arguments: read.append(name) or call(name, *arguments)
    assert [each.tokens for each in single.run(requests)] == together
    assert read.count("prefill 32") == len(requests)
    with pytest.raises(ValueError, match="pack is 0"):
        Engine(base, rows=2, context=16, pack=0)


def test_an_engine_without_adapters_serves_the_base(base):
    engine = Engine(base, rows=2, context=16, buckets=(16,))
    with pytest.raises(ValueError, match="without a hot set"):
        engine.submit(Request(prompt=[1], max_tokens=4, adapter="a"))
    text = prompt(3, 6)
    (answer,) = engine.run([Request(prompt=text, max_tokens=6, ignore_eos=True)])
    (expected,) = generate(base.decoder, [text], max_new_tokens=6)
    assert answer.tokens == expected.tokens and answer.routing is None


def test_settings_are_checked(base):
    c = base.config
    hot = HotSet(AdapterBank(c, num_slots=1, max_rank=2))
    table = VocabularyRouter(np.zeros(5, int))
    for keywords, message in (
        ({"rows": 0}, "rows is 0"),
        ({"context": c.max_positions + 1}, "the model's positions"),
        ({"buckets": (8, 1024)}, "expected lengths from 1 to context"),
        ({"profiles": {"v": Profile(router=table, adapters=("a",))}}, "a table of 5 token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(base, hot, **keywords)
    with pytest.raises(ValueError, match="adapters has 2 entries; the router has 1"):
        Profile(router=table, adapters=("a", "b"))
    two = {
        n: Profile(
            router=LearnedRouter(c.hidden_size, 1, top_k=1, after_layer=0, rngs=nnx.Rngs(i)),
            adapters=("a",),
        )
        for i, n in enumerate("xy")
    }
    with pytest.raises(ValueError, match="2 routers with logits"):
        Engine(base, hot, profiles=two)
    wrong = LearnedRouter(3, 1, top_k=1, after_layer=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="made for another base"):
        Engine(base, hot, profiles={"x": Profile(router=wrong, adapters=("a",))})


def churn(engine, base, *, requests, seed):
    """Random requests while another thread loads, replaces and removes adapters."""
    rng = np.random.default_rng(seed)
    pool = [weights(base, 100 + i) for i in range(6)]
    hot, stop, failed = engine.hot_set, threading.Event(), []
    for i in range(3):
        hot.add(pool[i], name=f"churn{i}")

    def swap():
        draw = np.random.default_rng(seed + 1)
        try:
            while not stop.is_set():
                name, new = f"churn{draw.integers(3)}", pool[draw.integers(6)]
                if draw.random() < 0.5:
                    hot.replace(name, new)
                else:
                    hot.remove(name)
                    hot.add(new, name=name)
                hot.prefetch(["a"])
        except Exception as error:
            failed.append(error)

    prompts = [prompt(200 + i, 4 + 5 * i) for i in range(4)]
    kinds = [{}, *({"adapter": f"churn{i}"} for i in range(3)), {"adapter": "e"},
             {"profile": "vocabulary"}, {"profile": "learned", "among": ("a", "d")}]  # fmt: skip
    swapper, done, refused = threading.Thread(target=swap), [], 0
    swapper.start()
    try:
        while len(done) < requests:
            for _ in range(rng.integers(0, 3)):
                kind, at = kinds[rng.integers(len(kinds))], rng.integers(4)
                request = Request(prompt=prompts[at], max_tokens=6, ignore_eos=True, **kind)
                try:
                    generation = engine.submit(request)
                except KeyError:  # just now removed
                    refused += 1
                    continue
                if rng.random() < 0.1:
                    engine.cancel(generation)
            done += engine.step()
    finally:
        stop.set()
        swapper.join()
        while not engine.idle:
            done += engine.step()
        for i in range(3):
            hot.remove(f"churn{i}")
    assert not failed
    return done


def check_churn(engine, base, *, requests):
    with count_compilations() as compiled:
        done = churn(engine, base, requests=requests, seed=requests)
    assert not compiled
    assert not any(engine.hot_set.bank.holds(each.digest) for each in engine.hot_set.bank.list())
    # What each must have been, served alone with the very versions that it was served with.
    known = {}
    for generation in done:
        if generation.finish_reason in ("cancelled", "error"):
            assert generation.error is None or "is loaded" in generation.error
            continue
        request = generation.request
        digests = tuple(sorted((n, v.digest) for n, v in generation.versions.items()))
        key = (tuple(request.prompt), request.adapter, request.profile, digests)
        if key not in known:
            renamed = request
            added = request.adapter is not None and request.adapter.startswith("churn")
            if added:
                version = generation.versions[request.adapter]
                engine.hot_set.add(version.staged.adapter, name="again")
                renamed = dataclasses.replace(request, adapter="again")
            known[key] = alone(engine, renamed).tokens
            if added:
                engine.hot_set.remove("again")
        assert generation.tokens == known[key], request
    return len(done), len(known)


def test_under_churn_each_answer_is_that_of_its_own_adapters(engine, base):
    served, kinds = check_churn(engine, base, requests=60)
    assert served >= 60 and kinds > 12


@pytest.mark.long
def test_two_thousand_requests_under_churn(engine, base):
    served, kinds = check_churn(engine, base, requests=2000)
    print(f"{served} requests, {kinds} kinds of answer, all right; nothing compiled")
