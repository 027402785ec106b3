"""generate: the arms side by side, each as the library makes it."""

import json

import numpy as np
import pytest

from molora_jax.adapters import AdapterBank, Composition, load_adapter, save_adapter
from molora_jax.generation import Generated, generate
from molora_jax.routing import SequenceRouter, VocabularyRouter
from molora_jax.tools import generate as verb
from tests.tools.conftest import BASE, make

PROMPT = "abc def"


@pytest.fixture(scope="module")
def composition(base, folders, tmp_path_factory):
    bank = AdapterBank(base.config, num_slots=3, max_rank=4)
    bank.load(folders["b"], slot=2)
    bank.load(folders["a"], slot=0)
    router = VocabularyRouter.from_ranges([(0, 128, 1), (128, 256, 0)], vocab_size=260)
    made = Composition(
        base_name=base.name, base_digest=base.digest, bank=bank, router=router,
        column_digests=[bank.occupant(name).digest for name in "ab"],
    )  # fmt: skip
    return made.save(tmp_path_factory.mktemp("mix") / "mix")


def answers(tool, *argv):
    result = tool(
        "generate", "--base", BASE, "--prompt", PROMPT, "--max_tokens", 6, *argv, "--json"
    )
    assert result.code == 0, result.err
    return {each["arm"]: each for each in json.loads(result.out)["arms"]}


def test_base_and_adapters_answer_as_the_library_does(tool, folders, base):
    found = answers(tool, "--adapter", folders["a"], f"bee={folders['b']}")
    assert list(found) == ["base", "a", "bee"]
    ids = base.tokenizer.encode(PROMPT)
    bank = AdapterBank(base.config, num_slots=2, max_rank=4)
    bank.load(folders["a"])
    bank.load(folders["b"], name="bee")
    for arm in ("base", "a", "bee"):
        routed = {}
        if arm != "base":
            router = SequenceRouter(np.array([bank.slot_of(arm)]))
            routed = {"adapters": bank.stacks, "router": router}
        (expected,) = generate(base.decoder, [ids], max_new_tokens=6,
                               stop_ids=base.tokenizer.eos_ids, **routed)  # fmt: skip
        assert found[arm]["tokens"] == expected.tokens
        assert found[arm]["adapters"] == [None if arm == "base" else arm] * 6
        assert found[arm]["tokens_per_s"] > 0
        assert found[arm]["finish_reason"] == "length"
    assert len({tuple(each["tokens"]) for each in found.values()}) == 3


def test_a_composition_adds_its_adapters_and_the_routed_arm(tool, composition, folders, base):
    found = answers(tool, "--adapter", folders["a"], "--composition", composition)
    assert list(found) == ["base", "a", "composition:a", "b", "routed"]
    assert found["a"]["tokens"] == found["composition:a"]["tokens"]
    routed = found["routed"]
    names = ["b" if token < 128 else "a" if token < 256 else None for token in routed["tokens"]]
    assert routed["adapters"] == names
    assert len(set(names)) > 1
    only = answers(tool, "--composition", composition, "--only", "routed,base")
    assert list(only) == ["base", "routed"]
    assert only["routed"]["tokens"] == routed["tokens"]
    result = tool("generate", "--base", BASE, "--prompt", PROMPT, "--only", "ruoted",
                  "--composition", composition)  # fmt: skip
    assert result.code == 2
    assert "no arm 'ruoted'; did you mean 'routed'?" in result.err


