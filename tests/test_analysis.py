"""What an analysis says of a text, against the plain forward pass and against choices by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from molora_jax.analysis import RouterTrace, analyse, words_of
from molora_jax.models import load_base
from molora_jax.routing import FixedRouter, VocabularyRouter
from tests.composed import composition, learned

TEXT = "de f\n(x) 17"


@jax.jit
def forward(decoder, tokens, stacks, router, column_to_slot):
    """The decoder's output and the loss of each token but the first."""
    out = decoder(tokens, adapters=stacks, router=router, column_to_slot=column_to_slot)
    log_p = jax.nn.log_softmax(decoder.logits(out.hidden)[0, :-1])
    return out, -jnp.take_along_axis(log_p, tokens[0, 1:, None], axis=1)[:, 0]


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-random")


@pytest.fixture(scope="module")
def made(base):
    return composition(base, learned(base))


@pytest.fixture(scope="module")
def found(base, made):
    """Two texts of different lengths, under the router at k = 2 and at k = 3, all of them."""
    dense = dataclasses.replace(made, router=made.router.with_top_k(3))
    return analyse(base, [TEXT, "ab"], {"two": made, "all": dense})


def test_a_trace_is_the_plain_forward_pass_with_adapters_in_place_of_slots(base, made, found):
    tokens = np.array([base.tokenizer.encode(TEXT)], np.int32)
    out, loss = forward(base.decoder, tokens, made.bank.stacks, made.router, made.column_to_slot)
    text = found.texts[0]
    trace = text.routers[0]
    assert found.adapters == ("a", "b", "c")  # by column, whatever their slots
    listed = {each.slot: each.name for each in made.bank.list()}
    named = np.array(found.adapters)[trace.adapter_ids]
    assert (named == np.vectorize(listed.get)(np.asarray(out.routing.adapter_ids))).all()
    np.testing.assert_allclose(trace.gates, out.routing.gates, atol=1e-5)
    p = jax.nn.softmax(out.router_logits, axis=-1)
    columns = [found.adapters.index(name) for name in "abc"]
    np.testing.assert_allclose(trace.probabilities[..., columns], p, atol=1e-5)
    assert np.isnan(trace.loss[0])
    np.testing.assert_allclose(trace.loss[1:], loss, atol=2e-4)
    assert "".join(text.pieces) == TEXT


def test_padding_of_a_shorter_text_is_not_seen(base, made, found):
    alone = analyse(base, ["ab"], {"two": made}, forced=False).texts[0]
    beside = found.texts[1]
    assert alone.forced is None
    assert beside.routers[0].gates.shape == alone.routers[0].gates.shape == (4, 2, 2)
    np.testing.assert_allclose(beside.routers[0].gates, alone.routers[0].gates, atol=1e-5)
    np.testing.assert_allclose(beside.routers[0].loss, alone.routers[0].loss, atol=1e-4)


def test_forced_losses_are_those_of_one_adapter_for_every_token(base, made, found):
    tokens = np.array([base.tokenizer.encode(TEXT)], np.int32)
    for row, name in enumerate([*found.adapters, None]):
        slot = {each.name: each.slot for each in made.bank.list()}.get(name, -1)
        router = FixedRouter(np.full((*tokens.shape, 1), slot))
        _, expected = forward(base.decoder, tokens, made.bank.stacks, router, None)
        np.testing.assert_allclose(found.texts[0].forced[row, 1:], expected, atol=2e-4)
    means = found.texts[0].forced[:, 1:].mean(axis=1)
    assert len(set(means.round(4))) == 4  # the adapters differ, and all from the base
    difference = found.texts[0].forced_difference(1)
    np.testing.assert_allclose(
        difference[0, 1:], found.texts[0].forced[0, 1:] - found.texts[0].routers[1].loss[1:]
    )


