"""Tokens per second of the engine beside transformers and peft, on one model, in one run.

    python -m tests.parity.against_peft [--rounds=2] [--new_tokens=32]

in an environment with tests/parity/requirements.txt. Eight prompts of 64 tokens on four adapters of
rank 16 over SmolLM2-135M, greedy, float32 on the CPU. peft gets the mixed batch by `adapter_names`,
transformers the same batch without adapters; the engine the mixed batch in one pass, the same
requests two at a time, as a server does that holds one adapter at a time, and the base alone. Each
is warmed up, then all take turns: medians, and whether the answers are the same.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from experiments.random_models import random_adapter
from molora_jax.adapters import AdapterBank, HotSet, save_adapter
from molora_jax.generation import Engine, Request
from molora_jax.models import load_base
from molora_jax.models.export import decoder_arrays, write_model

NAMES = ("a", "b", "c", "d")
ROWS, PROMPT, RANK = 8, 64, 16


def ours(base, adapters, prompts, new_tokens: int) -> dict[str, Callable[[], list]]:
    """Arms of the engine; each returns the answers' tokens, row by row."""
    hot = HotSet(AdapterBank(base.config, num_slots=len(NAMES), max_rank=RANK))
    for adapter in adapters:
        hot.add(adapter)
    context = PROMPT + new_tokens
    routed = Engine(base, hot, rows=ROWS, context=context, buckets=(PROMPT,))
    few = Engine(base, hot, rows=2, context=context, buckets=(PROMPT,))
    plain = Engine(base, rows=ROWS, context=context, buckets=(PROMPT,))
    requests = [
        Request(prompt=each, adapter=NAMES[i % 4], max_tokens=new_tokens, ignore_eos=True)
        for i, each in enumerate(prompts)
    ]
    bare = [Request(prompt=each, max_tokens=new_tokens, ignore_eos=True) for each in prompts]

    def one_adapter_at_a_time():
        answers = {}
        for first in range(4):
            for i, done in zip((first, first + 4), few.run(requests[first::4]), strict=True):
                answers[i] = done.tokens
        return [answers[i] for i in range(ROWS)]

    return {
        "engine, 4 adapters in one pass": lambda: [each.tokens for each in routed.run(requests)],
        "engine, 4 passes of 2": one_adapter_at_a_time,
        "engine, base alone": lambda: [each.tokens for each in plain.run(bare)],
    }


def theirs(base, adapters, prompts, new_tokens: int, folder: pathlib.Path) -> dict:
    """Arms of transformers and peft over the same weights."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    (folder / "model").mkdir()
    write_model(folder / "model", base.config, decoder_arrays(base.decoder), base.tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    for adapter in adapters:
        save_adapter(adapter, folder / adapter.name)
    tokens = torch.tensor(np.asarray(prompts))
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}

    def plain():
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        return out[:, tokens.shape[1] :].tolist()

    bare = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    mixed = peft.PeftModel.from_pretrained(bare, folder / NAMES[0], adapter_name=NAMES[0])
    for name in NAMES[1:]:
        mixed.load_adapter(folder / name, adapter_name=name)
    mixed.eval()
    names = [NAMES[i % 4] for i in range(len(prompts))]

    def by_row():
        with torch.no_grad():
            out = mixed.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                adapter_names=names,
                **options,
            )
        return out[:, tokens.shape[1] :].tolist()

    return {"peft, adapter_names": by_row, "transformers, no adapters": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new_tokens", type=int, default=32)
    options = parser.parse_args()
    base = load_base("smollm2-135m")
    adapters = [
        random_adapter(base.config, name, rank=RANK, seed=seed) for seed, name in enumerate(NAMES)
    ]
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, base.config.vocab_size, (ROWS, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        arms = ours(base, adapters, prompts, options.new_tokens)
        arms |= theirs(base, adapters, prompts, options.new_tokens, pathlib.Path(folder))
        answers = {name: arm() for name, arm in arms.items()}  # and warms up
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(options.rounds):
            for name, arm in arms.items():
                start = time.perf_counter()
                arm()
                seconds[name].append(time.perf_counter() - start)
    count = ROWS * options.new_tokens
    rates = {name: count / statistics.median(each) for name, each in seconds.items()}
    slowest = min(rates.values())
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        print(f"{name:32} {rate:8.1f} tokens/s  {rate / slowest:6.1f} x the slowest")
    for one, other in (
        ("engine, 4 adapters in one pass", "peft, adapter_names"),
        ("engine, 4 adapters in one pass", "engine, 4 passes of 2"),
        ("engine, base alone", "transformers, no adapters"),
    ):
        same = sum(a == b for a, b in zip(answers[one], answers[other], strict=True))
        print(f"{same} of {ROWS} answers of '{one}' are those of '{other}'")


if __name__ == "__main__":
    main()
