"""`generate`: the same prompt through the base, each adapter and the routed composition."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from molora_jax.adapters import AdapterBank, Composition, load_adapter
from molora_jax.display import printable_pieces, show, terminal_text, warn
from molora_jax.display.progress import Progress
from molora_jax.display.terminal import painted
from molora_jax.generation import Generated, Sampling, generate
from molora_jax.generation.text_stream import TextStream
from molora_jax.models import BaseModel, load_base
from molora_jax.routing import SequenceRouter
from molora_jax.tools.arguments import Misuse, hint, named_paths
from molora_jax.tools.report import check_there, next_step, print_json, text_of

BASE, ROUTED = "base", "routed"
# What `metrics.main_adapter` computes.
RULE = (
    "a token's adapter: the one with the largest sum of its top gates over the later half of the "
    "layers"
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to answer: what `generate` is given, and the names of the slots it may use."""

    label: str
    routed: Mapping[str, Any]
    slot_names: Sequence[str]


def run(args: argparse.Namespace) -> int:
    """Prints an answer of every arm."""
    paths = named_paths(args.adapter)
    if taken := {BASE, ROUTED} & set(paths):
        raise Misuse(f"--adapter: {taken.pop()!r} names an arm already; write NAME=PATH")
    try:
        sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    except ValueError as error:
        raise Misuse(f"--{error}") from None
    prompt = text_of(args.prompt, args.prompt_file)
    check_there(paths.values(), args.composition)
    base = load_base(args.base)
    arms = _arms(base, paths, args.composition)
    if args.only is not None:
        if not args.only:
            raise Misuse("--only names no arm")
        labels = [arm.label for arm in arms]
        if unknown := [name for name in args.only if name not in labels]:
            near = hint(unknown[0], labels)
            raise Misuse(f"--only: no arm {unknown[0]!r}{near} (there are {', '.join(labels)})")
        arms = [arm for arm in arms if arm.label in args.only]
    if args.chat:
        turn = [{"role": "user", "content": prompt}]
        ids = base.tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    else:
        ids = base.tokenizer.encode(prompt)
    answers = []
    for arm in arms:
        answer, used = _answer(base, arm, ids, args, sampling)
        answers.append(answer)
        if not args.json:
            _show(base, arm, ids, answer, used)
    if args.json:
        read = {"prompt_tokens": len(ids), "prompt_pieces": base.tokenizer.pieces(ids)}
        print_json({"base": base.name, **read, "arms": answers})
    elif args.composition:
        next_step(args, "serve", "--base", args.base, "--composition", args.composition)
    return 0


def _arms(base: BaseModel, paths: Mapping[str, str], composition: str | None) -> list[Arm]:
    """The base, every adapter given, every one of the composition, and the composition routed."""
    arms = [Arm(BASE, {}, ())]
    if paths:
        adapters = []
        for name, path in paths.items():
            adapter, report = load_adapter(path, name=name, config=base.config, base_name=base.name)
            for text in report.warnings:
                warn(f"adapter {name!r}: {text}")
            adapters.append(adapter)
        bank = AdapterBank(
            base.config, num_slots=len(adapters), max_rank=max(each.rank for each in adapters)
        )
        for each in adapters:
            bank.load(each)
        arms += _single(bank, taken=())
    if composition:
        whole = Composition.load(composition, base)
        arms += _single(whole.bank, taken=[*paths, BASE, ROUTED])
        arms.append(Arm(ROUTED, whole.routed, whole.bank.slot_names))
    return arms


def _single(bank: AdapterBank, *, taken: Sequence[str]) -> list[Arm]:
    return [
        Arm(
            f"composition:{each.name}" if each.name in taken else each.name,
            {"adapters": bank.stacks, "router": SequenceRouter(np.array([each.slot]))},
            bank.slot_names,
        )
        for each in bank.list()
    ]


def _answer(
    base: BaseModel, arm: Arm, ids: list[int], args: argparse.Namespace, sampling: Sampling
) -> tuple[dict[str, Any], np.ndarray]:
    """The answer, and the slot of the main adapter of every token, the prompt's too."""
    times = []
    with Progress(f"answer of {arm.label}", args.max_tokens, compiles=2) as progress:

        def seen(_):
            times.append(time.perf_counter())
            progress.update()

        (made,) = generate(
            base.decoder,
            [ids],
            max_new_tokens=args.max_tokens,
            stop_ids=base.tokenizer.eos_ids,
            sampling=sampling,
            seed=args.seed,
            on_tokens=seen,
            **arm.routed,
        )
    text, pieces, finish = _cut(base, made, args.stop)
    tokens = made.tokens[: len(pieces)]
    count = len(ids) + len(tokens)
    main = made.main_adapters
    used = np.full(count, -1) if main is None else main[:count]
    names = [None if slot < 0 else arm.slot_names[slot] for slot in used]
    # The first two tokens wait for the compiler.
    spent = times[-1] - times[1] if len(times) > 2 else 0.0
    answer = {
        "arm": arm.label,
        "text": text,
        "tokens": tokens,
        "pieces": pieces,
        "adapters": names[len(ids) :],
        "prompt_adapters": names[: len(ids)],
        "finish_reason": finish,
        "tokens_per_s": (len(times) - 2) / spent if spent else None,
    }
    return answer, used


def _cut(base: BaseModel, made: Generated, stops: Sequence[str]) -> tuple[str, list[str], str]:
    """The text up to the end token or the first stop text, its tokens' pieces, and why it ended.

    A stop text may begin inside a token: the piece of that one is what stands before it.
    """
    tokens = made.tokens[:-1] if made.stopped else made.tokens
    stream = TextStream(base.tokenizer, stop=stops)
    text = "".join(stream.push(token) for token in tokens) + stream.finish()
    pieces = base.tokenizer.pieces(tokens)
    if not stream.stopped:
        return text, pieces, "stop" if made.stopped else "length"
    kept, left = [], len(text)
    for piece in pieces:
        if left <= 0:
            break
        kept.append(piece[:left])
        left -= len(piece)
    return text, kept, "stop"


def _show(
    base: BaseModel, arm: Arm, ids: list[int], answer: Mapping[str, Any], used: np.ndarray
) -> None:
    """Prints an answer: of the routed arm, prompt and answer on the colours of the adapters."""
    rate, tokens = answer["tokens_per_s"], answer["tokens"]
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    ended = {"length": "cut at --max_tokens", "stop": "ended"}[answer["finish_reason"]]
    show(f"== {arm.label} ({len(tokens)} tokens, {ended}{speed})", style="bold")
    if arm.label != ROUTED:
        show("".join(printable_pieces(answer["pieces"])), "")
        return
    pieces = [*base.tokenizer.pieces(ids), *answer["pieces"]]
    text = terminal_text(pieces, used, adapter_names=arm.slot_names, num_prompt_tokens=len(ids))
    show(text, painted(f"({RULE})", "dim", sys.stdout), "")
