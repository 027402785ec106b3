"""The decoder against a plain float64 forward pass: padded, cached, scanned, unrolled, routed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import AdapterStack
from molora_jax.models.config import ModelConfig, rope_frequencies
from molora_jax.models.decoder import Decoder
from molora_jax.routing import (
    KEEP,
    ControlTokenRouter,
    FixedRouter,
    LearnedRouter,
    SequenceRouter,
    VocabularyRouter,
)

FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True, "head_dim": 10, "tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
}
K, R = 3, 4


def tiny_config(family: str = "llama", **changes) -> ModelConfig:
    numbers = {
        "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_layers": 3,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "max_positions": 64, "rope_theta": 100.0,
    }  # fmt: skip
    return ModelConfig(model_type=family, **(numbers | FAMILIES[family] | changes))


def random_arrays(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    L, D = config.num_layers, config.hidden_size
    arrays = {
        "embed_tokens.weight": rng.normal(size=(config.vocab_size, D)),
        "norm.weight": rng.uniform(0.5, 1.5, size=D),
        "layers.input_layernorm.weight": rng.uniform(0.5, 1.5, size=(L, D)),
        "layers.post_attention_layernorm.weight": rng.uniform(0.5, 1.5, size=(L, D)),
    }
    if not config.tie_word_embeddings:
        arrays["lm_head.weight"] = rng.normal(size=(config.vocab_size, D))
    for name, (d_in, d_out) in config.projection_sizes().items():
        path = f"layers.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        arrays[f"{path}.weight"] = rng.normal(size=(L, d_out, d_in)) / np.sqrt(d_in)
        if config.qkv_bias and name in ("q_proj", "k_proj", "v_proj"):
            arrays[f"{path}.bias"] = rng.normal(size=(L, d_out))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            shape = (L, config.head_dim)
            arrays[f"layers.self_attn.{name}.weight"] = rng.uniform(0.5, 1.5, size=shape)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def random_stacks(config: ModelConfig, seed: int = 1, projections=None) -> dict[str, AdapterStack]:
    rng = np.random.default_rng(seed)
    L = config.num_layers
    return {
        name: AdapterStack(
            lora_a=jnp.asarray(rng.normal(size=(L, K, R, d_in)) / np.sqrt(d_in), jnp.float32),
            lora_b=jnp.asarray(rng.normal(size=(L, K, R, d_out)) / 4, jnp.float32),
            ranks=jnp.full((L, K), R, jnp.int32),
        )
        for name, (d_in, d_out) in config.projection_sizes().items()
        if projections is None or name in projections
    }


def plain_forward(config, arrays, tokens, stacks=None, ids=None, gates=None):
    """Logits (S, V) of one unpadded row, a token and a head at a time, in float64.

    ids, gates (L, S, k): each token's adapters in each layer.
    """
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    frequency, factor = rope_frequencies(config)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight

    def turn(x, position):
        half = config.head_dim // 2
        cos, sin = np.cos(position * frequency) * factor, np.sin(position * frequency) * factor
        a, b = x[:half], x[half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def project(name, layer, x):
        path = f"layers.{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}"
        y = x @ arrays[f"{path}.weight"][layer].T
        if f"{path}.bias" in arrays:
            y = y + arrays[f"{path}.bias"][layer]
        if stacks is not None and name in stacks:
            a = np.asarray(stacks[name].lora_a[layer], np.float64)
            b = np.asarray(stacks[name].lora_b[layer], np.float64)
            for n in range(len(x)):
                for slot, gate in zip(ids[layer, n], gates[layer, n], strict=True):
                    if slot >= 0:
                        y[n] += gate * (b[slot].T @ (a[slot] @ x[n]))
        return y

    x = arrays["embed_tokens.weight"][tokens]
    S, H, Hk, Dh = len(tokens), config.num_heads, config.num_kv_heads, config.head_dim
    for layer in range(config.num_layers):
        h = norm(x, arrays["layers.input_layernorm.weight"][layer])
        q = project("q_proj", layer, h).reshape(S, H, Dh)
        k = project("k_proj", layer, h).reshape(S, Hk, Dh)
        v = project("v_proj", layer, h).reshape(S, Hk, Dh)
        if config.qk_norm:
            q = norm(q, arrays["layers.self_attn.q_norm.weight"][layer])
            k = norm(k, arrays["layers.self_attn.k_norm.weight"][layer])
        out = np.zeros((S, H, Dh))
        for s in range(S):
            for head in range(H):
                group = head // (H // Hk)
                query = turn(q[s, head], s)
                scores = np.array([query @ turn(k[t, group], t) for t in range(s + 1)])
                scores = scores / np.sqrt(Dh)
                weights = np.exp(scores - scores.max())
                out[s, head] = weights / weights.sum() @ v[: s + 1, group]
        x = x + project("o_proj", layer, out.reshape(S, H * Dh))
        h = norm(x, arrays["layers.post_attention_layernorm.weight"][layer])
        gate = project("gate_proj", layer, h)
        silu = gate / (1 + np.exp(-gate))
        x = x + project("down_proj", layer, silu * project("up_proj", layer, h))
    head = arrays.get("lm_head.weight", arrays["embed_tokens.weight"])
    return norm(x, arrays["norm.weight"]) @ head.T


@functools.partial(jax.jit, static_argnames="unroll")
def forward(decoder, tokens, mask=None, *, unroll=False, **routed):
    out = decoder(tokens, mask, unroll=unroll, **routed)
    return out, decoder.logits(out.hidden)


prefill = jax.jit(
    lambda decoder, *arrays, cache_size, **routed: decoder.prefill(
        *arrays, cache_size=cache_size, **routed
    ),
    static_argnames="cache_size",
)
decode = jax.jit(lambda decoder, *arrays, **routed: decoder.decode(*arrays, **routed))


def padded(rows: list[np.ndarray], side: str, width: int):
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, each in enumerate(rows):
        start = width - len(each) if side == "left" else 0
        tokens[row, start : start + len(each)] = each
        mask[row, start : start + len(each)] = True
    return jnp.asarray(tokens), jnp.asarray(mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_plain_forward(family):
    config = tiny_config(family)
    arrays = random_arrays(config)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 11)
    decoder = Decoder(config, arrays)
    logits = forward(decoder, jnp.asarray(tokens)[None])[1][0]
    np.testing.assert_allclose(logits, plain_forward(config, arrays, tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_real_token(family, side):
    config = tiny_config(family)
    arrays, rng = random_arrays(config), np.random.default_rng(3)
    rows = [rng.integers(0, config.vocab_size, n) for n in (3, 9, 1)]
    decoder = Decoder(config, arrays)
    tokens, mask = padded(rows, side, 9)
    logits = np.asarray(forward(decoder, tokens, mask)[1])
    assert np.isfinite(logits).all()
    for row, each in enumerate(rows):
        expected = plain_forward(config, arrays, each)
        real = logits[row][np.asarray(mask[row])]
        np.testing.assert_allclose(real, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "side"), [("llama", "left"), ("qwen3", "right")])
def test_prefill_and_decode_equal_one_pass(family, side):
    config = tiny_config(family)
    arrays, rng = random_arrays(config), np.random.default_rng(4)
    rows = [rng.integers(0, config.vocab_size, n) for n in (9, 4)]
    prompts = [row[:-3] if len(row) > 3 else row[:1] for row in rows]
    decoder = Decoder(config, arrays)
    tokens, mask = padded(prompts, side, 8)
    _, cache = prefill(decoder, tokens, mask, cache_size=13)
    for at in range(3):
        following = jnp.asarray([row[len(row) - 3 + at] for row in rows])
        out, cache = decode(decoder, following, cache)
        logits = np.asarray(decoder.logits(out.hidden[:, 0]))
        for row, each in enumerate(rows):
            expected = plain_forward(config, arrays, each[: len(each) - 2 + at])[-1]
            np.testing.assert_allclose(logits[row], expected, atol=2e-4, rtol=1e-4)


def routers(config, B, S):
    rng = np.random.default_rng(5)
    ids = rng.integers(-1, K, (B, S, 2))
    gates = rng.uniform(0.2, 1.0, (B, S, 2)).astype(np.float32)
    learned = {"top_k": 2, "rngs": nnx.Rngs(7)}
    table = rng.integers(-1, K, config.vocab_size).astype(np.int32)
    return {
        "fixed": FixedRouter(jnp.asarray(ids, jnp.int32), jnp.asarray(gates)),
        "sequence": SequenceRouter(jnp.asarray([2, -1], jnp.int32)),
        "vocabulary": VocabularyRouter(jnp.asarray(table)),
        "control": ControlTokenRouter(np.where(np.arange(len(table)) % 4, KEEP, table)),
        "per_layer": LearnedRouter(config.hidden_size, K, num_layers=config.num_layers, **learned),
        "shared": LearnedRouter(config.hidden_size, K, after_layer=0, **learned),
    }


def routed(adapters, router, *, num_slots=K):
    return {"adapters": adapters, "router": router, "column_to_slot": np.arange(num_slots)}


@pytest.mark.parametrize("kind", ["fixed", "sequence", "vocabulary", "per_layer", "shared"])
def test_routed_logits_equal_a_plain_forward_with_the_same_decisions(kind):
    config = tiny_config()
    arrays, stacks = random_arrays(config), random_stacks(config)
    tokens = np.random.default_rng(6).integers(0, config.vocab_size, (2, 7))
    router = routers(config, 2, 7)[kind]
    decoder = Decoder(config, arrays)
    base = forward(decoder, jnp.asarray(tokens))[1]
    outs, logits = zip(
        *(
            forward(decoder, jnp.asarray(tokens), **routed(stacks, router), unroll=unroll)
            for unroll in (False, True)
        ),
        strict=True,
    )
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert np.abs(logits[0][0] - base[0]).max() > 1e-2
    ids = np.asarray(outs[0].routing.adapter_ids).reshape(config.num_layers, 2, 7, -1)
    gates = np.asarray(outs[0].routing.gates).reshape(ids.shape)
    for row in range(2):
        expected = plain_forward(config, arrays, tokens[row], stacks, ids[:, row], gates[:, row])
        np.testing.assert_allclose(logits[0][row], expected, atol=5e-4, rtol=1e-3)
    if kind == "sequence":  # a row without an adapter is the base, bit for bit
        np.testing.assert_array_equal(logits[0][1], base[1])
    if kind == "shared":
        assert (ids[0] == -1).all() and (ids[1] >= 0).all()
        np.testing.assert_array_equal(ids[1], ids[2])
        assert outs[0].router_logits.shape == (1, 14, K)


@pytest.mark.parametrize("kind", ["vocabulary", "control", "per_layer", "shared"])
def test_routed_decode_takes_the_decisions_of_one_pass(kind):
    config = tiny_config()
    decoder, stacks = Decoder(config, random_arrays(config)), random_stacks(config)
    tokens = jnp.asarray(np.random.default_rng(8).integers(0, config.vocab_size, (2, 9)))
    given = routed(stacks, routers(config, 2, 9)[kind])
    whole, _ = forward(decoder, tokens, **given)
    out, cache = prefill(decoder, tokens[:, :6], jnp.ones((2, 6), bool), cache_size=9, **given)
    for at in range(6, 9):
        state = out.router_state
        out, cache = decode(decoder, tokens[:, at], cache, router_state=state, **given)
        np.testing.assert_allclose(out.hidden[:, 0], whole.hidden[:, at], atol=2e-4)
        ids = np.asarray(whole.routing.adapter_ids).reshape(config.num_layers, 2, 9, -1)
        np.testing.assert_array_equal(out.routing.adapter_ids, ids[:, :, at])


@pytest.mark.parametrize("kind", ["sequence", "per_layer", "shared"])
def test_adapters_layer_by_layer_compute_the_same(kind):
    config = tiny_config()
    decoder, stacks = Decoder(config, random_arrays(config)), random_stacks(config)
    layers = [jax.tree.map(lambda leaf, at=at: leaf[at], stacks) for at in range(config.num_layers)]
    tokens = jnp.asarray(np.random.default_rng(8).integers(0, config.vocab_size, (2, 7)))
    router = routers(config, 2, 7)[kind]
    ways = {"stacked": (decoder, stacks), "layers": (decoder.unstacked(), layers)}
    found = {n: forward(d, tokens, **routed(a, router))[1] for n, (d, a) in ways.items()}
    np.testing.assert_allclose(found["layers"], found["stacked"], atol=1e-5)
    _, cache = prefill(
        decoder, tokens[:, :6], jnp.ones((2, 6), bool), cache_size=9, **routed(stacks, router)
    )
    steps = [
        decode(d, tokens[:, 6], jax.tree.map(jnp.copy, cache), **routed(a, router))[0].hidden
        for d, a in ways.values()
    ]
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-5)
    with pytest.raises(ValueError, match="given layer by layer, which a scan"):
        decoder(tokens, **routed(layers, router))
    if kind == "sequence":
        gone = [jax.tree.map(jnp.zeros_like, each) for each in layers]
        with pytest.raises(ValueError, match="slot 2, which is empty"):
            decoder.unstacked()(tokens, adapters=gone, router=router)


def test_texts_packed_into_a_row_are_read_as_if_each_were_alone():
    """Also where one of them overflows on its way: its NaN stays with it."""
    decoder = Decoder(tiny_config(), random_arrays(tiny_config()))
    rng = np.random.default_rng(4)
    lengths, slots = (5, 1, 7, 4), (0, -1, 2, 1)
    texts = [rng.integers(0, 53, length) for length in lengths]
    stacks = random_stacks(decoder.config)
    # The third text's values overflow from its first token on; its last token is far behind.
    wild = stacks["v_proj"]
    stacks["v_proj"] = dataclasses.replace(
        wild, lora_a=wild.lora_a * 1e3, lora_b=wild.lora_b.at[1, 2].set(3e38)
    )
    packed = np.zeros(20, np.int32)
    packed[:17] = np.concatenate(texts)
    segments = np.repeat([0, 1, 2, 3, 9], [*lengths, 3])
    of_token = np.append(slots, -1)[np.minimum(segments, 4)]
    out = decoder(
        packed[None],
        (np.arange(20) < 17)[None],
        segments=segments[None],
        adapters=stacks,
        router=FixedRouter(of_token.reshape(1, 20, 1)),
    )
    got = np.split(np.asarray(out.hidden[0]), np.cumsum(lengths))
    for text, slot, hidden in zip(texts, slots, got[:4], strict=True):
        alone = decoder(text[None], adapters=stacks, router=SequenceRouter(np.asarray([slot])))
        np.testing.assert_allclose(hidden, alone.hidden[0], rtol=1e-5, atol=1e-5)
        assert np.isnan(hidden).all() == (slot == 2)


def test_adapters_on_a_subset_of_projections():
    config = tiny_config()
    arrays = random_arrays(config)
    stacks = random_stacks(config, projections=("v_proj", "down_proj"))
    tokens = np.random.default_rng(9).integers(0, config.vocab_size, 6)
    ids = np.full((config.num_layers, 6, 1), 1)
    decoder = Decoder(config, arrays)
    router = SequenceRouter(jnp.asarray([1], jnp.int32))
    _, logits = forward(decoder, jnp.asarray(tokens)[None], adapters=stacks, router=router)
    expected = plain_forward(config, arrays, tokens, stacks, ids, np.ones(ids.shape))
    np.testing.assert_allclose(logits[0], expected, atol=5e-4, rtol=1e-3)


def test_ids_outside_the_vocabulary_are_refused_and_inside_jit_give_nan_and_no_adapter():
    # An array look-up would read the last row of the embedding for -1 and for V alike.
    config = tiny_config()
    decoder, stacks, V = Decoder(config, random_arrays(config)), random_stacks(config), 53
    assert config.vocab_size == V
    router = LearnedRouter(24, K, num_layers=config.num_layers, top_k=2, rngs=nnx.Rngs(7))
    for wrong in (-1, V, 2**31 - 1):
        tokens = jnp.asarray([[3, 4, wrong], [5, 6, 7]])
        with pytest.raises(ValueError, match=rf"tokens\[0, 2\] is token id {wrong}, .* of 53 ids"):
            decoder(tokens)
        out, logits = forward(decoder, tokens, **routed(stacks, router))
        assert np.isnan(logits[0]).all()  # a hidden value counts 0, and 0·NaN is NaN
        ids = np.asarray(out.routing.adapter_ids).reshape(config.num_layers, 2, 3, 2)
        assert (ids[:, 0, 2] == -1).all() and (ids[0, :, :2] >= 0).all()
        # The other row, and a row that only pads with the id, are as ever.
        _, expected = forward(decoder, tokens.at[0, 2].set(8), **routed(stacks, router))
        np.testing.assert_array_equal(logits[1], expected[1])
        mask = jnp.asarray([[True, True, False], [True] * 3])
        assert np.isfinite(forward(decoder, tokens, mask)[1]).all()


def test_a_bank_of_one_adapter_under_a_learned_router_is_plain_lora_bit_for_bit():
    config = tiny_config()
    decoder = Decoder(config, random_arrays(config))
    one = jax.tree.map(lambda leaf: leaf[:, :1], random_stacks(config))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, config.vocab_size, (2, 7)))
    plain = forward(decoder, tokens, adapters=one, router=SequenceRouter(jnp.asarray([0, 0])))[1]
    assert np.abs(plain - forward(decoder, tokens)[1]).max() > 1e-2
    for place in ({"num_layers": config.num_layers}, {"after_layer": 0}):
        for gate in ("softmax", "unit"):
            router = LearnedRouter(24, 1, top_k=1, gate=gate, rngs=nnx.Rngs(1), **place)
            found = forward(decoder, tokens, **routed(one, router, num_slots=1))[1]
            if "num_layers" in place:
                np.testing.assert_array_equal(found, plain)
            else:  # the layers up to the deciding one use no adapter
                assert not np.array_equal(found, plain)


def test_adapters_without_a_router_are_refused():
    config = tiny_config()
    decoder = Decoder(config, random_arrays(config))
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="adapters without router"):
        decoder(tokens, adapters=random_stacks(config))
    with pytest.raises(ValueError, match="router without adapters"):
        decoder(tokens, router=SequenceRouter(jnp.zeros(1, jnp.int32)))


def test_a_shared_router_must_leave_a_layer():
    config = tiny_config()
    router = LearnedRouter(config.hidden_size, K, after_layer=2, top_k=1, rngs=nnx.Rngs(0))
    decoder = Decoder(config, random_arrays(config))
    with pytest.raises(ValueError, match="after_layer 2 leaves no layer"):
        decoder(jnp.zeros((1, 3), jnp.int32), **routed(random_stacks(config), router))
