"""A gate trained with one adapter alone, whose direction is a key (PHATGOOSE, arXiv 2402.05859)."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from molora_jax.adapters import Adapter, AdapterBank
from molora_jax.models import BaseModel
from molora_jax.routing.fixed import place
from molora_jax.routing.select import rms_normalize
from molora_jax.training.adapter import kept_frozen
from molora_jax.training.adapter_checkpoint import stated_name
from molora_jax.training.config import TrainConfig
from molora_jax.training.data import Batch, BatchOrder
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss
from pallas_kernels import Routing


class AdapterGate(nnx.Module):
    """Scale σ(x̂·v) of one adapter in every layer; a half everywhere while v = 0."""

    def __init__(self, key: Float[Array, "*L D"]):
        self.decision, self.top_k, self.num_columns = "per_layer", 1, 1
        self.key = nnx.Param(key)

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"],
        mask: Bool[Array, "B S"],
        state: Any = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, None, Any]:
        """Routing (N, 1) of the one adapter, no logits, and `state` as it came."""
        gates = jax.nn.sigmoid(rms_normalize(hidden) @ self.key[...])
        ids = place(jnp.where(mask, 0, -1), column_to_slot).reshape(-1, 1)
        return Routing(ids, jnp.where(ids >= 0, gates.reshape(-1, 1), 0.0)), None, state


def train_gate(
    base: BaseModel,
    adapter: Adapter,
    windows: Batch,
    config: TrainConfig,
    *,
    run_dir: Path | str | None = None,
) -> tuple[Float[np.ndarray, "L D"], list[dict]]:
    """v of every layer by the language-model loss on the adapter's own data, and the records.

    Base and adapter are frozen; no other adapter is known. `linear.standardised` makes keys of such
    vectors, for a PrototypeRouter. `run_dir` as in `fit`.
    """
    sizes = base.config
    bank = AdapterBank(sizes, num_slots=1, max_rank=adapter.rank, projections=adapter.projections)
    bank.load(adapter)
    first = {"key": jnp.zeros((sizes.num_layers, sizes.hidden_size), jnp.float32)}
    with kept_frozen(base):
        trained, records = fit(
            gate_loss,
            first,
            BatchOrder(windows, config.batch_size * config.accumulate, config.seed),
            config,
            frozen={"decoder": base.decoder, "stacks": bank.stacks},
            name=f"gate of {adapter.name}",
            run_dir=run_dir,
            identity={"base": base.digest, "adapter": adapter.digest},
            about={
                "kind": "gate",
                "base_name": stated_name(base.name),
                "adapter": adapter.name,
            },
        )
    return np.asarray(trained["key"]), records


def gate_loss(
    params: dict[str, Array], frozen: dict[str, Any], batch: Batch
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
    """Summed next-token loss with the adapter scaled by its gate."""
    decoder = frozen["decoder"]
    out = decoder(
        batch.tokens,
        batch.mask,
        adapters=frozen["stacks"],
        router=AdapterGate(params["key"]),
        column_to_slot=np.arange(1),
    )
    loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
    return loss, weight, {}
