"""Trains an adapter with or without a modulated scale, and measures it."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from experiments import modulated_task as rows
from experiments.domains import load_domains
from experiments.run_folder import number
from molora_jax.adapters import PROJECTIONS, init_adapter
from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import params_digest
from molora_jax.models.weights import random_arrays
from molora_jax.routing import ModulatedRouter, SequenceRouter
from molora_jax.training import BatchOrder, TrainConfig, evaluate
from molora_jax.training.data import Batch
from molora_jax.training.evaluate import single_arm
from molora_jax.training.loop import fit
from molora_jax.training.losses import next_token_loss
from molora_jax.training.pretrain import pretrain

ARMS = {
    "lora": "LoRA, as many parameters",
    "stateless": "scale without memory",
    "recurrent": "scale with memory (MaLoRA, our reading)",
}
SCALE = 2.0
TUNING_SEED = 1000  # added to the seed: learning rates are chosen where nothing is reported
BASE_SEED = 999
_BASE_ROWS = 4096
_MLP = ("gate_proj", "up_proj", "down_proj")


class Task:
    """Rows, base and adapted projections of one task."""

    def __init__(self, run, config, name: str):
        self.config, self.name = config, name
        self.projections = _MLP if name == "marks_mlp" else PROJECTIONS
        self.sizes = rows.sizes(width=config.width, layers=config.layers, seq_len=config.seq_len)
        self.domains = load_domains(source=config.data)[2:4] if name == "text" else []
        self.decoder = self._base(run)

    def _base(self, run) -> Decoder:
        """The frozen base: old answers, to which marks mean nothing; or the first domain's text."""
        from safetensors.numpy import load_file, save_file

        config = self.config
        if not config.base_steps:
            return Decoder(self.sizes, random_arrays(self.sizes, seed=BASE_SEED))
        training = TrainConfig(
            steps=config.base_steps, lr=3e-3, batch_size=32, warmup_steps=30, seed=BASE_SEED
        )
        made_from = {"training": training, "model": self.sizes, "seq_len": config.seq_len}
        if self.name == "text":
            digests = {"data": self.domains[0].digest}
        else:
            made_from["questions"], digests = config.questions, {}

        def make(folder):
            if self.name == "text":
                windows, _ = rows.text_rows(
                    self.domains[0], seq_len=config.seq_len, most=4 * _BASE_ROWS
                )
            else:
                old = rows.tables(config.questions, 0, base_seed=BASE_SEED)[0]
                windows, _ = rows.marked_rows(
                    np.stack([old, old]), count=_BASE_ROWS, seq_len=config.seq_len, seed=BASE_SEED
                )
            arrays, _ = pretrain(
                self.sizes, BatchOrder(windows, training.batch_size), training, run_dir=folder
            )
            save_file(arrays, folder / "base.safetensors")

        return run.artifact(
            "modulated-base",
            config=made_from,
            digests=digests,
            make=make,
            load=lambda folder: Decoder(self.sizes, load_file(folder / "base.safetensors")),
            phase=f"base/{self.name}",
        )

    def rows(self, seed: int) -> tuple[Batch, Batch, np.ndarray]:
        """Rows to train on (marked ones are all drawn afresh), held-out rows, and distances."""
        config = self.config
        needed = config.steps * config.batch_rows
        if self.name == "text":
            train, held_out = rows.text_rows(
                self.domains[1], seq_len=config.seq_len, most=max(needed, config.val_rows)
            )
            held_out = held_out.rows(slice(0, config.val_rows))
            return train, held_out, np.full(held_out.tokens.shape, -1)
        answers = rows.tables(config.questions, seed, base_seed=BASE_SEED)
        train, _ = rows.marked_rows(answers, count=needed, seq_len=config.seq_len, seed=2 * seed)
        held_out, distance = rows.marked_rows(
            answers, count=config.val_rows, seq_len=config.seq_len, seed=2 * seed + 1
        )
        return train, held_out, distance


def chosen_rate(run, task: Task, config, arm: str) -> float:
    """The learning rate with the lowest held-out loss on the tuning seed."""
    if len(config.lrs) == 1:
        return config.lrs[0]

    def loss(lr: float) -> float:
        seed = config.seed + TUNING_SEED
        return measured_arm(run, task, config, arm, lr=lr, seed=seed)["val_loss"]

    return min(config.lrs, key=loss)


