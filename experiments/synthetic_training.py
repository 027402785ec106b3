"""The arms of the synthetic task: trained once, kept, and measured on held-out rows."""

import json
from typing import Any

import jax
import numpy as np

from experiments import synthetic_task
from experiments.synthetic_task import MODALITIES
from molora_jax.models.decoder import Decoder
from molora_jax.models.digest import params_digest
from molora_jax.training import BatchOrder, Evaluation, TrainConfig, evaluate, oracle_arm
from molora_jax.training.joint import JointTrainConfig, train_jointly
from molora_jax.training.pretrain import pretrain

LABELS = {
    "single": "single adapter",
    "single_equal": "single, parameters of MoLoRA",
    "oracle": "fixed oracle (3, k = 1)",
    "molora": "MoLoRA (4, k = 2)",
    "molora_l": "MoLoRA-L (8, k = 3)",
    "language_only": "4, language-model loss alone",
}
BASE_SEED = 999  # of the base's own grammars, which are no seed's of the task


def trained_base(run, config) -> Decoder:
    """The frozen base, pretrained on all grammars in all vocabularies, with tables of its own."""
    from safetensors.numpy import load_file, save_file

    model = synthetic_task.sizes(
        symbols=config.symbols, width=config.width, layers=config.layers, seq_len=config.seq_len
    )
    start = synthetic_task.aligned_start(model, 0)
    if not config.base_steps:
        return Decoder(model, start)
    training = TrainConfig(
        steps=config.base_steps, lr=3e-3, batch_size=config.batch_rows, warmup_steps=30
    )
    made_from = {
        "training": training,
        "model": model,
        "rows": [config.base_rows, config.seq_len, config.noise, BASE_SEED],
    }

    def make(folder):
        rows = synthetic_task.make_rows(
            synthetic_task.tables(config.symbols, BASE_SEED),
            count=config.base_rows,
            seq_len=config.seq_len,
            noise=config.noise,
            seed=BASE_SEED,
            mixed=True,
        )
        arrays, _ = pretrain(
            model,
            BatchOrder(rows, training.batch_size),
            training,
            start=start,
            run_dir=folder,
        )
        save_file(arrays, folder / "base.safetensors")

    return run.artifact(
        "synthetic-base",
        config=made_from,
        digests={},
        make=make,
        load=lambda folder: Decoder(model, load_file(folder / "base.safetensors")),
        phase="base",
    )


