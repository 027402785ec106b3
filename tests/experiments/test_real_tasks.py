"""Real question sets: what is left out of training, how answers are read off, and a tiny run."""

import dataclasses
import json

import numpy as np
import pytest

from experiments import main as command_line
from experiments import real_tasks, results
from experiments import real_tasks_data as data
from experiments.real_tasks_measure import MAX_ANSWER, Asked, parting, score

BBH = {
    "snarks": "Which is sarcastic?\nOptions:\n(A) Well done\n(B) Great, a flat tyre",
    "navigate": "Do you return?\nOptions:\n- Yes\n- No",
    "counting": "How many hens are two hens?",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small folder in the format of the real sets."""
    hens = "Ann has 3 brown hens and buys 4 white hens at the market. How many hens has she?"
    train = [
        {"question": hens, "answer": "3+4 = <<3+4=7>>7\n#### 7"},
        {"question": "A mile is 5280 feet. How long are 2 miles?", "answer": "#### 10,560"},
    ]
    test = [{"question": hens.replace("3", "13").replace("4", "12"), "answer": "#### 25"}]
    stories = ["The bus stops here {}.", "A farmer sows {} seeds.", "Five ships carry {} tons.",
               "Bread costs {} cents."]  # fmt: skip
    svamp = [
        {"question": story.format(number), "answer": float(number)}
        for number in range(1, 4)
        for story in stories
    ]
    aqua = {"question": "What is x?", "options": ["A)1", "B) 2", "C)3 km"], "correct": "B"}
    other = aqua | {"question": "How far does the train run?"}
    files = {"gsm8k/train": train, "gsm8k/test": test, "svamp/svamp": svamp}
    files |= {"aqua/dev": [other], "aqua/test": [aqua]}
    for name, rows in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "bbh").mkdir()
    for task, text in BBH.items():
        targets = {"snarks": "(B)", "navigate": "No", "counting": "2"}
        rows = [{"input": text, "target": targets[task]}] * 2
        (tmp_path / "bbh" / f"{task}.json").write_text(json.dumps({"examples": rows}))
    monkeypatch.setenv("MOLORA_DATA", str(tmp_path))
    return tmp_path


def test_a_training_row_that_only_changes_the_numbers_of_a_test_question_is_left_out(folder):
    gsm8k = data.load_sets()[0]
    assert gsm8k.left_out == 1
    assert [each.answer for each in gsm8k.train] == ["10560"]
    assert [each.answer for each in gsm8k.test] == ["25"]


def test_no_story_of_svamp_is_on_both_sides(folder):
    svamp = data.load_sets()[1]
    first_words = [{each.prompt.split()[1] for each in side} for side in (svamp.train, svamp.test)]
    assert len(svamp.train) + len(svamp.test) == 12
    assert all(first_words)
    assert not first_words[0] & first_words[1]


def test_choices_have_letters_and_bbh_keeps_its_own(folder):
    *_, aqua, bbh = data.load_sets("molora_data")
    assert aqua.test[0].prompt == "Question: What is x?\nOptions:\n(A) 1\n(B) 2\n(C) 3 km\nAnswer:"
    assert (aqua.test[0].answer, aqua.test[0].options) == ("(B)", ("(A)", "(B)", "(C)"))
    options = {each.task: each.options for each in bbh.test}
    assert options == {"snarks": ("(A)", "(B)"), "navigate": ("Yes", "No"), "counting": ()}
    assert bbh.train == ()
    assert len({each.task for each in bbh.test[:3]}) == 3  # one of each task in turn


def test_the_real_sets_are_asked_for_by_name(folder, monkeypatch):
    (folder / "aqua" / "dev.jsonl").unlink()
    with pytest.raises(ValueError, match=r"dev\.jsonl is missing: MOLORA_DATA"):
        data.load_sets()
    monkeypatch.delenv("MOLORA_DATA")
    assert [each.name for each in data.load_sets()][-1] == "checks"
    with pytest.raises(ValueError, match="MOLORA_DATA is not set"):
        data.load_sets("molora_data")


def test_shots_are_short_questions_with_different_answers():
    asked = [data.open_question("t", text, answer) for text, answer in
             [("a long one", "1"), ("b", "2"), ("c", "2"), ("dd", "3")]]  # fmt: skip
    assert data.shots(asked, 2) == "Question: b\nAnswer: 2\nQuestion: dd\nAnswer: 3\n"


@pytest.mark.parametrize(
    ("options", "common"),
    [([], 0), ([[5, 1, 6], [5, 2, 6]], 1), ([[1], [2]], 0), ([[1], [1, 2]], None),
     ([[1, 2], [1, 3], [1, 2]], None)],
)  # fmt: skip
def test_options_part_at_one_token_or_are_not_asked(options, common):
    assert parting(options) == common


def test_what_is_read_off_one_pass_is_what_decoding_writes():
    from molora_jax.adapters import Adapter, AdapterBank
    from molora_jax.generation import generate
    from molora_jax.models import load_base
    from molora_jax.routing.linear import LinearRouter
    from molora_jax.training import evaluate
    from molora_jax.training.data import make_batch
    from tests.adapters.make import arrays_for, modules_of

    base = load_base("tiny-random")
    bank = AdapterBank(base.config, num_slots=2, max_rank=2)
    for seed in range(2):
        arrays = arrays_for(modules_of(base.config), 2, seed=seed, config=base.config)
        bank.load(
            Adapter.from_arrays(str(seed), arrays, alpha=0.1, num_layers=base.config.num_layers)
        )
    rng = np.random.default_rng(0)
    router = LinearRouter(
        rng.normal(size=(base.config.num_layers, base.config.hidden_size, 2)),
        np.zeros((base.config.num_layers, 2)),
        top_k=1,
    )
    texts = ["Is it?", "Why?", "How many of them are there?", "Who?"]
    asked = Asked.of(
        base.tokenizer,
        [data.Question("t", text, "ab", ("ab", "cd")) for text in texts],
        count=9,
        max_len=60,
    )
    routed = {"adapters": bank.stacks, "router": router, "column_to_slot": np.arange(2)}
    written = generate(base.decoder, asked.prompts, max_new_tokens=4, **routed)
    answers = [each.tokens[:3] for each in written]
    answers[1][2] = (answers[1][2] + 1) % 256  # not what it writes
    ends = np.ones(base.config.vocab_size, bool)
    ends[written[2].tokens[3]] = False  # goes on with the third answer, perhaps with others
    asked = dataclasses.replace(asked, answers=answers)
    read = score(base, asked, bank, router, ends=ends, bucket=64)
    expected = [at != 1 and ends[each.tokens[3]] for at, each in enumerate(written)]
    assert read.right.tolist() == expected
    assert any(expected)

    rows = [prompt + answer for prompt, answer in zip(asked.prompts, answers, strict=True)]
    tokens, mask, is_target = np.zeros((4, 64), np.int32), *np.zeros((2, 4, 64), bool)
    for at, row in enumerate(rows):
        tokens[at, : len(row)], mask[at, : len(row)] = row, True
        is_target[at, len(row) - 3 : len(row)] = True
    found = evaluate(base.decoder, make_batch(tokens, mask, is_target), batch_size=4, **routed)
    np.testing.assert_allclose(read.logp, -found.token_nll.sum(axis=1), rtol=1e-4)
    assert read.shares.sum() == pytest.approx(1)
    assert read.random_choice == 0.5


def test_long_answers_are_not_asked():
    from molora_jax.models import load_base

    tokenizer = load_base("tiny-random").tokenizer
    long = data.Question("t", "Why?", "because" * MAX_ANSWER)
    with pytest.raises(ValueError, match=r"raise Config\.eval_len"):
        Asked.of(tokenizer, [long], count=1, max_len=500)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"num_questions": 1}, "num_questions = 1: expected at least 2"),
     ({"shots": 0}, "shots = 0: expected at least 1"),
     ({"dtype": "int8"}, "Config.dtype = 'int8'"),
     ({"adapter_lr": 0.0}, "lr must be a positive number")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        real_tasks.Config(**values)


def test_at_tiny_scale(tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(real_tasks, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = real_tasks.Config(**tiny)
    status, path = results.execute(
        "real_tasks", real_tasks, config, real_tasks.digests(config), scale="tiny",
        workdir=tmp_path,
    )  # fmt: skip
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    numbers = result["metrics"]
    arms = ["base", "base_1_shots", "own_adapter", "MoLoRA_statistics", "MoLoRA_trained"]
    arms += ["uniform", "LoRA_on_the_mixture"]
    for name in ("problems", "sums", "choices"):
        losses = [numbers[f"{name}/{arm}/logp_token"] for arm in arms]
        assert len(set(losses)) == len(arms)  # the arms really differ
        assert all(loss < 0 for loss in losses)
        shares = [numbers[f"{name}/MoLoRA_trained/share/{of}"] for of in ("problems", "sums")]
        assert 0 <= sum(shares) <= 1
    assert numbers["choices/random_choice"] == pytest.approx(0.2)
    assert 0 <= numbers["checks/choices_adapter/choice"] <= 1
    assert "checks/own_adapter/choice" not in numbers
    claims = {each["id"]: each for each in result["claims"]}
    assert claims["real_tasks.sets_won"]["paper"] == 4
    report = (path / "report.md").read_text()
    assert "own-data label used" in report
    assert "One seed of training" in report
    assert all((path / f"{name}.png").exists() for name in ("right", "logp", "shares", "loss"))
