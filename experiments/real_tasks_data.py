"""Real question sets as prompts and gold answers: GSM8K, SVAMP, AQuA, and BBH to be asked alone."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from experiments import word_problems

Source = Literal["auto", "embedded", "molora_data"]
ALIKE = 0.6  # share of common words (Jaccard) from which a training row counts as a test question
END = "\n"  # stands behind an answer


@dataclasses.dataclass(frozen=True)
class Question:
    """`prompt` ends in "Answer:", and " " + `answer` follows; `options` of a choice, else ()."""

    task: str
    prompt: str
    answer: str
    options: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSet:
    """Questions of one set; `train` is empty where the set is for evaluation only.

    left_out  training rows that say what a test question says
    """

    name: str
    train: tuple[Question, ...]
    test: tuple[Question, ...]
    left_out: int
    split: str
    licence: str

    @functools.cached_property
    def digest(self) -> str:
        said = [dataclasses.astuple(each) for each in (*self.train, *self.test)]
        return hashlib.sha256(json.dumps([len(self.train), said]).encode()).hexdigest()


def load_sets(source: Source = "auto") -> list[TaskSet]:
    """Three sets to train on and one to ask alone, last.

    source  "molora_data": gsm8k, svamp, aqua and bbh of the folder that MOLORA_DATA names;
            "embedded": generated stand-ins (problems, sums, choices, checks), which say nothing of
            the real sets; "auto": the former where MOLORA_DATA is set

    Raises ValueError where MOLORA_DATA is unset or lacks a file.
    """
    folder = os.environ.get("MOLORA_DATA")
    if source == "embedded" or (source == "auto" and not folder):
        return _embedded()
    if not folder:
        raise ValueError(
            "Config.data = 'molora_data', but MOLORA_DATA is not set: let it name the folder that "
            "holds gsm8k, svamp, aqua and bbh, or set Config.data = 'embedded' for stand-ins"
        )
    root = pathlib.Path(folder)
    return [_gsm8k(root), _svamp(root), _aqua(root), _bbh(root)]


def _gsm8k(root: pathlib.Path) -> TaskSet:
    def asked(name: str) -> list[Question]:
        rows = _json_lines(root / "gsm8k" / f"{name}.jsonl")
        return [
            open_question("gsm8k", r["question"], r["answer"].rpartition("####")[2]) for r in rows
        ]

    return checked("gsm8k", asked("train"), asked("test"), "trained on its train rows", "MIT")


def _svamp(root: pathlib.Path) -> TaskSet:
    """Its rows are variations of about a hundred stories, so whole stories are held out."""
    rows = _json_lines(root / "svamp" / "svamp.jsonl")
    asked = [open_question("svamp", r["question"], f"{r['answer']:g}") for r in rows]
    story = stories(likeness(asked, asked) >= ALIKE)
    order = np.unique(story).tolist()
    random.Random("svamp").shuffle(order)
    held = np.isin(story, order[: len(order) * 3 // 10])
    train = [each for each, is_held in zip(asked, held, strict=True) if not is_held]
    test = [each for each, is_held in zip(asked, held, strict=True) if is_held]
    split = "whole stories held out by a fixed draw, since it has no split of its own"
    return checked("svamp", train, test, split, "MIT")


def _aqua(root: pathlib.Path) -> TaskSet:
    def asked(name: str) -> list[Question]:
        return [
            choice("aqua", r["question"], [o.split(")", 1)[1] for o in r["options"]], r["correct"])
            for r in _json_lines(root / "aqua" / f"{name}.jsonl")
        ]

    split = "trained on its dev rows, asked its test rows; its training set is not in the folder"
    return checked("aqua", asked("dev"), asked("test"), split, "Apache-2.0")


def _bbh(root: pathlib.Path) -> TaskSet:
    tasks = []
    for path in sorted((root / "bbh").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["examples"]
        targets = sorted({row["target"] for row in rows})
        asked = []
        for row in rows:
            listed = listed_options(row["input"]) or (targets if len(targets) == 2 else [])
            options = tuple(listed) if row["target"] in listed else ()
            prompt = f"Question: {row['input']}\nAnswer:"
            asked.append(Question(path.stem, prompt, row["target"], options))
        random.Random(path.stem).shuffle(asked)
        tasks.append(asked)
    if not tasks:
        raise ValueError(f"{root / 'bbh'} has no task: MOLORA_DATA must name a folder that has it")
    # One of each task in turn, so that any beginning has all tasks.
    test = [each for turn in itertools.zip_longest(*tasks) for each in turn if each is not None]
    split = "asked alone, nothing is trained or chosen on it"
    return TaskSet(name="bbh", train=(), test=tuple(test), left_out=0, split=split, licence="MIT")


def _embedded() -> list[TaskSet]:
    """Generated stand-ins, so that the experiment runs on every machine."""
    r = random.Random("real_tasks")

    def problems(held_out: bool, count: int) -> list[Question]:
        kinds = [kind for kind in word_problems.kinds() if kind.held_out == held_out]
        found = []
        while len(found) < count:
            text = word_problems.written(r, r.choice(kinds))
            said = re.match(r"(?:Question: |Problem\. |Q: )(.*)\n", text)
            answer = re.findall(r"-?\d+", text)
            if said and answer:
                found.append(open_question("problems", said[1], answer[-1]))
        return found

    def sums(count: int) -> list[Question]:
        pairs = [(r.randrange(100), r.randrange(100)) for _ in range(count)]
        return [open_question("sums", f"What is {a} plus {b}?", str(a + b)) for a, b in pairs]

    def choices(count: int) -> list[Question]:
        found = []
        for _ in range(count):
            numbers = r.sample(range(100), 5)
            letter = "ABCDE"[numbers.index(max(numbers))]
            found.append(choice("choices", "Which is the largest?", map(str, numbers), letter))
        return found

    def checks(count: int) -> list[Question]:
        pairs = [r.sample(range(100), 2) for _ in range(count)]
        return [
            Question("checks", f"Question: Is {a} more than {b}?\nOptions:\n- Yes\n- No\nAnswer:",
                     "Yes" if a > b else "No", ("Yes", "No"))
            for a, b in pairs
        ]  # fmt: skip

    own = "generated"
    return [
        TaskSet(name="problems", train=tuple(problems(False, 200)), test=tuple(problems(True, 60)),
                left_out=0, split="kinds of problem held out", licence=own),
        TaskSet(name="sums", train=tuple(sums(200)), test=tuple(sums(60)), left_out=0,
                split="drawn apart", licence=own),
        TaskSet(name="choices", train=tuple(choices(200)), test=tuple(choices(60)), left_out=0,
                split="drawn apart", licence=own),
        TaskSet(name="checks", train=(), test=tuple(checks(60)), left_out=0, split="asked alone",
                licence=own),
    ]  # fmt: skip


def open_question(task: str, text: str, answer: str) -> Question:
    """A question with a number as its answer, written without commas."""
    return Question(task, f"Question: {text.strip()}\nAnswer:", answer.strip().replace(",", ""))


def choice(task: str, text: str, options: Iterable[str], correct: str) -> Question:
    """A question with lettered options; the answer is a letter in parentheses."""
    lines = [f"({letter}) {o.strip()}" for letter, o in zip("ABCDEFGH", options, strict=False)]
    prompt = "\n".join([f"Question: {text.strip()}", "Options:", *lines, "Answer:"])
    return Question(task, prompt, f"({correct})", tuple(line[:3] for line in lines))


def listed_options(text: str) -> list[str]:
    """What a question lists behind "Options:": "(A)" and so on, or the words behind dashes."""
    lines = text.rpartition("Options:")[2].split("\n") if "Options:" in text else []
    found = [re.match(r"(\([A-Z]\)) |- (.+)", line.strip()) for line in lines]
    return [match[1] or match[2].strip() for match in found if match]


def checked(
    name: str, train: Sequence[Question], test: Sequence[Question], split: str, licence: str
) -> TaskSet:
    """A set without the training rows that share ALIKE of their words with some test question.

    Numbers are no words here: the same story with other numbers counts as the same.
    """
    alike = likeness(train, test).max(axis=1) >= ALIKE
    kept = [each for each, is_alike in zip(train, alike, strict=True) if not is_alike]
    return TaskSet(
        name=name,
        train=tuple(kept),
        test=tuple(test),
        left_out=len(train) - len(kept),
        split=split,
        licence=licence,
    )


def likeness(train: Sequence[Question], test: Sequence[Question]) -> np.ndarray:
    """(train, test) Jaccard index of the words of each training and each test question."""
    texts = [re.findall("[a-z]+", each.prompt.lower()) for each in (*train, *test)]
    index = {word: at for at, word in enumerate(sorted(set(itertools.chain(*texts))))}
    words = np.zeros((len(texts), len(index)), np.float32)
    for row, text in enumerate(texts):
        words[row, [index[word] for word in text]] = 1
    counts = words.sum(axis=1)
    common = words[: len(train)] @ words[len(train) :].T
    union = counts[: len(train), None] + counts[None, len(train) :] - common
    return common / union


def stories(alike: np.ndarray) -> np.ndarray:
    """(n,) the first row of each row's story: rows that a chain of alike (n, n) rows joins."""
    story = np.arange(len(alike))
    while True:
        first = np.where(alike, story, len(alike)).min(axis=1)
        if (first == story).all():
            return story
        story = first


