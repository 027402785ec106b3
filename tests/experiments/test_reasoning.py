"""The generated reasoning tasks: what is held out, and what their windows ask for."""

import itertools
import json
import random
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import main as command_line
from experiments import reasoning, reasoning_data, reasoning_tasks, results
from experiments.reasoning_router import EvidenceRouter
from experiments.reasoning_text import WORDINGS


def test_wordings_of_pretraining_adapters_and_questions_are_different():
    for kind, splits in WORDINGS.items():
        for one, other in itertools.combinations(splits.values(), 2):
            assert not set(one) & set(other), kind


def test_every_kind_draws_contents_of_the_part_that_is_asked_for():
    rng = random.Random(0)
    for kind in (kind for kinds in reasoning_tasks.KINDS.values() for kind in kinds):
        for part in ("shown", "validation", "heldout"):
            drawn = reasoning_tasks.DRAWS[kind](rng, part)
            if "c" in drawn:
                assert reasoning_tasks.part_of_sum(int(drawn["a"]), int(drawn["b"])) == part
            else:
                content = drawn.get("facts") or drawn["list"]
                assert reasoning_tasks.part_of(content) == part
                assert reasoning_tasks.part_of(" ".join(content.split()[::-1])) == part


def test_pretraining_text_says_no_held_out_sum_and_no_held_out_list():
    texts = itertools.islice(reasoning_tasks.pretraining_text(task_share=0.3, seed=0), 4000)
    said = " | ".join(texts)
    sums = re.findall(r"(\d+) \+ (\d+) =", said) + re.findall(r"(\d+) plus (\d+) is", said)
    lists = re.findall(r"\b(?:list|copy|row|series) ((?:[b-k] |\d ){3,4})", said)
    assert len(sums) > 50 and len(lists) > 50
    assert {reasoning_tasks.part_of_sum(int(a), int(b)) for a, b in sums} == {"shown"}
    assert {reasoning_tasks.part_of(each) for each in lists} == {"shown"}


def test_every_pair_of_last_digits_is_shown_with_two_tens_at_least():
    for ones, b in itertools.product(range(10), range(1, 7)):
        parts = [reasoning_tasks.part_of_sum(10 * tens + ones, b) for tens in (1, 2, 3, 4)]
        assert parts.count("shown") >= 2


def test_questions_behind_the_first_ones_are_other_questions():
    first = reasoning_tasks.questions("logic", "heldout", 30, seed=1)
    more = reasoning_tasks.questions("logic", "heldout", 30, seed=1, first=30)
    assert len({each.prompt for each in [*first, *more]}) == 60


@pytest.mark.parametrize("split", ["pretrain", "train", "validation", "heldout"])
def test_every_question_is_in_the_vocabulary_and_answers_are_the_targets(split):
    tokenizer = reasoning_tasks.word_tokenizer()
    for task in reasoning_tasks.TASKS:
        asked = reasoning_tasks.questions(task, split, 40, seed=3)
        assert {each.kind for each in asked} == set(reasoning_tasks.KINDS[task])
        rows = reasoning_data.question_rows(tokenizer, asked, seq_len=48)
        assert not (rows.tokens == 1).any()  # unknown words
        for row, each in enumerate(asked):
            targets = rows.tokens[row, 1:][rows.weights[row, :-1] > 0]
            assert targets.tolist() == reasoning_data.answer_ids(tokenizer, each)


def test_answers_follow_from_the_questions():
    rng = random.Random(1)
    for part in ("shown", "heldout"):
        drawn = reasoning_tasks.DRAWS["reverse"](rng, part)
        assert drawn["answer"].split() == drawn["list"].split()[::-1]
        drawn = reasoning_tasks.DRAWS["occurrences"](rng, part)
        assert int(drawn["answer"]) == drawn["list"].split().count(drawn["item"])
        drawn = reasoning_tasks.DRAWS["chain"](rng, part)
        rules = dict(each.split()[1::2] for each in drawn["facts"].split(" .")[:2])
        first, second, third = drawn["answer"].split(" then ")
        assert (drawn["start"], rules[first], rules[second]) == (first, second, third)


def test_more_questions_than_there_are_is_refused(monkeypatch):
    only = reasoning_tasks.questions("algebra", "heldout", 1, seed=0)[0]
    monkeypatch.setattr(reasoning_tasks, "question", lambda *args, **kwargs: only)
    with pytest.raises(ValueError, match=r"only 1 different questions of algebra \(heldout\)"):
        reasoning_tasks.questions("algebra", "heldout", 2, seed=0)


