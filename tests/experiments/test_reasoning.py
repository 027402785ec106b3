"""The generated reasoning tasks: what is held out, and what their windows ask for."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest

import run as command_line
from experiments import reasoning, reasoning_data, reasoning_tasks, results
from experiments.reasoning_text import WORDINGS


def test_wordings_of_pretraining_adapters_and_questions_are_different():
    for kind, splits in WORDINGS.items():
        for one, other in itertools.combinations(splits.values(), 2):
            assert not set(one) & set(other), kind


def test_no_training_text_says_a_held_out_sum():
    rng = random.Random(0)
    for kind in ("gain", "loss", "evaluate", "plus_unknown", "minus_unknown", "table"):
        for held in (False, True):
            drawn = reasoning_tasks.DRAWS[kind](rng, held)
            assert reasoning_tasks.is_held_out(int(drawn["a"]), int(drawn["b"])) == held


def test_every_pair_of_last_digits_is_trained_with_some_tens():
    for ones, b in itertools.product(range(10), range(1, 7)):
        held = [reasoning_tasks.is_held_out(10 * tens + ones, b) for tens in (1, 2, 3, 4)]
        assert sum(held) <= 1


@pytest.mark.parametrize("split", ["pretrain", "train", "heldout"])
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
    for held in (False, True):
        drawn = reasoning_tasks.DRAWS["reverse"](rng, held)
        assert drawn["answer"].split() == drawn["list"].split()[::-1]
        drawn = reasoning_tasks.DRAWS["occurrences"](rng, held)
        assert int(drawn["answer"]) == drawn["list"].split().count(drawn["item"])
        drawn = reasoning_tasks.DRAWS["chain"](rng, held)
        rules = dict(each.split()[1::2] for each in drawn["facts"].split(" .")[:2])
        assert rules[rules[drawn["start"]]] == drawn["answer"]


def test_more_questions_than_there_are_is_refused(monkeypatch):
    only = reasoning_tasks.questions("algebra", "heldout", 1, seed=0)[0]
    monkeypatch.setattr(reasoning_tasks, "question", lambda *args, **kwargs: only)
    with pytest.raises(ValueError, match=r"only 1 different questions of algebra \(heldout\)"):
        reasoning_tasks.questions("algebra", "heldout", 2, seed=0)


def test_the_lora_on_the_mixture_has_about_as_many_parameters_on_both_bases():
    config = reasoning.Config()
    small, large = _model(config.small), _model(config.large)
    assert reasoning.lora_params(small, config.rank) == 39424
    four = 4 * reasoning.lora_params(small, config.rank)
    bases = {
        "small": SimpleNamespace(model=SimpleNamespace(config=small)),
        "large": SimpleNamespace(model=SimpleNamespace(config=large)),
    }
    rank = reasoning.equal_rank(config, bases)
    assert abs(reasoning.lora_params(large, rank) - four) <= reasoning.lora_params(large, 1) / 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router_rows": 1}, "router_rows = 1: expected at least 2"),
        ({"num_questions": 3}, "num_questions = 3: expected at least 4"),
        ({"adapter_steps": 0}, "adapter_steps = 0: expected at least 1"),
        ({"seq_len": 300}, "seq_len = 300: expected at most 256"),
        ({"top_k": 5}, "top_k = 5: expected 1 to 4"),
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
    config = reasoning.Config(**tiny)
    status, path = results.execute(
        "fig3", reasoning, config, reasoning.digests(config), scale="tiny", workdir=tmp_path
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    metrics = result["metrics"]
    arms = ["small", "large", "small_oracle", "MoLoRA_k1"]
    arms += ["small_LoRA_on_the_mixture", "large_LoRA_on_the_mixture"]
    for arm in arms:
        for task in (*reasoning_tasks.TASKS, "mean"):
            assert 0 <= metrics[f"fig3/{arm}/exact_match/{task}"] <= 1
            assert metrics[f"fig3/{arm}/answer_nats/{task}"] > 0
    # Two steps have changed every adapter, and each arm is given its own.
    assert len({metrics[f"fig3/{arm}/answer_nats/mean"] for arm in arms}) == len(arms)
    assert 0 <= metrics["fig3/MoLoRA_k1/own_share"] <= 1
    claims = {each["id"] for each in result["claims"]}
    assert {"fig3.tasks_won", "fig3.below_oracle"} <= claims
    assert "own-data label used" in (path / "report.md").read_text().lower()
    assert all((path / f"{name}.png").exists() for name in ("exact_match", "shares", "loss"))


def _model(sizes):
    from experiments.reasoning_bases import model_config

    return model_config(sizes)
