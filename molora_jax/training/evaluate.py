"""Held-out loss of a base under any routing of a bank: per token, and what the router chose.

Letters beyond the table of design.md: W windows.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float, Int

from molora_jax.adapters import AdapterStack
from molora_jax.call import check_decoder
from molora_jax.display.progress import Progress
from molora_jax.models.decoder import Decoder
from molora_jax.parallel import computing, current_mesh, fetch, place, place_rows, token_shards
from molora_jax.routing import FixedRouter
from molora_jax.routing.metrics import main_adapter, token_shares
from molora_jax.routing.reach import check_reach
from molora_jax.token_ids import check_token_ids
from molora_jax.training.data import Batch
from molora_jax.training.losses import token_nll


@dataclass(frozen=True)
class TokenRouting:
    """What every layer chose for every token, on the host: slots (−1: none), gates, and why.

    `logits` are the router's, for its columns: one layer of them where the decision is shared,
    None where the router has none.
    """

    adapter_ids: Int[np.ndarray, "L W S k"]
    gates: Float[np.ndarray, "L W S k"]
    logits: Float[np.ndarray, "l W S C"] | None

    def __repr__(self) -> str:
        shape = self.adapter_ids.shape
        logits = "none" if self.logits is None else self.logits.shape
        return f"TokenRouting of {shape} (layers, windows, positions, adapters), logits {logits}"


@dataclass(frozen=True)
class Evaluation:
    """Losses in nats on the host.

    token_nll  (W, S) of predicting tokens[:, i + 1] at position i, 0 where that is no target
    weights    (W, S) which positions count, and how much
    routing    where asked for

        >>> mj.Evaluation(np.array([[1.0, 3.0, 0.0]]), weights=np.array([[1.0, 1.0, 0.0]]))
        2.0000 nats a token over 2 tokens of (1, 3)
    """

    token_nll: Float[np.ndarray, "W S"]
    weights: Float[np.ndarray, "W S"]
    routing: TokenRouting | None = None

    @property
    def tokens(self) -> int:
        """Number of targets."""
        return int((self.weights > 0).sum())

    @property
    def nll(self) -> float:
        """Mean over targets; NaN where there is none."""
        return self.mean()

    def mean(self, chosen: Bool[np.ndarray, "W S"] | None = None) -> float:
        """Mean over the chosen positions (all if None); NaN where none of them is a target."""
        weights = self.weights if chosen is None else self.weights * chosen
        total = float(weights.sum(dtype=np.float64))
        if total == 0:
            return float("nan")
        return float((self.token_nll * weights).sum(dtype=np.float64)) / total

    def shares(
        self, labels: Int[np.ndarray, "W S"], *, num_domains: int, num_slots: int
    ) -> Float[np.ndarray, "G K"]:
        """Share of each domain's tokens whose main adapter is each slot.

        labels  domain of each token, `Batch.labels`; −1 is left out

        Raises ValueError without a routing.
        """
        if self.routing is None:
            raise ValueError("no routing was kept: evaluate(..., return_routing=True)")
        ids, gates = (
            each.reshape(len(each), -1, each.shape[-1])
            for each in (self.routing.adapter_ids, self.routing.gates)
        )
        return token_shares(main_adapter(ids, gates), np.ravel(labels), num_domains, num_slots)

    def __str__(self) -> str:
        W, S = self.token_nll.shape
        kept = "" if self.routing is None else ", with its routing"
        return f"{self.nll:.4f} nats a token over {self.tokens} tokens of ({W}, {S}){kept}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from molora_jax.display.tables import loss_table

        return loss_table({"": self})._repr_html_()


# A router, or how to make one for a batch, where its choice depends on the rows.
Arm = nnx.Module | Callable[[Batch], nnx.Module]


def evaluate(
    decoder: Decoder,
    windows: Batch,
    *,
    adapters: dict[str, AdapterStack] | None = None,
    router: Arm | None = None,
    column_to_slot: Int[np.ndarray, " C"] | None = None,
    batch_size: int = 8,
    return_routing: bool = False,
    label: str = "",
) -> Evaluation:
    """Loss of every token of `windows`, `batch_size` rows at a time.

    adapters  AdapterBank.stacks, with a router; neither for the base alone
    router    a router of molora_jax.routing, or a function from a batch to one (`oracle_arm`, …)
    label     what the bar calls it, where there are several

    Arms of the same structure (the same bank, router type and k) share one compiled function; so
    do the base, every single adapter and the oracle when all are given as arms over one bank.

        >>> routed = mj.evaluate(base.decoder, windows, **composition.routed, return_routing=True)
        >>> routed.token_nll.shape, routed.routing.adapter_ids.shape  # (W, S), (L, W, S, k)
        ((4, 16), (4, 4, 16, 1))
    """
    check_decoder(decoder)
    if not isinstance(windows, Batch):
        raise ValueError(
            f"windows is a {type(windows).__name__}: expected a Batch, as read_windows(FILE, "
            "base.tokenizer, seq_len=128) reads it"
        )
    check_token_ids(windows.tokens, decoder.config.vocab_size)
    mesh = current_mesh()
    batch_size += -batch_size % token_shards(mesh)
    decoder, adapters = place(decoder, mesh), place(adapters, mesh)
    nll, choices = [], []
    starts = range(0, windows.num_rows, batch_size)
    with Progress(f"evaluating {label}".rstrip(), len(starts)) as progress:
        for start in starts:
            rows = windows.rows(slice(start, start + batch_size))
            batch = rows.filled(batch_size)
            made = callable(router) and not isinstance(router, nnx.Module)
            arm = router(batch) if made else router  # type: ignore[misc]
            check_reach(arm, adapters, column_to_slot, config=decoder.config)
            with computing(mesh):
                token, choice = fetch(
                    _evaluate_batch(
                        decoder,
                        place_rows(batch, mesh),
                        adapters,
                        place(arm, mesh),
                        column_to_slot,
                        return_routing=return_routing,
                    )
                )
            nll.append(token[: rows.num_rows])
            choices.append(choice)
            progress.update()
    routing = None
    if choices[0] is not None:
        ids, gates, logits = (_by_row(parts, windows) for parts in zip(*choices, strict=True))
        assert ids is not None
        assert gates is not None
        routing = TokenRouting(ids, gates, logits)
    return Evaluation(np.concatenate(nll), np.asarray(windows.weights), routing)


def _by_row(parts: Sequence[np.ndarray | None], windows: Batch) -> np.ndarray | None:
    """(L, B·S, ·) of each batch → (L, W, S, ·), without the rows that filled the last batch."""
    arrays = [part for part in parts if part is not None]
    if not arrays:
        return None
    whole = np.concatenate(arrays, axis=1)
    shape = (len(whole), -1, windows.seq_len, whole.shape[-1])
    return whole.reshape(shape)[:, : windows.num_rows]


def base_arm(batch: Batch) -> FixedRouter:
    """No adapter: exactly the base.

    >>> mj.base_arm(windows).adapter_ids.shape  # (B, S, k), all −1
    (4, 16, 1)
    """
    return FixedRouter(np.full((*batch.tokens.shape, 1), -1))


def single_arm(column: int) -> Arm:
    """One adapter for every token.

    >>> mj.single_arm(1)(windows).adapter_ids.shape  # (B, S, k), all 1
    (4, 16, 1)
    """
    return lambda batch: FixedRouter(np.full((*batch.tokens.shape, 1), column))


def oracle_arm(batch: Batch) -> FixedRouter:
    """Each token the adapter of its own domain, by its label.

    >>> mj.oracle_arm(windows.labelled(1)).adapter_ids.shape  # (B, S, k), all 1
    (4, 16, 1)
    """
    return FixedRouter(batch.labels[..., None])


def uniform_arm(num_columns: int) -> Arm:
    """All adapters with equal gates, for every token.

    >>> mj.uniform_arm(2)(windows).gates.shape  # (B, S, k), all 1/2
    (4, 16, 2)
    """

    def arm(batch: Batch) -> FixedRouter:
        return FixedRouter(np.tile(np.arange(num_columns), (*batch.tokens.shape, 1)))

    return arm


@functools.partial(jax.jit, static_argnames=("return_routing",))
def _evaluate_batch(decoder, batch, adapters, router, column_to_slot, *, return_routing):
    out = decoder(
        batch.tokens, batch.mask, adapters=adapters, router=router, column_to_slot=column_to_slot
    )
    nll = token_nll(decoder.logits(out.hidden), batch.tokens)
    choice = None
    if return_routing and out.routing is not None:
        choice = (out.routing.adapter_ids, out.routing.gates, out.router_logits)
    return jnp.where(batch.weights > 0, nll, 0.0), choice