def measured_arm(run, task: Task, config, arm: str, *, lr: float, seed: int) -> dict[str, Any]:
    """Losses, parameters, the curve, and what the scale does, of one arm and seed."""
    training = TrainConfig(
        steps=config.steps, lr=lr, warmup_steps=10, batch_size=config.batch_rows, seed=seed
    )

    def make(folder):
        found = _trained(task, config, arm, training, folder)
        (folder / "measured.json").write_text(json.dumps(found))

    digests = {"base": params_digest(task.decoder)}
    if task.domains:
        digests["data"] = task.domains[1].digest
    names = ("questions", "seq_len", "rank", "state_size", "measure_every", "val_rows")
    return run.artifact(
        "modulated-arm",
        config={name: getattr(config, name) for name in names}
        | {"task": task.name, "arm": arm, "training": training},
        digests=digests,
        make=make,
        load=lambda folder: json.loads((folder / "measured.json").read_text()),
        phase=f"{task.name}/{arm}/{seed}/{lr:g}",
    )


def _trained(task: Task, config, arm: str, training: TrainConfig, folder) -> dict[str, Any]:
    train, held_out, distance = task.rows(training.seed)
    decoder = task.decoder
    modulator = ModulatedRouter(
        config.width,
        num_layers=config.layers,
        state_size=config.state_size,
        recurrent=arm == "recurrent",
        rngs=nnx.Rngs(training.seed),
    )
    rank = config.rank
    if arm == "lora":
        sizes = decoder.config.projection_sizes()
        of_rank_1 = config.layers * sum(sum(sizes[name]) for name in task.projections)
        rank += -(-_count(modulator) // of_rank_1)
    adapter = init_adapter(
        decoder.config,  # type: ignore[arg-type]  # frozen, which the protocol does not foresee
        rank=rank,
        alpha=SCALE * rank,
        projections=task.projections,
        rng=jax.random.key(training.seed),
    )
    graph, weights = nnx.split(modulator)
    params = {"adapter": adapter} | ({} if arm == "lora" else {"modulator": weights})
    loss = ModulatedLoss(None if arm == "lora" else graph)

    def evaluated(params, windows):
        router = single_arm(0) if arm == "lora" else nnx.merge(graph, params["modulator"])
        return evaluate(
            decoder, windows, adapters=params["adapter"].stacks(), router=router,
            column_to_slot=np.zeros(1, np.int32), batch_size=min(64, config.val_rows),
            return_routing=True,
        )  # fmt: skip

    def measured(steps, params):
        due = steps % config.measure_every == 0 or steps == config.steps
        return {"val_loss": evaluated(params, held_out).nll} if due else {}

    params, records = fit(
        loss,
        params,
        BatchOrder(train, config.batch_rows, training.seed),
        training,
        frozen=decoder,
        name=f"{task.name}, {arm}",
        run_dir=folder,
        identity={"base": params_digest(decoder)},
        measure=measured,
    )
    found = evaluated(params, held_out)
    assert found.routing is not None
    gates = found.routing.gates[..., 0]  # (L, W, S)
    points = [record for record in records if "val_loss" in record]
    return {
        "val_loss": found.nll,
        "train_loss": evaluated(params, train.rows(slice(0, config.val_rows))).nll,
        "parameters": _count(params),
        "tokens": sum(record["tokens"] for record in records),
        "steps": [record["step"] + 1 for record in points],
        "curve": [record["val_loss"] for record in points],
        # Of marked rows: loss by the pairs since the mark, and the scale of each layer by the mark.
        "by_distance": [
            number(found.mean(distance == pairs), "loss")
            for pairs in range(int(distance.max()) + 1)
        ],
        "scale": [
            [
                number(gates[:, held_out.labels == kind].mean(axis=1)[layer], "scale")
                for kind in (0, 1)
            ]
            for layer in range(config.layers)
        ]
        if task.name != "text"
        else [],
        "sample": {
            "tokens": held_out.tokens[0].tolist(),
            "gates": gates[:, 0].round(4).tolist(),
        },
    }


@dataclasses.dataclass(frozen=True)
class ModulatedLoss:
    """Summed next-token loss with one adapter, at the scale of the modulator or, without, at 1."""

    graph: Any

    def __call__(
        self, params: dict[str, Any], decoder: Decoder, batch: Batch
    ) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
        router: nnx.Module = SequenceRouter(jnp.zeros(batch.tokens.shape[0], jnp.int32))
        if self.graph is not None:
            router = nnx.merge(self.graph, params["modulator"])
        out = decoder(
            batch.tokens, batch.mask, adapters=params["adapter"].stacks(), router=router,
            column_to_slot=np.arange(1), strategy="all_slots",
        )  # fmt: skip
        loss, weight = next_token_loss(decoder.logits(out.hidden), batch)
        return loss, weight, {}


def _count(tree: Any) -> int:
    return functools.reduce(lambda total, leaf: total + int(leaf.size), jax.tree.leaves(tree), 0)
