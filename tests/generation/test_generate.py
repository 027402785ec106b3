"""Generation: independent of batch and padding, equal to re-reading everything at each step."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank, Composition
from molora_jax.generation import Sampling, generate
from molora_jax.generation.sampling import sample
from molora_jax.models import load_base
from molora_jax.models.decoder import Decoder
from molora_jax.training import evaluate
from molora_jax.training.data import make_batch
from tests.models.test_decoder import (
    forward,
    random_arrays,
    random_stacks,
    routers,
    tiny_config,
)

CONFIG = tiny_config(num_layers=2)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(CONFIG, random_arrays(CONFIG))


def untyped(function):
    """As a user calls it: in the tests its annotations are checked, and refuse first."""
    return inspect.unwrap(function)


def by_rereading(decoder, prompt, steps, **routed):
    """The answer, and the decisions on prompt and answer; every step is of one shape."""
    length, width = len(prompt), 24
    tokens, mask = np.zeros((1, width), np.int32), np.zeros((1, width), bool)
    tokens[0, :length] = prompt
    for at in range(length, length + steps + 1):
        mask[0, :at] = True
        out, logits = forward(decoder, tokens, mask, **routed)
        if at < length + steps:
            tokens[0, at] = int(jnp.argmax(logits[0, at - 1]))
    return tokens[0, length : length + steps].tolist(), out.routing


@pytest.mark.parametrize(
    ("side", "kind"),
    [("left", None), ("left", "per_layer"), ("right", "per_layer"), ("right", "shared")],
)
def test_greedy_equals_rereading_each_prompt_alone(decoder, side, kind):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (3, 11)]
    routed = {}
    if kind:
        routed = {"adapters": random_stacks(CONFIG), "router": routers(CONFIG, 1, 1)[kind]}
        routed["column_to_slot"] = np.arange(getattr(routed["router"], "num_columns", 3))
    answers = generate(decoder, prompts, max_new_tokens=8, padding=side, **routed)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, routing = by_rereading(decoder, prompt, 8, **routed)
        assert answer.tokens == tokens
        if kind:
            ids = routing.adapter_ids[:, : len(prompt) + 8]
            np.testing.assert_array_equal(answer.routing.adapter_ids, ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_main_adapters_are_of_the_rows_own_tokens(decoder, side):
    """With k = 2, tokens of the base alone, and rows of other lengths beside them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (3, 11)]
    stacks, made = random_stacks(CONFIG), routers(CONFIG, 1, 1)
    for kind in ("per_layer", "vocabulary"):
        routed = {"adapters": stacks, "router": made[kind], "column_to_slot": np.arange(3)}
        answers = generate(decoder, prompts, max_new_tokens=4, padding=side, **routed)
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*prompt, *answer.tokens]
            assert answer.main_adapters.shape == (len(whole),)
            if kind == "vocabulary":
                table = np.asarray(made[kind].table[...])
                np.testing.assert_array_equal(answer.main_adapters, table[whole])
                continue
            routing = forward(decoder, jnp.asarray([whole]), **routed)[0].routing
            # Of two layers the later half is the last, and the larger of two gates counts.
            best = np.asarray(routing.gates[-1]).argmax(axis=-1)
            ids = np.take_along_axis(np.asarray(routing.adapter_ids[-1]), best[:, None], axis=1)
            np.testing.assert_array_equal(answer.main_adapters, ids[:, 0])
    assert -1 in table[whole]
    assert generate(decoder, prompts, max_new_tokens=1)[0].main_adapters is None


def test_a_stop_id_ends_a_row_and_not_its_neighbour(decoder):
    prompts = [[1, 2, 3], [4, 5]]
    free = generate(decoder, prompts, max_new_tokens=6)
    stop = free[0].tokens[2]
    expected = [each.tokens for each in free]
    stopped = generate(decoder, prompts, max_new_tokens=6, stop_ids=[stop])
    first = expected[0].index(stop)
    assert stopped[0].tokens == expected[0][: first + 1] and stopped[0].stopped
    if stop not in expected[1]:
        assert stopped[1].tokens == expected[1] and not stopped[1].stopped


def sampled(logits, temperature=1.0, top_k=0, top_p=1.0, *, seed=0):
    """One draw for each row, the parameters the same or one for each."""
    B = len(logits)
    return np.asarray(
        jax.jit(sample)(
            jax.random.split(jax.random.key(seed), B),
            jnp.asarray(logits, jnp.float32),
            jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), B),
            jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), B),
            jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), B),
        )
    )


