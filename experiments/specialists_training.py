"""Trains the arms of the map, all conflicts at once, and measures them at every budget.

Letters beyond the table of design.md: G conflicts trained side by side, n questions, W rows, M
steps of one call. Adapters are {projection: (A (r, D), B (r, F))} of the last layer, scale 2.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import specialists_task as task
from molora_jax.adapters import AdapterStack, init_adapter
from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import params_digest
from molora_jax.routing import SequenceRouter, StatisticsRouter
from molora_jax.routing.closed_form import solve_logits
from molora_jax.routing.statistics import RouterStatistics
from molora_jax.training import BatchOrder, TrainConfig
from molora_jax.training.losses import token_nll
from molora_jax.training.pretrain import pretrain

SCALE = 2.0
WARMUP = 4  # steps
TUNING_SEED = 1000  # added to the seed: learning rates are chosen on answers that are not reported
BASE_SEED = 999
_ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def trained_base(run, config) -> Decoder:
    """The frozen base, pretrained on every mark with answers of its own."""
    from safetensors.numpy import load_file, save_file

    marks = max(config.adapters)
    model = task.sizes(
        questions=config.questions, marks=marks, width=config.width, layers=config.layers,
        pairs=config.pairs,
    )  # fmt: skip
    training = TrainConfig(
        steps=config.base_steps, lr=3e-3, batch_size=32, warmup_steps=30, seed=BASE_SEED
    )

    def make(folder):
        rows = task.base_rows(
            questions=config.questions, marks=marks, pairs=config.pairs, count=8192, seed=BASE_SEED
        )
        arrays, _ = pretrain(model, BatchOrder(rows, training.batch_size), training, run_dir=folder)
        save_file(arrays, folder / "base.safetensors")

    if not config.base_steps:
        from molora_jax.models.weights import random_arrays

        return Decoder(model, random_arrays(model, seed=BASE_SEED))
    return run.artifact(
        "specialists-base",
        config={"training": training, "model": model, "rows": 8192},
        digests={},
        make=make,
        load=lambda folder: Decoder(model, load_file(folder / "base.safetensors")),
        phase="base",
    )


def chosen_rates(run, decoder: Decoder, config) -> dict[tuple[str, int], list[float]]:
    """Of each (arm, K) the learning rate of every budget.

    The one with the lowest held-out loss on the tuning seed, mean over conflicts, where rows say
    their domain.
    """
    chosen = {}
    for count in config.adapters:
        for arm in ("split", "pooled"):
            if len(config.lrs) == 1:
                chosen[arm, count] = [config.lrs[0]] * config.points
                continue
            losses = [
                np.mean(
                    measured_arm(
                        run, decoder, config, arm, count,
                        marked=True, lr=lr, seed=config.seed + TUNING_SEED,
                    )["val_loss"],
                    axis=1,
                )
                for lr in config.lrs
            ]  # fmt: skip
            chosen[arm, count] = [config.lrs[best] for best in np.argmin(losses, axis=0)]
    return chosen


def tuned_arm(
    run,
    decoder: Decoder,
    config,
    arm: str,
    count: int,
    rates: list[float],
    *,
    marked: bool,
    seed: int,
) -> dict[str, Any]:
    """`measured_arm`, each budget at its own of `rates`."""
    found = {
        lr: measured_arm(run, decoder, config, arm, count, marked=marked, lr=lr, seed=seed)
        for lr in dict.fromkeys(rates)
    }
    first = found[rates[0]]
    return {
        name: [found[lr][name][point] for point, lr in enumerate(rates)]
        for name in first
        if name != "parameters"
    } | {"parameters": first["parameters"]}


def measured_arm(
    run, decoder: Decoder, config, arm: str, count: int, *, marked: bool, lr: float, seed: int
) -> dict[str, Any]:
    """{name: (budgets, conflicts)} of one arm, and "parameters".

    "val_loss" and "train_loss"; of the split arm val_loss is with each row's own adapter, and
    "routed" and "right" are the loss and the share of answers sent right with the router.
    """

    def make(folder):
        found = _Piece(decoder, config, count, marked=marked, seed=seed).measured(arm, lr)
        (folder / "measured.json").write_text(json.dumps(found))

    names = (
        "questions", "pairs", "conflicts", "rank", "steps", "batch_rows", "points", "router_rows",
        "val_rows",
    )  # fmt: skip
    return run.artifact(
        "specialists-arm",
        config={name: getattr(config, name) for name in names}
        | {"arm": arm, "K": count, "marked": marked, "lr": lr, "seed": seed},
        digests={"base": params_digest(decoder)},
        make=make,
        load=lambda folder: json.loads((folder / "measured.json").read_text()),
        phase=f"{arm}/{count}/{'marked' if marked else 'hidden'}/{seed}/{lr:g}",
    )


class _Piece:
    """The rows of one K and seed, of all conflicts, and how the arms are trained on them."""

    def __init__(self, decoder: Decoder, config, count: int, *, marked: bool, seed: int):
        self.decoder, self.config, self.count, self.seed = decoder, config, count, seed
        own_steps = config.steps // count
        train, held_out = [], []
        for conflict in config.conflicts:
            tables = task.answers(config.questions, count, conflict=conflict, seed=seed)
            # The same questions at every conflict: only their answers differ.
            rng = np.random.default_rng([seed, 23])
            for each, rows in ((train, own_steps * config.batch_rows), (held_out, config.val_rows)):
                each.append(
                    [
                        task.make_rows(
                            table, domain if marked else 0, count=rows, pairs=config.pairs, rng=rng
                        )
                        for domain, table in enumerate(tables)
                    ]
                )
        self.train = np.asarray(train)  # (G, K, rows, S)
        self.held_out = np.asarray(held_out)

    def measured(self, arm: str, lr: float) -> dict[str, Any]:
        config, K, G = self.config, self.count, len(self.config.conflicts)
        found: dict[str, Any] = {"val_loss": [], "train_loss": []}
        if arm == "pooled":
            # Every K rows in turn are one of each domain.
            rows = self.train.swapaxes(1, 2).reshape(G, config.steps, config.batch_rows, -1)
            val = self.held_out.reshape(G, -1, rows.shape[-1])
            start = self._start(self.pooled_ranks(), 0)
            for adapters, loss in self._trained(start, rows, lr, config.budgets):
                found["train_loss"].append(loss)
                found["val_loss"].append(_losses(self.decoder, adapters, val).tolist())
            return found | {"parameters": _count(start[0]) // G}
        weights, bias = self._router()
        ranks = dict.fromkeys(self.decoder.config.projection_sizes(), config.rank)
        by_domain, losses = [], []
        for domain in range(K):
            rows = self.train[:, domain].reshape(G, config.steps // K, config.batch_rows, -1)
            start = self._start(ranks, 1 + domain)
            steps = [budget // K for budget in config.budgets]
            adapters, loss = zip(*self._trained(start, rows, lr, steps), strict=True)
            by_domain.append(adapters)
            losses.append(loss)
        found |= {"routed": [], "right": []}
        for point in range(config.points):
            each = [adapters[point] for adapters in by_domain]
            own = [_losses(self.decoder, a, self.held_out[:, d]) for d, a in enumerate(each)]
            found["val_loss"].append(np.mean(own, axis=0).tolist())
            found["train_loss"].append(np.mean([loss[point] for loss in losses], axis=0).tolist())
            slots = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *each)
            routed, right = _routed(self.decoder, slots, weights, bias, self.held_out)
            found["routed"].append(np.asarray(routed).tolist())
            found["right"].append(np.asarray(right).tolist())
        parameters = (K * _count(start[0]) + weights.size + bias.size) // G
        return found | {"parameters": parameters}

    def pooled_ranks(self) -> dict[str, int]:
        """K·r everywhere, and in one projection more, so as to have no fewer than with a router."""
        sizes = self.decoder.config.projection_sizes()
        ranks = dict.fromkeys(sizes, self.count * self.config.rank)
        router = (self.decoder.config.hidden_size + 1) * self.count
        ranks["down_proj"] += -(-router // sum(sizes["down_proj"]))
        return ranks

    def _start(self, ranks: dict[str, int], index: int):
        return _start(
            self.seed, index, model=self.decoder.config, ranks=tuple(ranks.items()),
            copies=len(self.config.conflicts),
        )  # fmt: skip

    def _trained(self, start, rows, lr: float, stops):
        """Yields (adapters, training loss (G,) of the last steps) at each of `stops`."""
        # One length for every arm and K, so that few programs are compiled.
        M = self.config.first_point // max(self.config.adapters)
        adapters, state = start
        for step in range(0, stops[-1], M):
            rates = lr * np.minimum(1.0, (np.arange(step, step + M) + 1) / WARMUP)
            (adapters, state), loss = _steps(
                self.decoder, adapters, state, rows[:, step : step + M], rates.astype(np.float32)
            )
            if step + M in stops:
                yield adapters, np.asarray(loss).mean(axis=1).tolist()

    def _router(self):
        """(weights (G, D, K), bias (G, K)), solved from the first rows of each domain."""
        weights, bias = [], []
        for rows in self.train[:, :, : self.config.router_rows]:
            each = []
            for own in rows:
                statistics = RouterStatistics(1, self.decoder.config.hidden_size)
                statistics.add(_last_inputs(self.decoder, own), np.ones(own.shape, bool))
                each.append(statistics)
            w, b = solve_logits(each)
            weights.append(w[0])
            bias.append(b[0])
        return np.asarray(weights, np.float32), np.asarray(bias, np.float32)


@functools.partial(jax.jit, static_argnames=("model", "ranks", "copies"))
def _start(seed, index, *, model, ranks, copies: int):
    """`copies` of one adapter, A as PEFT's and B zero, and the optimiser's states."""
    key = jax.random.fold_in(jax.random.key(seed), index)
    adapters = {}
    for name, rank in ranks:
        one = init_adapter(model, rank=rank, alpha=SCALE * rank, projections=(name,), rng=key)
        adapters[name] = (one.lora_a[name][-1], one.lora_b[name][-1])
    adapters = jax.tree.map(lambda leaf: jnp.tile(leaf, (copies, 1, 1)), adapters)
    return adapters, jax.vmap(_ADAM.init)(adapters)


def _stacks(slots, num_layers: int) -> dict[str, AdapterStack]:
    """{projection: (A (K, r, D), B (K, r, F))} of the last layer as a bank over all."""

    def behind(leaf):
        return jnp.pad(leaf[None], [(num_layers - 1, 0), (0, 0), (0, 0), (0, 0)])

    return {
        name: AdapterStack(
            lora_a=behind(a),
            lora_b=behind(SCALE * b),
            ranks=jnp.full((num_layers, a.shape[0]), a.shape[1], jnp.int32),
        )
        for name, (a, b) in slots.items()
    }


def _answer_nll(decoder: Decoder, tokens, slots, router):
    """Loss of every answer (W, pairs), and which slot the last layer took there."""
    num_slots = len(jax.tree.leaves(slots)[0])
    out = decoder(
        tokens, None, adapters=_stacks(slots, decoder.config.num_layers), router=router,
        column_to_slot=np.arange(num_slots), strategy="all_slots", unroll=True,
    )  # fmt: skip
    assert out.routing is not None
    nll = token_nll(decoder.logits(out.hidden), tokens)[:, 1::2]
    chosen = out.routing.adapter_ids[-1].reshape(tokens.shape)[:, 1::2]
    return nll, chosen


def _alone(decoder: Decoder, adapter, tokens):
    """Mean loss of the answers with one adapter on every token."""
    router = SequenceRouter(jnp.zeros(tokens.shape[0], jnp.int32))
    slots = jax.tree.map(lambda leaf: leaf[None], adapter)
    return _answer_nll(decoder, tokens, slots, router)[0].mean()


@jax.jit
def _steps(decoder, adapters, state, rows, rates):
    """M steps of Adam of G adapters, each on its own rows (G, M, B, S), and their losses (G, M)."""

    def trained(adapter, state, rows):
        def step(carry, now):
            adapter, state = carry
            tokens, rate = now
            loss, grads = jax.value_and_grad(_alone, argnums=1)(decoder, adapter, tokens)
            updates, state = _ADAM.update(grads, state)
            adapter = jax.tree.map(lambda p, u: p - rate * u, adapter, updates)
            return (adapter, state), loss

        return jax.lax.scan(step, (adapter, state), (rows, rates))

    return jax.vmap(trained)(adapters, state, rows)


@jax.jit
def _losses(decoder, adapters, rows):
    return jax.vmap(functools.partial(_alone, decoder))(adapters, rows)


@jax.jit
def _routed(decoder, slots, weights, bias, rows):
    """Loss (G,) and share of answers that had their own adapter, of rows (G, K, W, S)."""
    _, K, W, S = rows.shape
    own = jnp.repeat(jnp.arange(K), W)[:, None]

    def one(slots, weights, bias, rows):
        router = StatisticsRouter(weights, bias, top_k=1, after_layer=decoder.config.num_layers - 2)
        nll, chosen = _answer_nll(decoder, rows.reshape(K * W, S), slots, router)
        return nll.mean(), (chosen == own).mean()

    return jax.vmap(one)(slots, weights, bias, rows)


@jax.jit
def _last_inputs(decoder, tokens):
    """(1, W, S, D): what the last layer reads under the base."""
    return decoder(tokens, None, return_layer_inputs=True).layer_inputs[-1:]


def _count(adapters) -> int:
    return int(sum(leaf.size for leaf in jax.tree.leaves(adapters)))
