"""Trains a small decoder from random weights, every parameter: a base of one's own to adapt."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float

from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.models.weights import random_arrays
from molora_jax.training.config import TrainConfig
from molora_jax.training.data import Batch
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss


def small_llama(vocab_size: int, *, width: int, layers: int, seq_len: int) -> ModelConfig:
    """Sizes of a small Llama: 4 heads, an MLP of twice the width, embeddings tied.

    width    a multiple of 8
    seq_len  tokens of a row; there are positions for 64 at least
    """
    return ModelConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        head_dim=width // 4,
        tie_word_embeddings=True,
        max_positions=max(seq_len, 64),
    )


def pretrain(
    sizes: ModelConfig,
    batches: Callable[[int], Batch],
    config: TrainConfig,
    *,
    start: dict[str, np.ndarray] | None = None,
    name: str = "base",
    run_dir: Path | str | None = None,
) -> tuple[dict[str, np.ndarray], list[dict]]:
    """Minimises the next-token loss over all weights: (arrays for `Decoder`, one record a step).

    batches  step → batch, as in `fit`: a `BatchOrder`, or a function that makes rows anew each step
    start    arrays to go on from (full fine-tuning); None: random, from config.seed
    run_dir  as in `fit`: metrics.jsonl, checkpoints, resume

    Raises NonFiniteLossError where training diverges.
    """
    first = random_arrays(sizes, seed=config.seed) if start is None else start
    trained, records = fit(
        PretrainLoss(sizes), first, batches, config, frozen=None, name=name, run_dir=run_dir
    )
    return {key: np.asarray(array) for key, array in trained.items()}, records


@dataclasses.dataclass(frozen=True)
class PretrainLoss:
    """Summed next-token loss of a decoder whose arrays are the parameters."""

    sizes: ModelConfig

    def __call__(
        self, arrays: dict[str, Array], frozen: None, batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
        decoder = Decoder(self.sizes, arrays)
        out = decoder(batch.tokens, batch.mask)
        loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
        return loss, weight, {}
