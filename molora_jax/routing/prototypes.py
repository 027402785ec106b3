"""Keys for a PrototypeRouter from adapter weights alone (Arrow, arXiv 2405.11157)."""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from molora_jax.adapters.adapter import Adapter
from molora_jax.adapters.names import module_name

# What reads the layer's normalised input, as the router does; the others read something else.
_READERS = ("q_proj", "k_proj", "v_proj")


def arrow_keys(
    adapters: Sequence[Adapter], input_norm: Float[ArrayLike, "L D"]
) -> Float[np.ndarray, "L D C"]:
    """The input direction that each adapter changes most, layer by layer, of length 1.

    It is the top right singular vector of the updates B·A of q, k and v, stacked: those three read
    the layer's input x̂·diag(norm), so the direction is brought back to x̂ by the norm's weights
    (arXiv 2405.11157 has one key a module; a decision per layer has one key a layer).

    input_norm  weights of the norm before attention, `decoder.layers.input_norm`

    Raises ValueError for an adapter that changes none of q, k and v in some layer.
    """
    norm = np.asarray(input_norm, np.float64)
    keys = np.empty((*norm.shape, len(adapters)))
    for column, adapter in enumerate(adapters):
        for layer, scale in enumerate(norm):
            names = [module_name(layer, projection) for projection in _READERS]
            pairs = [adapter.modules[name] for name in names if name in adapter.modules]
            update = [_tall(pair.a, pair.b, pair.scale) for pair in pairs]
            stacked = np.concatenate(update) if update else np.zeros((1, len(scale)))
            if not stacked.any():
                raise ValueError(
                    f"adapter {adapter.name!r} does not change q, k or v in layer {layer}, so it "
                    "has no key there: use a router that reads data (StatisticsRouter)"
                )
            # The right singular vectors of a tall product are those of its small factor.
            key = np.linalg.svd(stacked, full_matrices=False)[2][0] * scale
            keys[layer, :, column] = key / np.linalg.norm(key)
    return keys.astype(np.float32)


def _tall(a: np.ndarray, b: np.ndarray, scale: float) -> Float[np.ndarray, "r D"]:
    """(r, D) with the right singular vectors and values of scale·B·A: QR leaves R·A."""
    return scale * np.linalg.qr(b.astype(np.float64))[1] @ a.astype(np.float64)
