"""EvidenceRouter: which adapter's own text this reads like so far, from counts of words."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from molora_jax.routing.fixed import RouterData
from molora_jax.routing.select import check_choice, resident_columns, select
from pallas_kernels import Routing

_HELD = 1e4  # evidence for the column in force, more than a text can bring


class EvidenceRouter(nnx.Module):
    """logits_t = Σ_(s ≤ t) log_odds[token_s]: naive Bayes over the text so far, before layer 0.

    A token is routed by all that was read up to it, so the choice may change within a prompt, and
    every layer uses the same adapter. A router that reads hidden states layer by layer cannot know
    more in layer 0 than the token itself. The column in force is carried to the next call as
    `state` (B,) and kept there: what is generated stays with the adapter that the prompt ended
    with. So a prompt is to be read in one call; a row holds one text.

    log_odds  (V, C) of a token id for each adapter
    """

    def __init__(self, log_odds: Float[ArrayLike, "V C"], *, top_k: int = 1):
        if np.ndim(log_odds) != 2:
            raise ValueError(
                f"log_odds has shape {np.shape(log_odds)}, expected (V, C): a row a token id, a "
                "column an adapter"
            )
        check_choice(top_k=top_k, num_columns=np.shape(log_odds)[1])
        self.decision, self.top_k, self.num_columns = "input", top_k, np.shape(log_odds)[1]
        self.log_odds = RouterData(jnp.asarray(log_odds, jnp.float32))

    @property
    def adapter_ids(self) -> Int[np.ndarray, " C"]:
        """Every column may be chosen: what `check_reach` holds against the bank."""
        return np.arange(self.num_columns)

    @classmethod
    def counted(
        cls, data: Sequence[Any], *, vocab_size: int, smoothing: float = 0.5
    ) -> "EvidenceRouter":
        """From a Batch of each adapter's own data; all that leaves an owner is V counts of tokens.

        smoothing  added to every count, so that no single token rules an adapter out
        """
        counts = np.stack(
            [np.bincount(each.tokens[each.mask], minlength=vocab_size) for each in data], axis=1
        )
        log_p = np.log((counts + smoothing) / (counts + smoothing).sum(axis=0))
        return cls(log_p - log_p.mean(axis=1, keepdims=True))

    def __call__(
        self,
        token_ids: Int[Array, "B S"],
        hidden: Float[Array, "B S D"] | None,
        mask: Bool[Array, "B S"],
        state: Int[Array, " B"] | None = None,
        column_to_slot: Int[Array, " C"] | None = None,
    ) -> tuple[Routing, Float[Array, "N C"], Int[Array, " B"]]:
        """Routing (N, k), the evidence so far, and the column in force at the end of each row."""
        C = self.num_columns
        if state is None:
            added = jnp.where(mask[..., None], self.log_odds[...][token_ids], 0.0)
            evidence = jnp.cumsum(added, axis=1)
        else:
            evidence = jnp.broadcast_to(_HELD * jax.nn.one_hot(state, C)[:, None], (*mask.shape, C))
        logits = evidence.reshape(-1, C)
        routing = select(logits, mask.reshape(-1), top_k=self.top_k, column_to_slot=column_to_slot)
        resident = resident_columns(column_to_slot, C)
        last = jnp.where(resident, evidence[:, -1], -jnp.inf)
        return routing, logits, jnp.argmax(last, axis=-1).astype(jnp.int32)