def test_sampling_stays_within_top_k_and_top_p():
    logits = np.log([[0.15, 0.5, 0.3, 0.05]] * 400)
    free = sampled(logits)
    np.testing.assert_allclose(np.bincount(free) / 400, [0.15, 0.5, 0.3, 0.05], atol=0.08)
    assert set(sampled(logits, top_k=2)) == {1, 2}
    assert set(sampled(logits, top_p=0.75)) == {1, 2}
    assert set(sampled(logits, top_p=0.01)) == {1}
    assert set(sampled(logits, top_k=2, top_p=0.4)) == {1}
    assert set(sampled(logits, temperature=0.0)) == {1}
    sharp = np.bincount(sampled(logits, temperature=0.5), minlength=4) / 400
    np.testing.assert_allclose(sharp, np.square([0.15, 0.5, 0.3, 0.05]) / 0.365, atol=0.08)
    assert sampled([[1.0, 1.0, 0.0]], temperature=0.0) == [0]  # the lower id of equals
    assert set(sampled([[0.0, 0.0, 0.0]] * 50, top_k=1)) == {0}


def test_what_a_row_draws_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 50)) * 2
    alone = sampled(logits, temperature=[1.0, 0.0, 0.7, 1.5])
    # A neighbour that needs sorting changes the path of the whole batch.
    beside = sampled(logits, temperature=[1.0, 0.0, 0.7, 1.5], top_p=[1, 1, 1, 0.3])
    np.testing.assert_array_equal(alone[:3], beside[:3])
    calm = sampled(logits, temperature=[1.0, 0.0, 0.0, 0.0])
    assert calm[0] == alone[0] and calm[1] == alone[1]


def test_a_seed_repeats_and_another_differs(decoder):
    def run(seed):
        sampling = Sampling(temperature=1.5)
        answers = generate(decoder, [[1, 2]], max_new_tokens=12, sampling=sampling, seed=seed)
        return answers[0].tokens

    assert run(0) == run(0) != run(1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"prompts\[1\] is empty"),
        ([[1, 2], [3, -1]], r"prompts\[1\]\[1\] is token id -1"),
        ([[2**31]], r"prompts\[0\]\[0\] is token id 2147483648"),
        ([[1, CONFIG.vocab_size]], rf"prompts\[0\]\[1\] is token id {CONFIG.vocab_size}"),
        ([[1] * 60], "exceed the model's 64 positions"),
        ([1, 2], r"prompts\[0\] is 1: prompts is a list of lists of token ids"),
        ("a text", r"prompts is the text 'a text'.* base\.tokenizer\.encode\(text\)"),
        (
            [[1], "a" * 500],
            r"prompts\[1\] is the text .{20,90}; .* base\.tokenizer\.encode\(text\)",
        ),
        (np.array([1, 2]), r"prompts\[0\] is .*1.*a list of lists"),
        ([[[1]]], r"prompts\[0\] has 2 axes"),
    ],
)
def test_bad_prompts_are_refused(decoder, prompts, message):
    with pytest.raises(ValueError, match=message):
        untyped(generate)(decoder, prompts, max_new_tokens=8)


def test_prompts_may_be_an_array(decoder):
    (answer,) = untyped(generate)(decoder, np.array([[1, 2]]), max_new_tokens=1)
    assert answer.tokens == generate(decoder, [[1, 2]], max_new_tokens=1)[0].tokens
    assert repr(answer) == "1 new token, ended by the length; no routing"
    assert untyped(generate)(decoder, np.zeros((0, 4), int), max_new_tokens=1) == []


def test_another_kind_of_argument_is_named_with_what_to_pass():
    base = load_base("tiny-random")
    bank = AdapterBank(base.config, num_slots=2, max_rank=2)
    learned = routers(CONFIG, 1, 1)["shared"]
    made = Composition(
        base_name="b", base_digest="", bank=bank, router=learned, column_digests=["", "", ""]
    )
    asked = {"adapters": bank.stacks, "router": learned}
    windows = make_batch(np.zeros((1, 4), int), np.ones((1, 4), bool), np.ones((1, 4), bool))
    for given, message in (
        ({"decoder": base}, "decoder is a BaseModel: pass base.decoder"),
        ({"decoder": "tiny"}, "decoder is a str: pass load_base"),
        ({"adapters": bank, "router": learned}, "pass bank.stacks, or **composition.routed"),
        ({"adapters": [bank], "router": learned}, "adapters is a list: expected bank.stacks"),
        ({"adapters": made}, "adapters is a composition: pass **composition.routed"),
        ({"adapters": bank.stacks, "router": made}, "router is a composition: pass **comp"),
        ({"adapters": bank.stacks}, "adapters without router: adapters act only"),
        ({"router": learned}, "router without adapters: adapters act only"),
        (asked, "column_to_slot=composition.column_to_slot"),
    ):
        given = {"decoder": base.decoder, **given}
        decoder = given.pop("decoder")
        for call in (
            lambda d, **k: untyped(generate)(d, [[1]], max_new_tokens=1, **k),
            lambda d, **k: untyped(evaluate)(d, windows, **k),
        ):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(decoder, **given)
    with pytest.raises(ValueError, match="windows is a list: expected a Batch"):
        untyped(evaluate)(base.decoder, [[1, 2]])


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_bad_sampling_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