def answer_ids(tokenizer, asked: Question) -> list[int]:
    return tokenizer.encode(f" {asked.answer}")


def training_windows(tokenizer, questions: Sequence[Question], *, rows: int, seq_len: int, seed):
    """`rows` windows without padding over the questions in a drawn order, again and again.

    One stands behind the other; the answers and their ends are the targets.
    """
    from molora_jax.training.data import make_batch

    rng = random.Random(f"real_tasks/{seed}")
    end = [(token, True) for token in tokenizer.encode(END)]
    stream: list[tuple[int, bool]] = []
    while len(stream) < rows * seq_len:
        for each in rng.sample(questions, len(questions)):
            stream += [(token, False) for token in tokenizer.encode(each.prompt)]
            stream += [*((token, True) for token in answer_ids(tokenizer, each)), *end]
            if len(stream) >= rows * seq_len:
                break
    flat = np.array(stream[: rows * seq_len], np.int32)
    tokens, is_target = flat.reshape(rows, seq_len, 2).transpose(2, 0, 1)
    return make_batch(tokens, np.ones((rows, seq_len), bool), is_target.astype(bool))


def shots(questions: Sequence[Question], count: int) -> str:
    """Worked examples to stand before a prompt: short training questions, no answer twice."""
    chosen: list[Question] = []
    for each in sorted(questions[:60], key=lambda asked: len(asked.prompt)):
        if each.answer not in [other.answer for other in chosen]:
            chosen.append(each)
        if len(chosen) == count:
            break
    return "".join(f"{each.prompt} {each.answer}{END}" for each in chosen)


def _json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: MOLORA_DATA must name a folder that has it")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
