"""The simulator: what it serves when, what it counts as waiting, and its traces."""

import math

import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.hot_set import HotSet
from molora_jax.generation.engine import Engine
from molora_jax.generation.request import Generation, Request
from molora_jax.generation.simulate import (
    Served,
    Simulation,
    one_adapter,
    one_request,
    simulate,
    together,
)
from molora_jax.generation.traces import Arrival, bursty_times, poisson_times, random_arrivals
from molora_jax.models import load_base
from tests.generation.test_engine import weights

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def engine():
    """Two rows, two slots, three adapters."""
    base = load_base("tiny-random")
    hot = HotSet(AdapterBank(base.config, num_slots=2, max_rank=4))
    for seed, name in enumerate(NAMES):
        hot.add(weights(base, seed), name=name)
    return Engine(base, hot, rows=2, context=24, buckets=(8,), max_waiting=3)


def arrivals(engine, *, count=8, gap=0.0, seed=0):
    times = gap * np.arange(count)
    return random_arrivals(
        times,
        [(*NAMES, None)[i % 4] for i in range(count)],
        vocab_size=engine.base.config.vocab_size,
        prompt_tokens=(2, 8),
        answer_tokens=(2, 7),
        seed=seed,
    )


def test_an_engine_that_is_not_warm_fails_the_simulation(engine):
    with pytest.raises(RuntimeError, match=r"programs were compiled .*call engine.warm_up"):
        simulate(engine, arrivals(engine, count=1))


def test_every_policy_serves_the_whole_trace_with_the_same_answers(engine):
    engine.warm_up()
    trace = arrivals(engine)
    expected = [engine.run([each.request])[0].tokens for each in trace]
    assert len({tuple(each) for each in expected}) == len(trace)
    batches = {}
    for policy in (together, one_adapter, one_request):
        seen = batches[policy.__name__] = []

        def watched(waiting, running, policy=policy, seen=seen):
            chosen = policy(waiting, running)
            if chosen:
                seen.append([each.request.adapter for each in chosen])
            return chosen

        done = simulate(engine, reversed(trace), policy=watched)
        by_trace = sorted(done.served, key=lambda each: trace.index(each.arrival))
        assert [each.generation.tokens for each in by_trace] == expected
        assert not done.failed and done.tokens == sum(map(len, expected))
        for each in done.served:
            assert 0 <= each.queueing < each.time_to_first_token <= each.latency <= done.seconds
    assert len(batches["together"][0]) == len(trace)
    assert all(len(set(batch)) == 1 for batch in batches["one_adapter"])
    assert sorted(map(len, batches["one_adapter"])) == [2] * 4  # two requests for each of four
    assert [len(batch) for batch in batches["one_request"]] == [1] * len(trace)


def test_nothing_is_served_before_it_arrives_and_who_waits_has_waited(engine):
    engine.warm_up()
    trace = arrivals(engine, count=3, gap=0.15)
    done = simulate(engine, trace)
    assert done.seconds > 0.3
    for each, planned in zip(done.served, trace, strict=True):
        assert each.arrival is planned
        assert each.generation.submitted >= each.due
        assert each.due - done.served[0].due == pytest.approx(planned.at)


def test_a_policy_that_lets_nothing_in_is_refused(engine):
    with pytest.raises(ValueError, match="lets none of 2 requests in"):
        simulate(engine, arrivals(engine, count=2), policy=lambda waiting, running: ())


def test_an_engine_at_work_is_refused(engine):
    engine.submit(Request(prompt=[1], max_tokens=2))
    with pytest.raises(ValueError, match="0 requests running and 1 waiting"):
        simulate(engine, [])
    engine.run()


def test_times_count_from_the_arrival():
    ended = Generation(
        0, Request(prompt=[1]), tokens=[1, 2, 3], admitted=12.0, first_token=13.0, finished=17.0,
        finish_reason="length",
    )  # fmt: skip
    failed = Generation(1, Request(prompt=[1]), finished=12.0, finish_reason="error")
    served = [Served(Arrival(1.0, each.request), each, due=11.0) for each in (ended, failed)]
    first = served[0]
    assert (first.queueing, first.time_to_first_token, first.latency) == (1, 2, 6)
    assert first.time_per_output_token == 2
    done = Simulation(tuple(served), seconds=4.0)
    assert done.tokens_per_second == 0.75
    assert done.failed == (served[1],)
    assert done.percentile("time_to_first_token", 99) == 2  # the failed one has none
    assert done.percentile("latency", 50) == 3.5
    assert math.isnan(Simulation((), 1.0).percentile("latency", 50))
    assert "2 requests, 3 tokens in 4.00 s (0.8 a second), 1 failed" in str(done)


def test_bursts_have_the_rate_of_the_even_trace_and_keep_to_their_seconds():
    even = poisson_times(50.0, 4000, seed=3)
    bursts = bursty_times(50.0, 4000, seed=3, on_s=0.5, off_s=1.5)
    for times in (even, bursts):
        assert (np.diff(times) >= 0).all()
        assert 4000 / times[-1] == pytest.approx(50, rel=0.1)
    assert ((bursts % 2.0) <= 0.5 + 1e-9).all()
    assert not ((even % 2.0) <= 0.5).all()


def test_lengths_are_drawn_from_the_least_to_the_most():
    given = {"vocab_size": 50, "prompt_tokens": (2, 5), "answer_tokens": (3, 3), "seed": 1}
    made = random_arrivals(np.arange(300.0), ["a"] * 300, **given)
    assert {len(each.request.prompt) for each in made} == {2, 3, 4, 5}
    assert {each.request.max_tokens for each in made} == {3}
    again = random_arrivals(np.arange(300.0), ["a"] * 300, **given)
    assert made == again


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Arrival(-1.0, Request(prompt=[1])), "at is -1.0"),
        (lambda: poisson_times(0.0, 3, seed=0), "rate is 0.0"),
        (lambda: bursty_times(1.0, 3, seed=0, on_s=0.0), "on_s is 0.0"),
        (
            lambda: random_arrivals(
                np.zeros(2), ["a"], vocab_size=9, prompt_tokens=(1, 2), answer_tokens=(1, 2), seed=0
            ),
            "1 adapters for 2 times",
        ),
        (
            lambda: random_arrivals(
                np.zeros(1), ["a"], vocab_size=9, prompt_tokens=(3, 2), answer_tokens=(1, 2), seed=0
            ),
            r"prompt_tokens is \(3, 2\)",
        ),
    ],
)
def test_a_trace_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()
