"""Bases of our own for `fig3`, pretrained from random weights on one text, and adapters of them."""

import dataclasses
import functools
import json
from typing import Any

from experiments.compose import digest_of_windows, read_curve
from experiments.reasoning import MAX_POSITIONS

SIZES = ("small", "large")


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A base with what it cost: `tokens` read, and 6·parameters·tokens floating-point operations.

    `digest` is that of the weights; `model` is a BaseModel.
    """

    model: Any
    num_params: int
    tokens: int
    curve: list[dict]

    @property
    def flop(self) -> float:
        return 6.0 * self.num_params * self.tokens


def model_config(sizes: tuple[int, int, int, int]):
    """A llama of (width, inner width, layers, heads) over the closed vocabulary, output tied."""
    from experiments.reasoning_tasks import vocabulary
    from molora_jax.models.config import ModelConfig

    width, inner, layers, heads = sizes
    return ModelConfig(
        model_type="llama",
        vocab_size=len(vocabulary()),
        hidden_size=width,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        tie_word_embeddings=True,
        max_positions=MAX_POSITIONS,
        bos_id=0,
        eos_ids=(0,),
    )


def pretrained(run, config, size: str) -> Pretrained:
    """The base of a size, from the cache or trained now: the same text, order and seed for both."""
    import jax
    from safetensors.numpy import load_file, save_file

    from molora_jax.models import BaseModel, params_digest
    from molora_jax.models.decoder import Decoder
    from molora_jax.training.data import BatchOrder
    from molora_jax.training.pretrain import pretrain

    model, training = model_config(getattr(config, size)), config.pretraining(size)
    tokenizer, windows = pretraining_data(
        config.pretrain_steps * config.pretrain_rows,
        config.seq_len,
        config.task_share,
        config.base_seed,
    )

    def make(folder):
        order = BatchOrder(windows, training.batch_size, training.seed)
        arrays, _ = pretrain(model, order, training, name=f"{size} base", run_dir=folder)
        save_file(arrays, folder / "model.safetensors")

    def load(folder):
        return load_file(folder / "model.safetensors"), read_curve(folder)

    arrays, curve = run.artifact(
        "base",
        config={"model": model, "training": training},
        digests={"data": digest_of_windows(windows)},
        make=make,
        load=load,
        phase=f"base/{size}",
    )
    base = BaseModel(
        name=f"reasoning-{size}",
        config=model,
        decoder=Decoder(model, jax.device_put(arrays)),
        tokenizer=tokenizer,
        digest=params_digest(arrays),
    )
    count = sum(array.size for array in arrays.values())
    print(f"{size} base: {count:,} parameters", flush=True)
    return Pretrained(model=base, num_params=count, tokens=windows.tokens.size, curve=curve)


@functools.lru_cache(maxsize=1)  # both sizes read the same
def pretraining_data(rows: int, seq_len: int, task_share: float, seed: int):
    """The tokenizer, and the windows that both bases are trained on."""
    from experiments.reasoning_data import pretraining_windows
    from experiments.reasoning_tasks import word_tokenizer

    tokenizer = word_tokenizer()
    windows = pretraining_windows(
        tokenizer, rows=rows, seq_len=seq_len, task_share=task_share, seed=seed
    )
    return tokenizer, windows


def trained_adapter(run, base, training, windows, *, name: str, data: str):
    """PEFT folder and loss curve of one adapter.

    `data` says what it is trained on, for its card; `name` tells its lines in metrics.jsonl apart.
    """
    from molora_jax.adapters import AdapterCard, save_adapter
    from molora_jax.training import train_adapter

    label = name.replace("/", "-")

    def make(folder):
        adapter, records = train_adapter(base, windows, training, name=label, run_dir=folder)
        card = AdapterCard(
            base=base.name,
            data=data,
            command="molora run --experiment=fig3",
            metrics={"train_loss": records[-1]["loss"]},
        )
        save_adapter(adapter, folder / "adapter", card=card, overwrite=True)

    return run.artifact(
        "adapter",
        config=training,
        digests={"base": base.digest, "data": digest_of_windows(windows)},
        make=make,
        load=lambda folder: (folder / "adapter", read_curve(folder)),
        phase=f"adapter/{name}",
    )


def trained_router(run, base, bank, data, training, *, name: str):
    """A learned router over the bank, fitted on rows of each adapter's own task."""
    from safetensors.numpy import load_file, save_file

    from molora_jax.routing import build_router, router_arrays, router_config
    from molora_jax.training import train_router

    def make(folder):
        router, _ = train_router(base, bank, data, training)
        save_file(router_arrays(router), folder / "router.safetensors")
        (folder / "router.json").write_text(json.dumps(router_config(router)))

    def load(folder):
        settings = json.loads((folder / "router.json").read_text())
        return build_router(settings, load_file(folder / "router.safetensors"))

    columns = {each.name: each.digest for each in bank.list()}
    rows = {f"data {at}": digest_of_windows(batch) for at, batch in enumerate(data)}
    return run.artifact(
        "router",
        config=training,
        digests={"base": base.digest, **columns, **rows},
        make=make,
        load=load,
        phase=f"router/{name}",
    )