def test_the_lora_on_the_mixture_has_about_the_parameters_of_adapters_and_router():
    config = reasoning.Config()
    sizes = {"small": _model(config.small), "large": _model(config.large)}
    assert reasoning.lora_params(sizes["small"], 8) == 39424
    bases = {size: SimpleNamespace(model=SimpleNamespace(config=sizes[size])) for size in sizes}
    added = reasoning.molora_params(config, sizes["small"])
    for size, model in sizes.items():
        rank = reasoning.equal_rank(config, bases, size)
        assert (
            abs(reasoning.lora_params(model, rank) - added) <= reasoning.lora_params(model, 1) / 2
        )


def test_a_router_of_evidence_adds_up_over_a_prompt_and_keeps_its_choice_behind_it():
    log_odds = np.array([[0.0, 0.0], [1.0, -1.0], [-3.0, 3.0]])
    router = EvidenceRouter(log_odds)
    tokens, mask = jnp.array([[0, 1, 1, 2, 2]]), jnp.array([[False, True, True, True, True]])
    routing, logits, state = router(tokens, None, mask)
    assert logits[:, 0].tolist() == [0, 1, 2, -1, -4]
    assert routing.adapter_ids[:, 0].tolist() == [-1, 0, 0, 1, 1]
    assert state.tolist() == [1]
    later, _, still = router(jnp.array([[1]]), None, jnp.array([[True]]), state)
    assert later.adapter_ids.tolist() == [[1]] and still.tolist() == [1]
    only_first = jnp.array([0, -1])
    routing, _, state = router(tokens, None, mask, None, only_first)
    assert routing.adapter_ids[:, 0].tolist() == [-1, 0, 0, 0, 0] and state.tolist() == [0]


def test_evidence_comes_from_the_counts_of_each_adapters_own_tokens():
    data = [
        SimpleNamespace(
            tokens=np.array([[1, 1, 2, 0]]), mask=np.array([[True, True, True, False]])
        ),
        SimpleNamespace(tokens=np.array([[2, 2, 3]]), mask=np.ones((1, 3), bool)),
    ]
    router = EvidenceRouter.counted(data, vocab_size=4, smoothing=0.5)
    odds = np.asarray(router.log_odds[...])
    assert odds[0].tolist() == [0.0, 0.0]  # padding is not counted
    assert odds[1, 0] - odds[1, 1] == pytest.approx(np.log(5), abs=1e-5)
    assert odds[2, 1] > odds[2, 0] and odds[3, 1] > odds[3, 0]
    with pytest.raises(ValueError, match=r"log_odds has shape \(3,\), expected \(V, C\)"):
        EvidenceRouter(np.zeros(3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router_rows": 1}, "router_rows = 1: expected at least 2"),
        ({"num_questions": 3}, "num_questions = 3: expected at least 4"),
        ({"adapter_steps": 0}, "adapter_steps = 0: expected at least 1"),
        ({"seq_len": 300}, "seq_len = 300: expected at most 256"),
        ({"asked": "train"}, "asked = 'train': expected one of 'heldout', 'validation'"),
        ({"task_share": 1.0}, "task_share = 1.0: expected 0 to below 1"),
        ({"small": (64, 176, 4, 5)}, r"small = \(64, 176, 4, 5\).*a multiple of twice the heads"),
        ({"large": (64, 176, 4, 0)}, "all positive"),
        ({"large_lr": -1.0}, "lr must be a positive number"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        reasoning.Config(**values)


def test_a_tiny_run_measures_every_arm_on_every_task(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(reasoning, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = reasoning.Config(**{**tiny, "router_steps": 2})  # the learned router's arm as well
    status, path = results.execute(
        "fig3", reasoning, config, reasoning.digests(config), scale="tiny", workdir=tmp_path
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    metrics = result["metrics"]
    arms = ["small", "large", "small_oracle", "MoLoRA", "MoLoRA_learned_router"]
    arms += ["small_LoRA_on_the_mixture", "large_LoRA_on_the_mixture"]
    for arm in arms:
        for task in (*reasoning_tasks.TASKS, "mean"):
            assert 0 <= metrics[f"fig3/{arm}/exact_match/{task}"] <= 1
            assert metrics[f"fig3/{arm}/answer_nats/{task}"] > 0
    # Two steps have changed every adapter, and each arm is given its own.
    assert len({metrics[f"fig3/{arm}/answer_nats/mean"] for arm in arms}) == len(arms)
    assert metrics["fig3/MoLoRA/own_share_of_answers"] > 0.5
    claims = {each["id"] for each in result["claims"]}
    assert {"fig3.tasks_won", "fig3.below_oracle/MoLoRA"} <= claims
    assert "own-data label used" in (path / "report.md").read_text().lower()
    assert all((path / f"{name}.png").exists() for name in ("exact_match", "shares", "loss"))


def _model(sizes):
    from experiments.reasoning_bases import model_config

    return model_config(sizes)
