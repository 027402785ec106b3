"""The contract of every router, and what is particular to each."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.models.decision import at_layer
from molora_jax.routing import (
    KEEP,
    ROUTERS,
    ControlTokenRouter,
    FixedRouter,
    LearnedRouter,
    ModulatedRouter,
    PrototypeRouter,
    SequenceRouter,
    StatisticsRouter,
    VocabularyRouter,
    build_router,
    router_arrays,
    router_config,
)
from tests.helpers import assert_close

pytestmark = pytest.mark.usefixtures("strict")

B, S, D, C, L, V = 2, 5, 8, 3, 4, 11
LEFT = np.array([[False, False, True, True, True], [True] * 5])
RIGHT = LEFT[:, ::-1].copy()


def learned(*, stacked=False, **changes) -> LearnedRouter:
    settings = {"top_k": 2, "width": 7, "rngs": nnx.Rngs(0)}
    settings |= {"num_layers": L} if stacked else {"after_layer": 1}
    router = LearnedRouter(D, C, **(settings | changes))
    # Biases start at zero, which would hide a forgotten one.
    rng = np.random.default_rng(1)
    for bias in (router.b_in, router.b_out):
        bias[...] = jnp.asarray(rng.standard_normal(bias[...].shape), jnp.float32)
    return router


def modulated() -> ModulatedRouter:
    router = ModulatedRouter(D, num_layers=L, state_size=3, rngs=nnx.Rngs(0))
    # Zeros at the start would make every scale 1.
    rng = np.random.default_rng(4)
    router.w_out[...] = jnp.asarray(rng.standard_normal(router.w_out[...].shape), jnp.float32)
    return router


def all_routers() -> dict:
    rng = np.random.default_rng(2)
    return {
        "vocabulary": VocabularyRouter(rng.integers(-1, C, V), num_columns=C),
        "control": ControlTokenRouter(rng.integers(KEEP, C, V), initial=1, num_columns=C),
        "learned": learned(),
        "statistics": StatisticsRouter(
            rng.standard_normal((D, C)), rng.standard_normal(C), top_k=2, after_layer=1
        ),
        "prototype": PrototypeRouter(
            rng.standard_normal((D, C)), top_k=1, similarity="absolute", after_layer=1
        ),
        "modulated": modulated(),
        "sequence": SequenceRouter(np.array([2, 0])),
        "fixed": FixedRouter(
            rng.integers(-1, C, (B, S, 2)), rng.random((B, S, 2)).astype(np.float32)
        ),
    }


def inputs(seed=3):
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)
    return tokens, jnp.asarray(rng.standard_normal((B, S, D)), jnp.float32)


@jax.jit
def call(router, tokens, hidden, mask, column_to_slot=None):
    if isinstance(router, ModulatedRouter):
        router = at_layer(router, 0)  # as the decoder hands it over
    return router(tokens, hidden, mask, None, column_to_slot)


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_contract(kind, mask):
    router = all_routers()[kind]
    tokens, hidden = inputs()
    routing, logits, state = call(router, tokens, hidden, mask)
    k = router.top_k
    assert router.decision in ("input", "per_layer", "shared")
    assert (state is None) == (kind != "control")  # what is carried from token to token
    assert routing.adapter_ids.shape == routing.gates.shape == (B * S, k)
    assert (routing.adapter_ids.dtype, routing.gates.dtype) == (jnp.int32, jnp.float32)
    assert logits is None or (logits.shape == (B * S, C) and logits.dtype == jnp.float32)
    ids, gates = np.asarray(routing.adapter_ids), np.asarray(routing.gates)
    assert (ids[~mask.ravel()] == -1).all()
    assert (gates[ids == -1] == 0).all()
    assert (ids[mask.ravel()] >= 0).any()

    # A row of the map that is not resident: its column is gone, the others go to their slots.
    moved, _, _ = call(router, tokens, hidden, mask, np.array([6, -1, 4], np.int32))
    assert set(np.unique(moved.adapter_ids)) <= {-1, 4, 6}
    if logits is None:
        want = np.select([ids == 0, ids == 2], [6, 4], -1)
        np.testing.assert_array_equal(moved.adapter_ids, want)


@pytest.mark.parametrize("kind", ROUTERS)
def test_saved_and_rebuilt(kind):
    router = all_routers()[kind]
    config = json.loads(json.dumps(router_config(router)))
    again = build_router(config, router_arrays(router))
    tokens, hidden = inputs()
    for a, b in zip(
        jax.tree.leaves(call(router, tokens, hidden, RIGHT)),
        jax.tree.leaves(call(again, tokens, hidden, RIGHT)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert router_config(again) == config


def test_rebuilding_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"'lerned' is unknown.*did you mean 'learned'"):
        build_router({"kind": "lerned"}, {})
    router = learned()
    arrays = router_arrays(router) | {"w_in": np.zeros((D, 8), np.float32)}
    with pytest.raises(ValueError, match=r"w_in has shape \(8, 8\).*ask for \(8, 7\)"):
        build_router(router_config(router), arrays)


def test_only_learned_parameters_are_trained_and_data_does_not_recompile():
    for kind, router in all_routers().items():
        _, trained, _ = nnx.split(router, nnx.Param, ...)
        assert bool(jax.tree.leaves(trained)) == (kind in ("learned", "modulated"))
    traces = []

    @jax.jit
    def step(router, tokens, mask):
        traces.append(1)
        return router(tokens, None, mask)[0].adapter_ids[:, 0]

    tokens, _ = inputs()
    for rows in ([0, 1], [2, -1]):
        out = step(SequenceRouter(np.array(rows)), tokens, np.ones((B, S), bool))
        np.testing.assert_array_equal(out, np.repeat(rows, S))
    assert len(traces) == 1


# Learned


def test_learned_equals_its_equation():
    router = learned()
    _, hidden = inputs()
    x = np.asarray(hidden, np.float64).reshape(-1, D)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
    w_in, b_in, w_out, b_out = (
        np.asarray(p[...], np.float64)
        for p in (router.w_in, router.b_in, router.w_out, router.b_out)
    )
    z = x @ w_in + b_in
    want = (z / (1 + np.exp(-z))) @ w_out + b_out
    _, logits, _ = call(router, inputs()[0], hidden, RIGHT)
    assert_close(logits, want, terms=D)


def test_learned_is_float32_whatever_the_model():
    router = learned()
    tokens, hidden = inputs()
    half = hidden.astype(jnp.bfloat16)
    _, logits, _ = call(router, tokens, half, RIGHT)
    _, want, _ = call(router, tokens, half.astype(jnp.float32), RIGHT)
    np.testing.assert_array_equal(logits, want)


def test_each_layer_is_a_router_of_its_own():
    router = learned(stacked=True)
    tokens, hidden = inputs()
    assert all(leaf.shape[0] == L for leaf in jax.tree.leaves(router))

    @jax.jit
    def scanned(router):
        return jax.lax.scan(
            lambda c, one: (c, one(tokens, hidden, jnp.asarray(RIGHT))[:2]), 0, router
        )[1]

    routing, logits = scanned(router)
    assert routing.adapter_ids.shape == (L, B * S, 2)
    assert not np.allclose(logits[0], logits[1])
    for layer in range(L):
        one, want, _ = call(router.layer(layer), tokens, hidden, RIGHT)
        assert_close(logits[layer], want, terms=D)
        np.testing.assert_array_equal(routing.adapter_ids[layer], one.adapter_ids)
    with pytest.raises(ValueError, match=r"networks of 4 layers.*router\.layer"):
        router(tokens, hidden, jnp.asarray(RIGHT))
    with pytest.raises(ValueError, match="no layer to take"):
        router.layer(0).layer(0)


def test_one_token_alone_equals_the_same_token_in_a_batch():
    router = learned()
    tokens, hidden = inputs()
    routing, logits, _ = call(router, tokens, hidden, np.ones((B, S), bool))
    one, alone, _ = call(router, tokens[1:, 3:4], hidden[1:, 3:4], np.ones((1, 1), bool))
    np.testing.assert_array_equal(one.adapter_ids[0], routing.adapter_ids[S + 3])
    assert_close(alone[0], logits[S + 3], terms=D)
    assert_close(one.gates[0], routing.gates[S + 3], terms=D)


def test_nonfinite_hidden_states_fall_back_and_leave_the_gradient_clean():
    router = learned()
    tokens, hidden = inputs()
    bad = hidden.at[0, 1, 2].set(jnp.nan).at[1, 0, 0].set(jnp.inf).at[1, 2].set(3e38)
    routing, logits, _ = call(router, tokens, bad, np.ones((B, S), bool))
    broken = np.zeros(B * S, bool)
    broken[[1, S, S + 2]] = True
    np.testing.assert_array_equal(np.isnan(logits).any(axis=1), broken)
    np.testing.assert_array_equal((np.asarray(routing.adapter_ids) == -1).all(axis=1), broken)

    def loss(router, hidden):
        gates = router(tokens, hidden, jnp.ones((B, S), bool))[0].gates
        return jnp.sum(gates * jnp.arange(1.0, 3.0)[None, :])

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(router, bad)
    leaves = jax.tree.leaves(grads)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    assert all(np.abs(leaf).max() > 0 for leaf in leaves)
    # The same gradient as without those tokens.
    zero = jax.jit(jax.grad(loss, argnums=(0, 1)))(router, hidden)
    assert (np.asarray(zero[1]).reshape(-1, D)[~broken] != 0).any()
    assert_close(
        np.asarray(grads[1]).reshape(-1, D)[~broken],
        np.asarray(zero[1]).reshape(-1, D)[~broken],
        terms=D,
    )


def test_with_top_k_shares_the_parameters():
    router = learned(top_k=1)
    dense = router.with_top_k(C)
    assert (router.top_k, dense.top_k) == (1, C)
    assert dense.w_in is router.w_in
    tokens, hidden = inputs()
    routing, logits, _ = call(dense, tokens, hidden, np.ones((B, S), bool))
    mixture = np.zeros((B * S, C))
    np.put_along_axis(mixture, np.asarray(routing.adapter_ids), np.asarray(routing.gates), axis=1)
    assert_close(mixture, jax.nn.softmax(logits, axis=-1), jnp.float32)
    for bad in (0, C + 1):
        with pytest.raises(ValueError, match=f"top_k {bad} is not a number from 1 to 3"):
            router.with_top_k(bad)


def test_one_column_has_weight_exactly_one():
    for gate in ("softmax", "unit"):
        router = LearnedRouter(D, 1, top_k=1, width=7, after_layer=0, gate=gate, rngs=nnx.Rngs(0))
        routing, _, _ = call(router, *inputs(), np.ones((B, S), bool))
        assert (routing.adapter_ids == 0).all()
        assert (routing.gates == 1.0).all()


def test_a_new_router_is_near_the_uniform_mixture_and_layers_differ():
    router = LearnedRouter(64, 4, top_k=2, num_layers=3, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    logits = jax.jit(jax.vmap(LearnedRouter.logits, in_axes=(0, None)))(router, x)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(axis=-1).mean()
    assert np.log(4) - 0.1 < entropy < np.log(4) - 0.01  # the paper's Tab 14 begins at 1.35
    assert not np.allclose(p[0], p[1])


def test_learned_refuses_misuse(unchecked):
    common = {"top_k": 1, "rngs": nnx.Rngs(0)}
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"top_k {k} is not a number from 1 to 3"):
            LearnedRouter(D, C, num_layers=2, top_k=k, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="give exactly one"):
        LearnedRouter(D, C, **common)
    with pytest.raises(ValueError, match="give exactly one"):
        LearnedRouter(D, C, num_layers=2, after_layer=1, **common)
    with pytest.raises(ValueError, match="after_layer -2 is no layer"):
        LearnedRouter(D, C, after_layer=-2, **common)
    tokens, hidden = inputs()
    with pytest.raises(ValueError, match="hidden is None"):
        learned()(tokens, None, jnp.asarray(RIGHT))
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 5, 7\), expected .*\(2, 5, 8\)"):
        learned()(tokens, hidden[..., 1:], jnp.asarray(RIGHT))


# Vocabulary


def test_vocabulary_routes_by_range_within_one_row():
    # Interleaved text and image ids in one prompt, which one adapter per prompt cannot serve.
    router = VocabularyRouter.from_ranges([(0, 6, 0), (6, 9, 1)], vocab_size=V)
    tokens = jnp.array([[1] * 5 + [7] * 9 + [5] * 5], jnp.int32)
    routing, logits, _ = router(tokens, None, jnp.ones(tokens.shape, bool))
    np.testing.assert_array_equal(routing.adapter_ids[:, 0], [0] * 5 + [1] * 9 + [0] * 5)
    assert logits is None
    rest = jnp.array([[9, 10]], jnp.int32)  # in no range: the base
    assert (router(rest, None, jnp.ones((1, 2), bool))[0].adapter_ids == -1).all()


def test_vocabulary_refuses_ids_outside_the_table_or_uses_the_base_inside_jit():
    router = VocabularyRouter.from_ranges([(0, 6, 0), (6, V, 1)], vocab_size=V)
    ids = np.array([[0, 5, 6, V - 1, V, -1, 2**31 - 1]], np.int32)
    mask = np.ones(ids.shape, bool)
    routing, _, _ = call(router, ids, None, mask)
    np.testing.assert_array_equal(routing.adapter_ids[:, 0], [0, 0, 1, 1, -1, -1, -1])
    np.testing.assert_array_equal(routing.gates[:, 0], [1, 1, 1, 1, 0, 0, 0])
    with pytest.raises(ValueError, match=r"token_ids\[0, 4\] is token id 11, .*11 ids \(3 such"):
        router(jnp.asarray(ids), None, jnp.asarray(mask))
    # Padding may hold anything.
    router(jnp.asarray(ids), None, jnp.asarray(mask & (np.arange(7) < 4)))


def test_vocabulary_tables_are_checked():
    for ranges, message in (
        ([(0, 5, 0), (4, 6, 1)], r"4\.\.6 of column 1 overlaps range 0\.\.5 of column 0"),
        ([(3, 3, 0)], "does not fit"),
        ([(3, V + 1, 0)], r"3\.\.12 of column 0 does not fit.*vocab_size 11"),
    ):
        with pytest.raises(ValueError, match=message):
            VocabularyRouter.from_ranges(ranges, vocab_size=V)
    with pytest.raises(ValueError, match=r"column 3 at position \(1,\): expected -1 to 2"):
        VocabularyRouter(np.array([0, 3]), num_columns=3)
    with pytest.raises(ValueError, match=r"column -2 at position \(0,\)"):
        VocabularyRouter(np.array([-2, 3]))


# Control tokens


def test_control_tokens_switch_from_their_own_place_on():
    router = ControlTokenRouter.from_tokens({8: 0, 9: 1, 10: -1}, vocab_size=V)
    tokens = jnp.array([[1, 9, 2, 3, 8, 4, 10, 5], [7] * 8], jnp.int32)
    routing, _, state = call(router, tokens, None, np.ones((2, 8), bool))
    got = np.asarray(routing.adapter_ids).reshape(2, 8)
    np.testing.assert_array_equal(got, [[-1, 1, 1, 1, 0, 0, -1, -1], [-1] * 8])
    np.testing.assert_array_equal(routing.gates[:, 0], (got >= 0).reshape(-1))
    np.testing.assert_array_equal(state, [-1, -1])


def test_a_text_read_in_parts_is_routed_as_in_one():
    rng = np.random.default_rng(0)
    router = ControlTokenRouter.from_tokens({8: 0, 9: 1, 10: -1}, vocab_size=V, initial=1)
    tokens = rng.integers(4, V, (3, 20)).astype(np.int32)
    whole = call(router, tokens, None, np.ones((3, 20), bool))[0].adapter_ids.reshape(3, 20)
    assert len(np.unique(whole)) == 3
    parts, state = [], None
    for start, stop in ((0, 7), (7, 8), (8, 15), (15, 20)):
        # Padding on either side, with control tokens in it, changes nothing.
        padded = np.full((3, 9), 9, np.int32)
        mask = np.zeros((3, 9), bool)
        at = slice(0, stop - start) if start % 2 else slice(9 - (stop - start), 9)
        padded[:, at], mask[:, at] = tokens[:, start:stop], True
        routing, _, state = router(jnp.asarray(padded), None, jnp.asarray(mask), state)
        parts.append(np.asarray(routing.adapter_ids).reshape(3, 9)[:, at])
        assert (np.asarray(routing.adapter_ids).reshape(3, 9)[~mask] == -1).all()
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_control_tables_are_checked_and_unknown_ids_use_the_base():
    with pytest.raises(ValueError, match=r"switches\[0\] is token id 11, .*add the control tokens"):
        ControlTokenRouter.from_tokens({V: 0}, vocab_size=V)
    with pytest.raises(ValueError, match=r"column -3 at position \(1,\): expected -2 to 0"):
        ControlTokenRouter(np.array([0, -3]))
    with pytest.raises(ValueError, match="initial has column 2"):
        ControlTokenRouter(np.array([0, 1]), initial=2, num_columns=2)
    router = ControlTokenRouter.from_tokens({9: 0}, vocab_size=V)
    ids = np.array([[9, V, -1, 3]], np.int32)
    routing, _, state = call(router, ids, None, np.ones((1, 4), bool))
    np.testing.assert_array_equal(routing.adapter_ids[:, 0], [0, -1, -1, 0])
    np.testing.assert_array_equal(state, [0])
    with pytest.raises(ValueError, match=r"token_ids\[0, 1\] is token id 11"):
        router(jnp.asarray(ids), None, jnp.ones((1, 4), bool))


# Sequence and Fixed


def test_sequence_gives_each_row_its_adapter():
    routing, _, _ = call(SequenceRouter(np.array([2, -1])), inputs()[0], None, LEFT)
    np.testing.assert_array_equal(routing.adapter_ids[:, 0], [-1, -1, 2, 2, 2] + [-1] * 5)
    with pytest.raises(ValueError, match="row_adapters has 3 rows, but the batch has 2"):
        SequenceRouter(np.array([0, 1, 2]))(inputs()[0], None, jnp.asarray(LEFT))


def test_fixed_keeps_ids_and_gates_and_shares_equally_without_them():
    ids = np.array([[[0, 2], [1, -1], [-1, -1]]])
    mask = np.ones((1, 3), bool)
    tokens = np.zeros((1, 3), np.int32)
    routing, _, _ = call(FixedRouter(ids), tokens, None, mask)
    np.testing.assert_array_equal(routing.adapter_ids, ids[0])
    np.testing.assert_array_equal(routing.gates, [[0.5, 0.5], [1, 0], [0, 0]])
    given = np.array([[[0.25, 2.0], [0.5, 9.0], [9.0, 9.0]]], np.float32)
    routing, _, _ = call(FixedRouter(ids, given), tokens, None, mask)
    np.testing.assert_array_equal(routing.gates, [[0.25, 2.0], [0.5, 0], [0, 0]])


def test_fixed_refuses_other_shapes(unchecked):
    tokens, _ = inputs()
    router = FixedRouter(np.zeros((B, S - 1, 1), np.int32))
    with pytest.raises(ValueError, match=r"shape \(2, 4, 1\), but the batch is .*\(2, 5\)"):
        router(tokens, None, jnp.ones((B, S), bool))
    with pytest.raises(ValueError, match=r"shape \(2, 5\), expected \(B, S, k\)"):
        FixedRouter(np.zeros((B, S), np.int32))
    with pytest.raises(ValueError, match=r"gates has shape \(2, 5, 2\), expected \(2, 5, 1\)"):
        FixedRouter(np.zeros((B, S, 1), np.int32), np.zeros((B, S, 2), np.float32))
    with pytest.raises(ValueError, match=r"adapter_ids has column -2 at position \(0, 1, 0\)"):
        FixedRouter(np.array([[[0], [-2]]]))