def test_for_people_arms_are_labelled_and_without_a_terminal_uncoloured(tool, composition):
    result = tool("generate", "--base", BASE, "--prompt", PROMPT, "--max_tokens", 6,
                  "--composition", composition)  # fmt: skip
    assert result.code == 0, result.err
    heads = [line for line in result.out.splitlines() if line.startswith("== ")]
    assert [head.split()[1] for head in heads] == ["base", "a", "b", "routed"]
    assert "6 tokens, cut at --max_tokens" in heads[0]
    assert "tokens/s" in heads[0]
    # The routed arm says whose each token is, of the prompt too, and the rule.
    routed = result.out.splitlines()[result.out.splitlines().index(heads[-1]) + 1 :]
    assert routed[0] == "prompt:"
    assert "b | abc def" in routed[: routed.index("answer:")]
    assert "adapters of the prompt: a 0%, b 100%" in routed
    assert verb.RULE in result.out
    assert f"next: python -m molora_jax.tools serve --base {BASE}" in routed[-1]
    assert "\x1b" not in result.out


def test_sampling_is_by_seed(tool):
    one = answers(tool, "--temperature", 1.5, "--seed", 3)["base"]
    assert one["tokens"] == answers(tool, "--temperature", 1.5, "--seed", 3)["base"]["tokens"]
    assert one["tokens"] != answers(tool, "--temperature", 1.5, "--seed", 4)["base"]["tokens"]
    assert one["tokens"] != answers(tool)["base"]["tokens"]
    assert answers(tool, "--temperature", 1.5, "--top_k", 1)["base"] != one


def test_an_answer_ends_before_a_stop_text(base):
    """Also where the text begins inside a token, and of several the first counts."""
    ids = base.tokenizer.encode("one two END three")

    def cut(*stops, stopped=False):
        text, pieces, finish = verb._cut(base, Generated(ids, None, stopped), stops)
        assert "".join(pieces) == text
        return text, finish

    assert cut() == ("one two END three", "length")
    assert cut("never") == ("one two END three", "length")
    assert cut(stopped=True) == ("one two END thre", "stop")
    assert cut("three", " END", "D") == ("one two", "stop")
    assert cut("one") == ("", "stop")


@pytest.mark.model
def test_a_stop_text_inside_a_token_leaves_what_stands_before_it(smollm2):
    ids = smollm2.tokenizer.encode("The capital is Paris.\n\nThe answer is 5")

    def cut(stop):
        text, pieces, finish = verb._cut(smollm2, Generated(ids, None, False), [stop])
        assert "".join(pieces) == text and finish == "stop"
        return text

    assert cut("ris") == "The capital is Pa"
    assert cut("wer is") == "The capital is Paris.\n\nThe ans"
    assert cut("\n") == "The capital is Paris."


def test_chat_renders_the_prompt_as_a_turn(tool, base):
    argv = ("generate", "--base", BASE, "--prompt", PROMPT, "--max_tokens", 2, "--chat", "--json")
    found = json.loads(tool(*argv).out)
    turn = [{"role": "user", "content": PROMPT}]
    ids = base.tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    assert found["prompt_tokens"] == len(ids)


def test_an_adapter_that_does_not_fit_is_refused(tool, molora_data, folders):
    folder = molora_data / "adapters" / "open-calm-1b-delta-r1"
    result = tool("generate", "--base", BASE, "--prompt", "x", "--adapter", folders["a"], folder)
    assert result.code == 1
    assert "was trained on cyberagent/open-calm-1b and does not fit tiny-random" in result.err
    assert load_adapter(folders["a"])[0].name == "a"


def test_warnings_of_an_adapter_are_shown(tool, base, tmp_path):
    save_adapter(make(base, "far", base_name="org/another"), tmp_path / "far")
    argv = ("--only", "far", "--max_tokens", 1, "--prompt", "x")
    result = tool("generate", "--base", BASE, "--adapter", tmp_path / "far", *argv)
    assert result.code == 0
    assert "warning: adapter 'far': trained on org/another, used with tiny-random" in result.err


def test_only_must_name_an_arm(tool):
    assert tool("generate", "--base", BASE, "--prompt", "x", "--only", ",").code == 2


def test_an_empty_stop_text_is_a_misuse(tool):
    argv = ("generate", "--base", BASE, "--prompt", "x", "--stop")
    assert tool(*argv, "").code == 2
