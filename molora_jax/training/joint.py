"""Trains adapters and router together, by the language-model loss alone: no label is read.

The router starts at random and all adapters untrained, so that both find out together which tokens
belong together. Training is dense (softmax over all columns, so that each has a gradient) and gets
sharper as the temperature falls; top-k comes at evaluation. With fixed routing (`by_label`) the
same loop trains the adapters that an oracle would have, or a single one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from molora_jax.adapters import AdapterStack, TrainableAdapter, init_adapter
from molora_jax.models.config import ModelConfig
from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import params_digest
from molora_jax.routing import LearnedRouter
from molora_jax.routing.losses import balance_loss, z_loss
from molora_jax.routing.select import check_choice
from molora_jax.training.anneal import AnnealedBatch, AnnealedOrder, tempered
from molora_jax.training.config import AdapterTrainConfig, AnnealedConfig
from molora_jax.training.data import Batch, BatchOrder
from molora_jax.training.evaluate import oracle_arm
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss
from molora_jax.training.router import RouterMonitor, routing_sums

ROUTER_ARRAYS = ("w_in", "b_in", "w_out", "b_out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointTrainConfig(AnnealedConfig, AdapterTrainConfig):
    """How adapters and their router are trained together; the base classes say the other fields.

    num_adapters    K, each of `rank`
    top_k           adapters per token at evaluation; also in training with gate="unit"
    width           hidden units of the router
    after_layer     what the router reads. −1: the embedding, one decision for all layers. n: the
                    output of layer n, one decision for those after it. None: each layer its input
    gate            "softmax", trained densely; or "unit", trained at top_k, straight-through
    router_lr       × lr is the router's learning rate
    router_warmup   steps in which the router stands still, so that the adapters differ first
    jitter          standard deviation of the adapters' first B, in units of A's; 0 is PEFT's start
    balance_coef    × K·Σ f·p;    z_coef  × router z-loss
    info_coef       × −I(column of a token; column of its neighbour) in nats, as in invariant
                    information clustering (arXiv 1807.06653): tokens that stand side by side are
                    mostly of one kind. No label is read
    collapse_share  a warning is given when one adapter takes more of a layer's tokens
    """

    num_adapters: int = 4
    top_k: int = 2
    width: int = 64
    after_layer: int | None = -1
    gate: str = "softmax"
    router_lr: float = 1.0
    router_warmup: int = 0
    temperature: tuple[float, float] = (1.0, 0.1)
    jitter: float = 0.0
    balance_coef: float = 0.0
    z_coef: float = 0.0
    info_coef: float = 0.0
    collapse_share: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        check_choice(top_k=self.top_k, num_columns=self.num_adapters, gate=self.gate)
        for name in ("balance_coef", "z_coef", "info_coef", "jitter", "router_warmup"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
        if not 0 < self.router_lr < float("inf"):
            raise ValueError(f"router_lr must be a positive number, got {self.router_lr!r}")

    @property
    def held_steps(self) -> int:
        return self.router_warmup


@dataclasses.dataclass(frozen=True)
class JointTraining:
    """What train_jointly made: adapters in column order, the router (None by label), the records.

    `stacks` are those of a bank with as many slots, for `Decoder` and `evaluate`.
    """

    adapters: tuple[TrainableAdapter, ...]
    router: LearnedRouter | None
    records: list[dict]

    def stacks(self) -> dict[str, AdapterStack]:
        return stacked(self.adapters)


# (steps done, stacks, router with its temperature folded, or None) → numbers for the record.
Measure = Callable[[int, dict[str, AdapterStack], LearnedRouter | None], dict[str, Any]]


def train_jointly(
    model: ModelConfig,
    decoder: Decoder,
    windows: Batch,
    config: JointTrainConfig,
    *,
    by_label: bool = False,
    measure: Measure | None = None,
    measure_every: int = 0,
    run_dir: Path | str | None = None,
) -> JointTraining:
    """Minimises the next-token loss over adapters and router; the decoder is frozen.

    by_label  no router: a token goes to the adapter of its label (the oracle; with num_adapters=1
              and labels 0, plain LoRA). Otherwise labels are not read
    measure   asked before the first step, every `measure_every` steps and after the last; the
              record of the step before has its answer, and that of step 0 has the first one's too,
              under names that end in "/start"
    run_dir   as in `fit`: metrics.jsonl, checkpoints, resume

    Raises NonFiniteLossError where training diverges.
    """
    adapters = tuple(start_adapters(model, config))
    params: dict[str, Any] = {"adapters": adapters}
    frozen: dict[str, Any] = {"decoder": decoder}
    loss: Any = LabelLoss()
    order: Any = BatchOrder(windows, config.batch_size * config.accumulate, config.seed)
    router = None
    if not by_label:
        router = start_router(model, config)
        params["router"] = {
            name: jnp.zeros_like(getattr(router, name)[...]) for name in ROUTER_ARRAYS
        }
        coefs = {
            "balance": config.balance_coef,
            "z": config.z_coef,
            "info": config.info_coef,
        }
        frozen |= {
            "router": router,
            "router_lr": np.float32(config.router_lr),
            "coefs": {name: np.float32(value) for name, value in coefs.items()},
        }
        loss = JointLoss(top_k=config.top_k)
        order = AnnealedOrder(order, config)

    def measured(steps: int, params: Any) -> dict[str, Any]:
        due = measure_every and (steps % measure_every == 0 or steps in (0, config.steps))
        if measure is None or not due:
            return {}
        return measure(steps, stacked(params["adapters"]), _router_of(params, steps))

    def _router_of(params: Any, steps: int) -> LearnedRouter | None:
        if router is None:
            return None
        # As the step that comes next would have it, and as the last step had it.
        temperature = config.temperature_at(min(steps, config.steps - 1))
        moved = moved_router(router, params["router"], config.router_lr, temperature)
        return moved.with_top_k(config.top_k)

    start = {f"{name}/start": value for name, value in measured(0, params).items()}
    params, records = fit(
        loss,
        params,
        order,
        config,
        frozen=frozen,
        name=f"{config.num_adapters} × rank {config.rank}",
        run_dir=run_dir,
        identity={"base": params_digest(decoder), "by": "label" if by_label else "router"},
        summarise=None if by_label else JointMonitor(config),
        measure=lambda steps, params: measured(steps, params) | (start if steps == 1 else {}),
    )
    return JointTraining(params["adapters"], _router_of(params, config.steps), records)


def start_adapters(model: ModelConfig, config: JointTrainConfig) -> list[TrainableAdapter]:
    """Adapters that differ in A, and with `jitter` in B."""
    made = []
    for column in range(config.num_adapters):
        key = jax.random.fold_in(jax.random.key(config.seed), column)
        adapter = init_adapter(
            model,  # type: ignore[arg-type]  # frozen, which the protocol does not foresee
            rank=config.rank,
            alpha=config.alpha,
            projections=config.projections,
            rng=key,
            use_rslora=config.use_rslora,
        )
        # B is zeros already without jitter.
        for index, (name, b) in enumerate(adapter.lora_b.items() if config.jitter else ()):
            unit = adapter.lora_a[name].shape[-1] ** -0.5
            noise = jax.random.normal(jax.random.fold_in(key, 1000 + index), b.shape)
            adapter.lora_b[name] = config.jitter * unit * noise
        made.append(adapter)
    return made


def start_router(model: ModelConfig, config: JointTrainConfig) -> LearnedRouter:
    """A router near the uniform mixture, trained over all columns unless its gate is "unit"."""
    where: dict[str, Any] = (
        {"num_layers": model.num_layers}
        if config.after_layer is None
        else {"after_layer": config.after_layer}
    )
    return LearnedRouter(
        model.hidden_size,
        config.num_adapters,
        top_k=config.top_k if config.gate == "unit" else config.num_adapters,
        width=config.width,
        gate=config.gate,
        rngs=nnx.Rngs(config.seed),
        **where,
    )


def stacked(adapters: tuple[TrainableAdapter, ...]) -> dict[str, AdapterStack]:
    """A bank of K slots, one an adapter, scales folded."""
    each = [adapter.stacks() for adapter in adapters]
    return {
        name: jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves, axis=1), *(slots[name] for slots in each)
        )
        for name in each[0]
    }


def moved_router(
    start: LearnedRouter, moves: Mapping[str, Array], lr: Any, temperature: Any
) -> LearnedRouter:
    """The router that began as `start`, with its logits divided by the temperature.

    Adam's step has the size of the learning rate whatever the gradient's: what is trained is a
    move, of which the router takes `lr` times.
    """

    def moved(name: str) -> Array:
        return getattr(start, name)[...] + lr * moves[name]

    arrays = {name: moved(name) for name in ROUTER_ARRAYS}
    router = jax.tree_util.tree_map_with_path(lambda path, leaf: arrays[path[0].name], start)
    return tempered(router, temperature)


@dataclasses.dataclass(frozen=True)
class LabelLoss:
    """Summed next-token loss with the adapter of each token's label."""

    def __call__(
        self, params: dict[str, Any], frozen: dict[str, Any], batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
        decoder = frozen["decoder"]
        out = decoder(
            batch.tokens,
            batch.mask,
            adapters=stacked(params["adapters"]),
            router=oracle_arm(batch),
        )
        loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
        return loss, weight, {}


@dataclasses.dataclass(frozen=True)
class JointLoss:
    """Next-token loss of the routed model + coef · balance, z-loss and neighbours', each a mean."""

    top_k: int

    def __call__(
        self, params: dict[str, Any], frozen: dict[str, Any], batch: AnnealedBatch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
        moving = batch.moving[0, 0]
        moves = jax.tree.map(
            lambda move: moving * move + (1 - moving) * jax.lax.stop_gradient(move),
            params["router"],
        )
        temperature = batch.temperature[0, 0]
        router = moved_router(frozen["router"], moves, frozen["router_lr"], temperature)
        decoder, mask = frozen["decoder"], batch.mask.reshape(-1)
        out = decoder(
            batch.tokens,
            batch.mask,
            adapters=stacked(params["adapters"]),
            router=router,
            column_to_slot=np.arange(router.num_columns),
        )
        language, weight = next_token_loss(decoder.logits(out.hidden), batch)
        logits = out.router_logits
        parts = {
            "balance": balance_loss(logits, mask, top_k=self.top_k),
            "z": z_loss(logits, mask),
            "info": neighbour_loss(logits, batch.mask),
        }
        extra = sum(frozen["coefs"][name] * part for name, part in parts.items())
        sums = {"weight": weight, "language": language}
        sums |= {name: part * weight for name, part in parts.items()}
        return language + extra * weight, weight, sums | routing_sums(logits, mask)


def neighbour_loss(logits: Float[Array, "l N C"], mask: Bool[Array, "B S"]) -> Float[Array, ""]:
    """−I in nats of the columns of two neighbouring tokens, in either order; −ln C at best.

    The joint distribution is the mean of p_t ⊗ p_t+1 over pairs of real tokens whose logits are
    finite. Two kinds that share a column cost information; a kind split at random over two columns
    neither costs nor gains any. Mean over layers; 0 without a pair.
    """
    C = logits.shape[-1]
    usable = jnp.isfinite(logits).all(axis=-1) & mask.reshape(1, -1)
    p = jax.nn.softmax(jnp.where(usable[..., None], logits, 0.0), axis=-1)
    p, usable = p.reshape(-1, *mask.shape, C), usable.reshape(-1, *mask.shape)
    both = (usable[:, :, 1:] & usable[:, :, :-1])[..., None]
    joint = jnp.einsum("lbsc,lbsd->lcd", jnp.where(both, p[:, :, :-1], 0.0), p[:, :, 1:])
    joint /= jnp.maximum(both.sum(axis=(1, 2, 3)), 1).reshape(-1, 1, 1)
    joint = (joint + joint.swapaxes(1, 2)) / 2
    alone = jnp.maximum(joint.sum(axis=2), 1e-9)
    ratio = jnp.maximum(joint, 1e-9) / (alone[:, :, None] * alone[:, None, :])
    return -(joint * jnp.log(ratio)).sum(axis=(1, 2)).mean()


class JointMonitor(RouterMonitor):
    """RouterMonitor's numbers of a step, without the label's, and warning."""

    def __init__(self, config: JointTrainConfig):
        names = [str(column) for column in range(config.num_adapters)]
        super().__init__(names, config.collapse_share)

    def __call__(self, sums: Any) -> dict[str, Any]:
        found = super().__call__(sums | {"label": 0.0})
        del found["label_loss"]
        return found | {"info_loss": float(sums["info"]) / max(float(sums["weight"]), 1.0)}
