"""The base served in place of an adapter: refused where the host can know."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.generation import generate
from molora_jax.models.decoder import Decoder
from molora_jax.routing import FixedRouter, LearnedRouter, SequenceRouter, VocabularyRouter
from molora_jax.routing.reach import check_reach
from molora_jax.training import evaluate, single_arm
from molora_jax.training.data import make_batch
from tests.models.test_decoder import random_arrays, random_stacks, tiny_config

CONFIG = tiny_config(num_layers=1)


@pytest.fixture
def stacks():
    """Three slots of which the last is empty."""
    filled = random_stacks(CONFIG)
    for stack in filled.values():
        object.__setattr__(stack, "ranks", stack.ranks.at[:, 2].set(0))
    return filled


@pytest.mark.parametrize(
    ("router", "column_to_slot", "message"),
    [
        (SequenceRouter(np.array([0, 3])), None, "column 3, but there are 3"),
        (SequenceRouter(np.array([2, -1])), None, "slot 2, which is empty"),
        (SequenceRouter(np.array([1])), np.array([0, -1]), "adapter is in no slot"),
        (FixedRouter(np.full((1, 2, 1), 2)), np.array([1, 0, 2]), "slot 2, which is empty"),
        (VocabularyRouter(np.array([0, 1, -1])), None, "3 token ids and the model 53"),
        (LearnedRouter(24, 2, top_k=1, num_layers=1, rngs=nnx.Rngs(0)), None, "may lie in any"),
    ],
)
def test_a_column_without_an_adapter_is_refused(stacks, router, column_to_slot, message):
    with pytest.raises(ValueError, match=message):
        check_reach(router, stacks, column_to_slot, config=CONFIG)


def test_what_can_be_reached_passes(stacks):
    table = np.resize([0, 1, -1], CONFIG.vocab_size)
    for router in (
        SequenceRouter(np.array([-1, 1])),
        VocabularyRouter(table),
    ):
        check_reach(router, stacks, config=CONFIG)
    learned = LearnedRouter(24, 2, top_k=1, num_layers=1, rngs=nnx.Rngs(0))
    check_reach(learned, stacks, np.array([0, -1]), config=CONFIG)
    check_reach(None, None, config=CONFIG)


def test_a_pass_generate_and_evaluate_refuse_before_they_run(stacks):
    decoder = Decoder(CONFIG, random_arrays(CONFIG))
    with pytest.raises(ValueError, match="slot 2, which is empty"):
        decoder(jnp.asarray([[1, 2]]), adapters=stacks, router=SequenceRouter(np.array([2])))
    with pytest.raises(ValueError, match="column 7"):
        generate(
            decoder,
            [[1, 2]],
            max_new_tokens=1,
            adapters=stacks,
            router=SequenceRouter(np.array([7])),
        )
    windows = make_batch(np.ones((1, 4), int), np.ones((1, 4), bool), np.ones((1, 4), bool))
    with pytest.raises(ValueError, match="column 9"):
        evaluate(decoder, windows, adapters=stacks, router=single_arm(9))
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        generate(decoder, [[1, 2]], max_new_tokens=0)


@pytest.mark.parametrize(
    "slots", [[5, 7], [0, 99], [-5, 1], [0.0, 1.0], [[0, 1]], [True, False], ["0", "1"], 1]
)
def test_a_map_of_slots_that_are_not_there_is_refused(stacks, slots):
    router = LearnedRouter(24, 2, top_k=1, num_layers=1, rngs=nnx.Rngs(0))
    for each in (router, SequenceRouter(np.array([0]))):
        with pytest.raises(ValueError, match=r"column_to_slot is .* in a bank of 3 \(0 to 2\)"):
            check_reach(each, stacks, np.array(slots), config=CONFIG)
    with pytest.raises(ValueError, match="column 1, whose adapter is in slot 2, which is empty"):
        check_reach(router, stacks, np.array([0, 2]), config=CONFIG)


def test_adapters_of_another_base_are_refused_inside_jit_too(stacks):
    others = tiny_config(num_layers=2), tiny_config(num_layers=1, hidden_size=32)
    for other in others:
        decoder = Decoder(other, random_arrays(other))
        read = jax.jit(lambda each, decoder=decoder: decoder(
            jnp.asarray([[1, 2]]), adapters=each, router=SequenceRouter(np.array([0]))
        ))  # fmt: skip
        with pytest.raises(ValueError, match=r"adapters are of another base: their .* = \(1, "):
            read(stacks)


def test_what_is_no_router_adapters_or_tokens_is_said_to_be_none(stacks):
    decoder, tokens = Decoder(CONFIG, random_arrays(CONFIG)), jnp.asarray([[1, 2]])
    router = SequenceRouter(np.array([0]))
    unchecked = inspect.unwrap(Decoder.__call__)  # as users have it, without the tests' hook
    with pytest.raises(ValueError, match="router is a str: expected a router"):
        unchecked(decoder, tokens, adapters=stacks, router="learned")
    with pytest.raises(ValueError, match=r"adapters is a tuple: expected bank\.stacks"):
        unchecked(decoder, tokens, adapters=(1, 2), router=router)
    for wrong in ("text", [1, 2], np.zeros((1, 2, 3), int)):
        with pytest.raises(ValueError, match=r"tokens is .*: expected \(B, S\) token ids"):
            unchecked(decoder, wrong)


def test_a_learned_router_needs_the_map_inside_jit_too():
    decoder = Decoder(CONFIG, random_arrays(CONFIG))
    routed = {
        "adapters": random_stacks(CONFIG),
        "router": LearnedRouter(24, 3, top_k=1, num_layers=1, rngs=nnx.Rngs(0)),
    }
    read = jax.jit(lambda routed, **more: decoder(jnp.asarray([[1, 2]]), **routed, **more).hidden)
    with pytest.raises(ValueError, match=r"column_to_slot=composition\.column_to_slot"):
        read(routed)
    hidden = read(routed, column_to_slot=np.array([0, 1, 2]))
    assert not np.array_equal(hidden, read(routed, column_to_slot=np.array([2, 1, 0])))


def test_a_composition_s_map_works_outside_jit():
    stacks = random_stacks(CONFIG)
    decoder = Decoder(CONFIG, random_arrays(CONFIG))
    router = LearnedRouter(24, 3, top_k=2, num_layers=1, rngs=nnx.Rngs(0))
    tokens = jnp.asarray([[1, 2, 3]])
    there, swapped = (
        decoder(tokens, adapters=stacks, router=router, column_to_slot=np.array(slots))
        for slots in ([0, 1, 2], [1, 0, 2])
    )
    moved = np.array([1, 0, 2])[np.asarray(there.routing.adapter_ids)]
    np.testing.assert_array_equal(swapped.routing.adapter_ids, moved)