def arm_config(model, config, arm: str, seed: int) -> JointTrainConfig:
    """How an arm is trained; only adapters, rank and router differ."""
    adapters, top_k = {
        "single": (1, 1),
        "single_equal": (1, 1),
        "oracle": (3, 1),
        "molora": (4, 2),
        "molora_l": (8, 3),
        "language_only": (4, 2),
    }[arm]
    rank = config.rank
    if arm == "single_equal":
        # At least as many as MoLoRA's adapters and router together.
        sizes = model.projection_sizes()
        of_rank_1 = model.num_layers * sum(sum(sizes[name]) for name in config.projections)
        routed = arm_config(model, config, "molora", seed)
        C = routed.num_adapters
        router = (model.hidden_size + 1) * routed.width + (routed.width + 1) * C
        rank = C * config.rank + -(-router // of_rank_1)
    helped = arm != "language_only"
    return JointTrainConfig(
        num_adapters=adapters,
        top_k=top_k,
        rank=rank,
        alpha=2.0 * rank,
        projections=config.projections,
        steps=config.steps,
        lr=config.lr,
        warmup_steps=10,
        batch_size=config.batch_rows,
        temperature=config.temperature,
        info_coef=config.info_coef if helped else 0.0,
        seed=seed,
    )


def trained_arm(run, decoder: Decoder, config, arm: str, *, seed: int) -> dict[str, Any]:
    """What an arm came to: its numbers, its curve, and, where routed, where tokens went.

    The measured numbers are kept beside the trained arrays, so a second run only reads them.
    """
    from safetensors.numpy import save_file

    training = arm_config(decoder.config, config, arm, seed)

    def make(folder):
        train, held_out = task_rows(config, seed)
        routed = arm in ("molora", "molora_l", "language_only")
        if training.num_adapters == 1:
            train, held_out = train.labelled(0), held_out.labelled(0)

        def measured(steps, stacks, router):
            return measure(decoder, held_out, stacks, router)[0]

        made = train_jointly(
            decoder.config,
            decoder,
            train,
            training,
            by_label=not routed,
            measure=measured,
            measure_every=config.measure_every,
            run_dir=folder,
        )
        numbers, sample = measure(decoder, held_out, made.stacks(), made.router)
        # In batches of the held-out rows' size, so that both share one compiled function.
        on_train = evaluated(decoder, train, made.stacks(), made.router, held_out.num_rows)
        numbers["train_loss"] = on_train.nll
        numbers["parameters"] = count(made.adapters) + (
            count(made.router) if made.router is not None else 0
        )
        numbers["steps"] = training.steps
        numbers["tokens"] = sum(record["tokens"] for record in made.records)
        arrays = {
            f"{name}.{part}": np.asarray(getattr(stack, part))
            for name, stack in made.stacks().items()
            for part in ("lora_a", "lora_b")
        }
        save_file(arrays, folder / "adapters.safetensors")
        if made.router is not None:
            from molora_jax.routing import router_arrays

            save_file(router_arrays(made.router), folder / "router.safetensors")
        found = {"numbers": numbers, "sample": sample, "rank": training.rank}
        (folder / "measured.json").write_text(json.dumps(found))

    def load(folder):
        found = json.loads((folder / "measured.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return found | {"records": [json.loads(line) for line in lines]}

    rows = {
        name: getattr(config, name)
        for name in ("symbols", "noise", "rows", "val_rows", "seq_len", "measure_every")
    }
    return run.artifact(
        "synthetic-arm",
        config={"arm": arm, "training": training, "rows": rows},
        digests={"base": params_digest(decoder)},
        make=make,
        load=load,
        phase=f"{arm}/{seed}",
    )


def task_rows(config, seed: int):
    """Rows to train on and held-out rows of a seed's grammars."""
    grammar = synthetic_task.tables(config.symbols, seed)
    shared = {"seq_len": config.seq_len, "noise": config.noise}
    return (
        synthetic_task.make_rows(grammar, count=config.rows, seed=2 * seed, **shared),
        synthetic_task.make_rows(grammar, count=config.val_rows, seed=2 * seed + 1, **shared),
    )


def measure(decoder, held_out, stacks, router) -> tuple[dict[str, Any], dict[str, Any]]:
    """Held-out numbers, and the first row with its routing. Labels serve the measurement alone."""
    from molora_jax.routing import metrics

    found = evaluated(decoder, held_out, stacks, router, held_out.num_rows)
    numbers: dict[str, Any] = {"val_loss": found.nll}
    if router is None:
        return numbers, {}
    routing = found.routing
    assert routing is not None
    assert routing.logits is not None
    L, W, S, k = routing.adapter_ids.shape
    ids, gates = (each.reshape(L, W * S, k) for each in (routing.adapter_ids, routing.gates))
    labels, K = held_out.labels.ravel(), router.num_columns
    main = metrics.main_adapter(ids, gates)
    shares = metrics.token_shares(main, labels, len(MODALITIES), K)
    logits = routing.logits.reshape(len(routing.logits), W * S, -1)
    entropy = metrics.entropies(logits, labels >= 0)
    numbers |= metrics.agreement(main, labels)
    numbers["entropy"] = float(entropy["token"].mean())
    numbers["shares"] = shares.round(4).tolist()
    sample = {
        "tokens": held_out.tokens[0].tolist(),
        "adapters": main[:S].tolist(),
        "gates": metrics.mean_gates(ids, gates, num_slots=K)[:S].round(4).tolist(),
    }
    return numbers, sample


def evaluated(decoder, rows, stacks, router, batch_rows: int) -> Evaluation:
    """Loss and routing of an arm; without a router each token has the adapter of its label."""
    return evaluate(
        decoder,
        rows,
        adapters=stacks,
        router=oracle_arm if router is None else router,
        column_to_slot=None if router is None else np.arange(router.num_columns),
        batch_size=min(64, batch_rows),
        return_routing=router is not None,
    )


def count(tree: Any) -> int:
    return int(sum(leaf.size for leaf in jax.tree.leaves(tree)))
