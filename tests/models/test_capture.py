"""The decoder compiled for a GPU without one: a step is one CUDA graph that copies nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from molora_jax.adapters import Adapter, AdapterBank, AdapterStack
from molora_jax.adapters.names import module_name
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder, KVCache
from molora_jax.models.tiny import tiny_config
from molora_jax.models.weights import array_shapes, random_arrays
from molora_jax.routing import LearnedRouter
from pallas_kernels import deviceless

K, R, TOP_K = 4, 16, 2
STRATEGIES = ("all_slots", "grouped", "bgmv", "auto")
# No weight has as many numbers as any activation or another weight, so that sizes tell them apart.
SMALL = {
    "llama": ModelConfig(
        model_type="llama", vocab_size=1000, hidden_size=384, intermediate_size=640, num_layers=3,
        num_heads=8, num_kv_heads=2, head_dim=40,
    ),
    "qwen3": ModelConfig(
        model_type="qwen3", vocab_size=1000, hidden_size=384, intermediate_size=640, num_layers=3,
        num_heads=8, num_kv_heads=2, head_dim=40, qk_norm=True, tie_word_embeddings=True,
    ),
}  # fmt: skip
# One layer of Qwen3-4B under a small vocabulary.
QWEN3_4B = ModelConfig(
    model_type="qwen3", vocab_size=1000, hidden_size=2560, intermediate_size=9728, num_layers=1,
    num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True, tie_word_embeddings=True,
)  # fmt: skip


def decoder_shapes(config, *, unstacked=True):
    def make():
        arrays = {n: jnp.zeros(s, jnp.bfloat16) for n, s in array_shapes(config).items()}
        decoder = Decoder(config, arrays)
        return decoder.unstacked() if unstacked else decoder

    return jax.eval_shape(make)


def routed_shapes(config, strategy):
    """The arguments of a routed call; none of them for the base."""
    if strategy is None:
        return {}
    sizes = config.projection_sizes().items()
    lead = (config.num_layers, K)
    return {
        "adapters": jax.eval_shape(
            lambda: {
                name: AdapterStack(
                    lora_a=jnp.zeros((*lead, R, d_in), jnp.bfloat16),
                    lora_b=jnp.zeros((*lead, R, d_out), jnp.bfloat16),
                    ranks=jnp.zeros(lead, jnp.int32),
                )
                for name, (d_in, d_out) in sizes
            }
        ),
        "router": router_shapes(config),
        "column_to_slot": jax.ShapeDtypeStruct((K,), jnp.int32),
    }


def router_shapes(config):
    return jax.eval_shape(
        lambda: LearnedRouter(
            config.hidden_size, K, top_k=TOP_K, num_layers=config.num_layers, rngs=nnx.Rngs(0)
        )
    )


def cache_shapes(config, rows, slots):
    def make():
        shape = (rows, config.num_kv_heads, slots, config.head_dim)
        each = tuple(jnp.zeros(shape, jnp.bfloat16) for _ in range(config.num_layers))
        return KVCache(each, each, jnp.zeros((rows, slots), bool), jnp.zeros(rows, jnp.int32))

    return jax.eval_shape(make)


def compile_decode(config, strategy, *, rows=2, slots=48, decoder=None, routed=None):
    """One greedy step of generation, its cache donated."""

    def step(decoder, tokens, cache, routed):
        how = {} if strategy is None else {"strategy": strategy}
        out, cache = decoder.decode(tokens, cache, **routed, **how)
        return jnp.argmax(decoder.logits(out.hidden[:, 0]), axis=-1), out.routing, cache

    return deviceless.compile_for(
        step,
        decoder_shapes(config) if decoder is None else decoder,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        cache_shapes(config, rows, slots),
        routed_shapes(config, strategy) if routed is None else routed,
        donate=(2,),
        resources=True,
    )


def compile_prefill(config, strategy, *, rows=2, length=96, slots=160):
    def prefill(decoder, tokens, mask, routed):
        how = {} if strategy is None else {"strategy": strategy}
        out, cache = decoder.prefill(tokens, mask, cache_size=slots, **routed, **how)
        return decoder.logits(out.hidden[:, -1]), out.routing, cache

    return deviceless.compile_for(
        prefill,
        decoder_shapes(config),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        routed_shapes(config, strategy),
        resources=True,
    )


def check(report, config):
    """One graph, no copies, no weight or cache written, nothing spilled."""
    assert report.graphs == 1 and report.outside == []
    assert report.copies == []
    assert report.lost == ()
    written = {}
    for name, (d_in, d_out) in config.projection_sizes().items():
        for size in (d_in * d_out, K * R * d_in, K * R * d_out):
            if steps := report.writes(size):
                written[name] = steps
    assert written == {}
    spilled = {each.name: each.spill_bytes for each in report.kernels if each.spill_bytes}
    assert spilled == {}


@pytest.mark.deviceless
@pytest.mark.parametrize("family", SMALL)
def test_a_decode_step_of_the_base_is_one_graph(family):
    report = compile_decode(SMALL[family], None)
    check(report, SMALL[family])
    assert len(report.thunks) <= 25 * SMALL[family].num_layers


@pytest.mark.deviceless
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_routed_decode_step_is_one_graph(strategy):
    config = SMALL["qwen3"]
    check(compile_decode(config, strategy), config)


@pytest.mark.deviceless
def test_a_decode_step_with_all_slots_is_one_graph():
    """XLA runs it, slices each layer off its stack, and copies slices where it joins products."""
    config = SMALL["qwen3"]
    report = compile_decode(config, "all_slots")
    assert report.graphs == 1 and report.outside == []
    assert len(report.copies) <= 5 * config.num_layers  # lora_a of q, k, v and of gate, up
    for d_in, d_out in config.projection_sizes().values():
        assert report.writes(d_in * d_out) == []


@pytest.mark.deviceless
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("compile_one", [compile_decode, compile_prefill])
def test_a_layer_of_qwen3_4b_is_one_graph(compile_one, strategy):
    check(compile_one(QWEN3_4B, strategy), QWEN3_4B)


@pytest.mark.deviceless
def test_a_slice_inside_the_step_copies_weights():
    """What `unstacked` is for; also shows that `check` can fail."""
    config = SMALL["qwen3"]
    report = compile_decode(config, None, decoder=decoder_shapes(config, unstacked=False))
    d_in, d_out = config.projection_sizes()["gate_proj"]
    assert report.copies != []
    assert report.writes(d_in * d_out) != []


def random_adapter(config, *, rank, seed):
    rng = np.random.default_rng(seed)
    arrays = {
        module_name(layer, name): (rng.normal(size=(rank, d_in)), rng.normal(size=(d_out, rank)))
        for layer in range(config.num_layers)
        for name, (d_in, d_out) in config.projection_sizes().items()
    }
    arrays = {name: tuple(np.float32(each) for each in pair) for name, pair in arrays.items()}
    return Adapter.from_arrays(f"a{seed}", arrays, alpha=8.0, num_layers=config.num_layers)


@pytest.mark.deviceless
def test_loading_an_adapter_changes_no_program():
    config = SMALL["llama"]
    bank = AdapterBank(config, num_slots=K, max_rank=R, dtype=jnp.bfloat16)
    router = router_shapes(config)

    def program():
        shape_of = functools.partial(
            jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        )
        slots = jnp.asarray([0, -1, -1, -1], jnp.int32)
        routed = {"adapters": bank.stacks, "router": router, "column_to_slot": slots}
        return compile_decode(config, "all_slots", routed=shape_of(routed)).hlo

    def change(step):
        if step:
            bank.load(random_adapter(config, rank=4 * step, seed=step))
        if step == 2:
            bank.unload(bank.list()[0].name)

    programs = []
    for step in range(3):  # in a loop, since the text holds the line of the call
        change(step)
        programs.append(program())
    assert programs[0] == programs[1] == programs[2]


@pytest.mark.parametrize("routed", [False, True])
def test_unstacked_layers_compute_the_same(routed):
    config = dataclasses.replace(tiny_config(), num_layers=2)
    stacked = Decoder(config, random_arrays(config, seed=0))
    decoder = stacked.unstacked()
    assert decoder.unstacked() is decoder
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, (2, 5)), jnp.int32)
    mask = jnp.asarray([[True] * 5, [False] * 2 + [True] * 3])
    how = {}
    if routed:
        sizes = config.projection_sizes().items()
        lead = (config.num_layers, K)
        how["adapters"] = {
            name: AdapterStack(
                lora_a=jnp.asarray(rng.normal(size=(*lead, 3, d_in)) / 8, jnp.float32),
                lora_b=jnp.asarray(rng.normal(size=(*lead, 3, d_out)) / 4, jnp.float32),
                ranks=jnp.full(lead, 3, jnp.int32),
            )
            for name, (d_in, d_out) in sizes
        }
        how["router"] = LearnedRouter(
            config.hidden_size, K, top_k=TOP_K, num_layers=config.num_layers, rngs=nnx.Rngs(0)
        )
        how["column_to_slot"] = np.arange(K)

    @jax.jit
    def run(decoder, how):
        whole = decoder(tokens, mask, **how)
        out, cache = decoder.prefill(tokens, mask, cache_size=8, **how)
        step, cache = decoder.decode(tokens[:, 0], cache, **how)
        return whole, out, step, cache

    expected, actual = run(stacked, how), run(decoder, how)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
