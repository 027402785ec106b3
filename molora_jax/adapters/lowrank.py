"""Products B·A of low rank without ever making them: norms, and truncation by SVD."""

import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from molora_jax.adapters.adapter import Adapter, LoraPair


def truncated(
    a: Float[np.ndarray, "r D"], b: Float[np.ndarray, "F r"], rank: int
) -> tuple[Float[np.ndarray, "R D"], Float[np.ndarray, "F R"], float]:
    """The best B·A of this rank, and ‖error‖ / ‖B·A‖.

    By QR of both factors, so that the (F, D) product is never made. The singular values are shared
    equally between A and B, as training from there likes it.
    """
    q_b, r_b = np.linalg.qr(b.astype(np.float64))
    q_a, r_a = np.linalg.qr(a.astype(np.float64).T)
    u, s, vt = np.linalg.svd(r_b @ r_a.T)
    kept, total = s[:rank], float(np.sum(s * s))
    error = math.sqrt(float(np.sum(s[rank:] ** 2)) / total) if total else 0.0
    root = np.sqrt(kept)
    return root[:, None] * (vt[:rank] @ q_a.T), (q_b @ u[:, :rank]) * root, error


def update_norm(pair: LoraPair) -> float:
    """‖scale · B·A‖ (Frobenius), from the r × r Gram matrices; NaN where a weight is not finite."""
    a, b = pair.a.astype(np.float64), pair.b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        square = float(np.sum((b.T @ b) * (a @ a.T)))
    return abs(pair.scale) * math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.nan


def total_error(adapter: Adapter, errors: Mapping[str, float]) -> float:
    """The relative error over all modules together, from `adapter` after truncation.

    What was kept has norm n = ‖ΔW'‖ and the whole n / √(1 − e²), because the parts are orthogonal.
    """
    whole = lost = 0.0
    for module, pair in adapter.modules.items():
        error = errors[module]
        if error < 1:
            square = update_norm(pair) ** 2 / (1 - error * error)
            whole, lost = whole + square, lost + square * error * error
    return math.sqrt(lost / whole) if whole else 0.0
