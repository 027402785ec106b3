"""Trains, evaluates and serves on meshes, in a process of its own: run by the tests beside it.

python -m tests.parallel.program OUT.json STEPS PARTS MESH[+MESH...]
    [COORDINATOR NUM_PROCESSES PROCESS_ID]

PARTS are letters: a trains an adapter, r a router, s serves. A mesh is "none" or as --mesh has it.
JAX settles its devices when it starts, so this is no function that a test could call.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax import parallel
from molora_jax.adapters import AdapterBank
from molora_jax.models import load_base
from molora_jax.training import evaluate, train_adapter, train_router
from molora_jax.training.config import AdapterTrainConfig, RouterTrainConfig
from molora_jax.training.data import Batch, pack
from tests.serving.conftest import expected_answers, make_engine, weights

ROWS = 8


def windows(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(50 * seed, 50 * seed + 60, 40).tolist() for _ in range(30)]
    return pack(texts, seq_len=16, separator=256)


def outcome(steps: int, parts: str) -> dict[str, Any]:
    """Loss curves, an evaluation with its routing, and what is served; all as plain numbers."""
    base, found = load_base("tiny-random"), dict[str, Any]()
    data = [windows(seed) for seed in range(4)]
    bank = AdapterBank(base.config, num_slots=4, max_rank=4)
    for seed in range(3):
        bank.load(weights(base, seed), name=str(seed))
    if "a" in parts:
        config = AdapterTrainConfig(steps=steps, batch_size=ROWS, accumulate=2, rank=4, lr=1e-2)
        trained, records = train_adapter(base, data[3], config, name="trained")
        bank.load(trained)
        found["adapter"] = [each["loss"] for each in records]
    if "r" in parts:
        start = RouterTrainConfig(steps=steps, batch_size=ROWS, start_rows=12)
        router, training = train_router(base, bank, data[: len(bank.list())], start)
        seen = evaluate(
            base.decoder,
            data[1],
            adapters=bank.stacks,
            router=router,
            column_to_slot=np.arange(router.num_columns),
            return_routing=True,
        )
        assert seen.routing is not None
        found["router"] = [each["loss"] for each in training.records]
        found["nll"], found["ids"] = seen.nll, seen.routing.adapter_ids.ravel().tolist()
    if "s" in parts:
        engine = make_engine(base, rows=ROWS)
        engine.warm_up()
        served = expected_answers(engine)
        found["tokens"] = {name: [each.tokens for each in some] for name, some in served.items()}
    return found


def main(out: str, steps: str, parts: str, meshes: str, *processes: str) -> None:
    """Writes {mesh: outcome} to `out`, from the first process."""
    if processes:
        coordinator, count, index = processes
        parallel.start_processes(coordinator, num_processes=int(count), process_id=int(index))
    found = {}
    for each in meshes.split("+"):
        with parallel.use_mesh(None if each == "none" else parallel.make_mesh(each)):
            found[each] = outcome(int(steps), parts)
    if parallel.is_primary():
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