def test_an_adapter_is_the_same_in_two_compositions_by_its_content(base, made):
    other = composition(
        base, learned(base), seeds=(3, 9, 1), names=("renamed", "b", "a"), slots=(0, 1, 3)
    )
    both = analyse(base, ["ab"], {"one": made, "other": other})
    names = set(both.adapters)
    assert len(both.adapters) == 4  # three, and the stranger that is called b as well
    assert {"a", "b", "c"} < names
    assert any(name.startswith("b ") for name in names)
    assert both.texts[0].forced.shape == (5, 2)


def test_a_router_without_logits_has_no_entropy(base):
    table = np.full(base.config.vocab_size, -1)
    table[ord("a")], table[ord("b")] = 0, 2
    found = analyse(
        base,
        ["abz"],
        {"table": composition(base, VocabularyRouter(table, num_columns=3))},
        forced=False,
    )
    trace = found.texts[0].routers[0]
    assert trace.entropy is None and trace.probabilities is None
    assert [found.adapters[index] if index >= 0 else "-" for index in trace.main] == ["a", "c", "-"]
    assert (trace.agreement == 1).all()


def test_a_shared_decision_has_one_layer_of_probabilities(base):
    shared = composition(base, learned(base, after_layer=1))
    trace = analyse(base, ["abc"], {"shared": shared}, forced=False).texts[0].routers[0]
    assert trace.probabilities.shape == (*trace.entropy.shape, 3) == (1, 3, 3)
    assert (trace.by_layer[:2] == -1).all() and (trace.by_layer[2:] >= 0).all()
    assert trace.agreement[0, 1] == 1 and trace.agreement[0, 2] == 0


def test_one_token_has_a_routing_and_no_loss(base, made):
    found = analyse(base, ["a"], {"one": made})
    text = found.texts[0]
    assert repr(found) == "analysis of 1 texts, 1 tokens; routers one; adapters a, b, c"
    assert len(repr(text)) < 200 and "(4, 1, 2)" in repr(text)
    assert np.isnan(text.routers[0].loss).all() and np.isnan(text.forced).all()
    assert text.routers[0].adapter_ids.shape == (4, 1, 2)


def test_all_adapters_at_once_leave_the_softmax_as_it_is(found):
    trace = found.texts[0].routers[1]
    by_adapter = np.take_along_axis(trace.gates, trace.adapter_ids.argsort(axis=-1), axis=-1)
    np.testing.assert_allclose(by_adapter, trace.probabilities, atol=1e-5)


def test_what_cannot_be_read_is_refused(base, made):
    with pytest.raises(ValueError, match="text 1 is '', which has no tokens"):
        analyse(base, ["a", ""], {"one": made})
    with pytest.raises(ValueError, match="text 0 has 2049 tokens; tiny-random reads at most 2048"):
        analyse(base, ["a" * 2049], {"one": made})
    stranger = dataclasses.replace(made, base_digest="f" * 64)
    with pytest.raises(ValueError, match="'two' was loaded for the base 'tiny-random'"):
        analyse(base, ["a"], {"one": made, "two": stranger})


def test_tokens_are_joined_to_words():
    pieces = ["de", "f", " ", "\n", "", "é", "x (", " 1", "7"]
    words, texts = words_of(pieces)
    assert texts == ["def", "éx", "(", "17"]
    assert words.tolist() == [0, 0, -1, -1, 1, 1, 1, 3, 3]


def test_a_word_goes_to_the_adapter_with_the_most_gate_in_the_later_layers():
    ids = np.array([[[1], [1], [1]], [[0], [1], [-1]]])  # two layers; only the last counts
    gates = np.array([[[1.0], [1.0], [1.0]], [[0.4], [0.9], [0.0]]])
    trace = RouterTrace(
        name="r", decision="per_layer", top_k=1, adapter_ids=ids, gates=gates,
        probabilities=None, loss=np.zeros(3),
    )  # fmt: skip
    assert trace.of_words(np.array([0, 0, 1])).tolist() == [1, -1]
    assert trace.by_layer.tolist() == [[1, 1, 1], [0, 1, -1]]
    np.testing.assert_allclose(trace.agreement, [[1, 1 / 3], [1 / 3, 1]])
