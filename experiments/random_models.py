"""Decoders and adapters with random weights, for what is timed and not read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from molora_jax.adapters import Adapter
from molora_jax.adapters.names import module_name
from molora_jax.models import Decoder, ModelConfig, load_base
from molora_jax.models.qwen3 import QWEN3
from molora_jax.models.weights import array_shapes

RANDOM = {"qwen3-4b-random": QWEN3["qwen3-4b"]}


def base_decoder(name: str, *, dtype: str, seed: int) -> Decoder:
    """A base model by name, one of RANDOM among them."""
    if name in RANDOM:
        return random_decoder(RANDOM[name], dtype=dtype, seed=seed)
    return for_device(load_base(name, dtype=dtype).decoder)


def for_device(decoder: Decoder) -> Decoder:
    """Unrolled on a GPU, where a scan would copy every layer's weights; scanned elsewhere."""
    return decoder.unstacked() if jax.default_backend() == "gpu" else decoder


def random_config(d: int, layers: int) -> ModelConfig:
    """A Llama of that width: an MLP as costly as a plain one of 4·d, and a small vocabulary."""
    head_dim = min(128, d)
    return ModelConfig(
        model_type="llama", vocab_size=1024, hidden_size=d,
        intermediate_size=max(8 * d // 3 // 64, 1) * 64, num_layers=layers,
        num_heads=d // head_dim, num_kv_heads=d // head_dim, head_dim=head_dim,
    )  # fmt: skip


def random_decoder(sizes: ModelConfig, *, dtype: str, seed: int) -> Decoder:
    """Random weights, made on the device, of the size that `random_arrays` gives them."""
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 32)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, scale):
        return (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(dtype)

    arrays = {}
    for key, (name, shape) in zip(keys, array_shapes(sizes).items(), strict=False):
        if "norm" in name:
            arrays[name] = jnp.ones(shape, dtype)
        else:
            arrays[name] = draw(key, shape, shape[-1] ** -0.5)
    return for_device(Decoder(sizes, arrays))


def random_adapter(config: ModelConfig, name: str, *, rank: int, seed: int) -> Adapter:
    """An adapter on all projections whose update is a tenth of each output, as a trained one's."""
    rng = np.random.default_rng(seed)
    arrays = {
        module_name(layer, projection): (
            rng.standard_normal((rank, D), dtype=np.float32) * np.float32(D**-0.5),
            rng.standard_normal((F, rank), dtype=np.float32) * np.float32(0.1 * rank**-0.5),
        )
        for layer in range(config.num_layers)
        for projection, (D, F) in config.projection_sizes().items()
    }
    return Adapter.from_arrays(name, arrays, alpha=rank, num_layers=config.num_layers)
