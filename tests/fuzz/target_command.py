"""Targets: training data, token ids, gin bindings and the command line."""

import ast
import contextlib
import dataclasses
import functools
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from absl import flags
from absl.testing import flagsaver
from hypothesis import strategies as st

from experiments import main as run
from experiments import registry
from molora_jax.models.tiny import tiny_tokenizer
from molora_jax.training import read_windows
from tests.experiments import toy
from tests.fuzz.guard import attempt
from tests.fuzz.mutate import HUGE, SMALL, STAND_INS, damaged, dumped, json_trees
from tests.fuzz.targets import Target

# --- training data -------------------------------------------------------------------------------
SEQ_LEN = 16
LINES = (
    {"text": "a plain text"},
    {"text": "é🙂"},
    {"text": ""},
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "what?"},
            {"role": "assistant", "content": "that <|im_end|>"},
        ]
    },
    {"messages": [{"role": "user", "content": "only"}]},
)


@st.composite
def _data_files(draw) -> bytes:
    lines = []
    for _ in range(draw(st.integers(0, 4))):
        line = draw(st.sampled_from(LINES))
        kind = draw(st.integers(0, 7))
        if kind == 0:
            line = draw(json_trees(line, ("text", "messages", "role", "content")))
        text = dumped(line)
        if kind == 1:
            text = draw(damaged(text))
        if kind == 2:
            text = draw(st.sampled_from((b"", b"  ", b"\xef\xbb\xbf" + text, b"[" * 5000, b"\r")))
        lines.append(text)
    content = draw(st.sampled_from((b"\n", b"\n", b"\n", b"\r\n", b"\n\n"))).join(lines)
    return content if draw(st.integers(0, 19)) else draw(st.sampled_from(STAND_INS))


def _check_data(content: bytes, folder: Path) -> bool:
    path = folder / "data.jsonl"
    path.write_bytes(content)
    tokenizer = _tokenizer()
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = attempt(
            lambda: read_windows(path, tokenizer, seq_len=SEQ_LEN),
            folder=folder,
            names=("data.jsonl", "documents hold"),
        )
    if outcome.refusal is not None:
        return False
    windows, report = outcome.value
    texts, chats = [], []
    for line in content.split(b"\n"):
        line = line.decode("utf-8-sig").strip()
        if line:
            entry = json.loads(line)
            assert isinstance(entry, dict) and ("text" in entry) != ("messages" in entry)
            texts += [entry["text"]] if "text" in entry else []
            chats += [entry["messages"]] if "messages" in entry else []
    assert (report.texts, report.conversations) == (len(texts), len(chats))
    stream: list[int] = []
    for text in texts:
        ids = tokenizer.backend.encode(text).ids
        stream += [*ids, tokenizer.eos_ids[0]] if ids else []
    rendered = [
        "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in each)
        for each in chats
    ]
    expected = [stream[i : i + SEQ_LEN] for i in range(0, len(stream), SEQ_LEN)]
    expected = [row for row in expected if len(row) > 1]
    expected += [tokenizer.backend.encode(text).ids[:SEQ_LEN] for text in rendered]
    found = [row[mask].tolist() for row, mask in zip(windows.tokens, windows.mask, strict=True)]
    assert found == expected, (found, expected)
    return True


@functools.cache
def _tokenizer():
    return tiny_tokenizer()


# --- token ids -----------------------------------------------------------------------------------
IDS = st.sampled_from((0, 1, 18, 19, 20, -1, -(2**31), -(2**63), *HUGE, 0.5, 3.0, True, None, "3",
                       float("nan"), [1])) | st.integers(0, 18)  # fmt: skip
ARRAYS = st.sampled_from((None, "int8", "int64", "uint64", "float32", "bool", "object", "<U3"))


@functools.cache
def _model() -> Any:
    from molora_jax.models import Decoder, ModelConfig
    from molora_jax.models.weights import random_arrays

    config = ModelConfig(
        model_type="llama", vocab_size=19, hidden_size=8, intermediate_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=8, max_positions=64,
    )  # fmt: skip
    return Decoder(config, random_arrays(config))


def _check_ids(case: tuple[list, str | None, bool], folder: Path) -> bool:
    """Through `generate` and a VocabularyRouter's check, as lists and as arrays of any type."""
    from molora_jax.generation import generate
    from molora_jax.routing import VocabularyRouter
    from tests.helpers import unchecked_shapes

    ids, dtype, through_router = case
    given = ids
    if dtype is not None:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            given = np.array(ids, dtype)
    if through_router and not (ids and all(np.ndim(each) == 0 for each in ids)):
        return False  # not (B, S), as a router's annotation has it
    table = np.arange(19, dtype=np.int32) % 3 - 1
    _greedy((1,))  # compiled before the case, whose memory is measured

    def call():
        with unchecked_shapes():
            if through_router:
                router = VocabularyRouter(table, num_columns=2)
                tokens = np.asarray(given)[None]
                return router(tokens, None, np.ones(tokens.shape, bool))[0]
            return generate(_model(), [given], max_new_tokens=1)

    outcome = attempt(call, folder=folder, names=("token", "prompts", "id"))
    if outcome.refusal is not None:
        return False
    flat = list(given) if isinstance(given, np.ndarray) else ids
    for each in flat:
        assert isinstance(each, int | np.integer), each
        assert 0 <= each < 19, each
    if through_router:
        assert outcome.value.adapter_ids[:, 0].tolist() == [int(table[int(i)]) for i in flat]
    else:
        (answer,) = outcome.value
        assert answer.tokens == _greedy(tuple(int(each) for each in flat))
    return True


@functools.lru_cache(maxsize=4096)
def _greedy(ids: tuple[int, ...]) -> list[int]:
    """The next token by the decoder alone, at the very length that generate pads to."""
    from molora_jax.generation import generate

    decoder = _model()
    generate(decoder, [[1]], max_new_tokens=1)
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, 16 - len(ids) :] = ids
    mask = np.arange(16)[None] >= 16 - len(ids)
    return [int(np.argmax(np.asarray(_last_logits()(tokens, mask)[0])))]


@functools.cache
def _last_logits():
    import jax

    decoder = _model()
    return jax.jit(lambda tokens, mask: decoder.logits(decoder(tokens, mask).hidden[:, -1]))


# --- gin -----------------------------------------------------------------------------------------
VALUES = (
    *("3", "-1", "0.25", "1e999", "nan", "True", "None", "'linear'", "'cubic'", "'no'", "(1, 2)"),
    *("[3]", "(1, 'a')", "{}", "{'a': 1}", "()", "''", "steps", "'a", "1 +", "lambda: 0", "..."),
    *("@toy.Config", "@toy.Config()", "%many", "@os.getcwd()", "@toy.main()", "%experiment"),
    *("__import__('os')", "9" * 5000, "[" * 200, "(" * 5000, "0x10", "1_000", "b'x'", "1j", "-"),
    *(str(each) for each in HUGE),
)
FITTING = {
    "steps": ("3", "0", " 12", "0x10", "1_000"),
    "rate": ("0.25", "3", "1e-3", "-.5", "True", "9" * 400),
    "kind": ("'cubic'", '"linear"', "('cubic')"),
    "sizes": ("(1, 2)", "[3]", "()", "(4,)", "(\n 5,\n 6)"),
    "limit": ("None", "7", "-7", "7.0"),
    "verbose": ("True", "False", "1"),
    "out": ("'here'", "''"),
    "seed": ("0", "5", "4294967295", "4294967296", "-1"),
}
NAMES = (
    *("toy.Config", "tests.experiments.toy.Config", "Config", "tiny/toy.Config", "toy.main"),
    *(
        "toy.sweep_rates",
        "gin.macro",
        "os.getcwd",
        "toy.Confg",
        "",
        "a/b/toy.Config",
        "toy..Config",
    ),
)
LINES_OF_GIN = (
    "import os", "import antigravity", "from os import system", "import tests.experiments.toy",
    "from experiments import registry", "import os.path as p", "include 'other.gin'",
    "include '/etc/passwd'", "include '../secret'", "include 'self.gin'", "include 3", "#",
    "many = 4", "many = %many", "a = %b\nb = %a", "toy.Config:\n  steps = 4\n  rate = 0.5",
    "import os; os.system('x')", "from __gin__ import dynamic_registration",
    "toy.Config.steps = \\",
    "@toy.Config.steps = 1", "import experiments.no_such_module", "x = @registry.nearest()",
    "toy.Config.steps = 1 # why", "\tsteps = 1", "{% x %}", "\0", "\ud83d", "“steps” = 1",
)  # fmt: skip


@st.composite
def _gin_texts(draw) -> list[str]:
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 9))
        if kind < 6:
            fields = [each.name for each in dataclasses.fields(toy.Config)]
            field = draw(st.sampled_from((*fields, *fields, "stepps", "", "steps.x")))
            name = draw(st.sampled_from(("toy.Config",) * 20 + NAMES))
            weird = st.sampled_from(VALUES) | SMALL.map(repr) | st.text(max_size=8)
            value = draw(weird if kind < 2 else st.sampled_from(FITTING.get(field, ("1",))))
            lines.append(f"{name}.{field} = {value}")
        elif kind < 8:
            lines.append(draw(st.sampled_from(LINES_OF_GIN)))
        else:
            lines.append(draw(st.text(max_size=20)))
    return lines


def _set_flags(gin_bindings=(), gin_file=()) -> None:
    flags.FLAGS.gin_bindings = list(gin_bindings)
    flags.FLAGS.gin_file = [str(each) for each in gin_file]


def _known_flags() -> None:
    if not flags.FLAGS.is_parsed():
        run.parse_flags(["run.py"])


def _check_gin(case: tuple[list[str], bool], folder: Path) -> bool:
    """`run.resolve` with the lines as --gin_bindings, or in a --gin_file."""
    _known_flags()
    lines, as_file = case
    file = folder / "self.gin"
    start = "from __gin__ import dynamic_registration\nfrom tests.experiments import toy\n"
    (folder / "other.gin").write_text(start + "toy.Config.limit = 3\n")
    if as_file:
        file.write_text(start + "\n".join(lines), "utf-8", "surrogatepass")
    configs = folder / "configs"
    configs.mkdir()
    with flagsaver.flagsaver(), contextlib.chdir(folder):
        _set_flags(() if as_file else lines, [file] if as_file else ())
        outcome = attempt(
            lambda: run.resolve("toy", toy, configs=configs), folder=folder, also=(run.Misuse,)
        )
    if outcome.refusal is not None:
        return False
    config = outcome.value
    expected = {each.name: each.default for each in dataclasses.fields(toy.Config)}
    sure = True
    for line in "\n".join(lines).split("\n"):
        line = line.split("#")[0].strip()
        match = re.fullmatch(r"(?:tests\.experiments\.)?toy\.Config\.(\w+) *= *(.+)", line)
        if match and "%" not in match[2] and "@" not in match[2]:
            with contextlib.suppress(ValueError, SyntaxError):
                expected[match[1]] = ast.literal_eval(match[2].strip())
                continue
        sure = sure and not line  # a macro, a block, an include: only types are checked then
    if sure:
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in expected.items()
        }
        for name, value in given.items():
            found = getattr(config, name)
            if name == "rate" and type(value) is int:
                value = float(value)
            assert found == value or name == "out", f"{name} is {found!r}, written {value!r}"
    assert type(config.steps) is int and config.steps >= 0
    assert type(config.rate) is float and config.kind in ("linear", "cubic")
    assert all(type(each) is int for each in config.sizes) and type(config.verbose) is bool
    return True


# --- the command line ----------------------------------------------------------------------------
FLAGS = ("experiment", "scale", "seed", "sweep", "gin_bindings", "gin_file", "workdir", "rerun",
         "retrain", "launcher", "jobs", "memory_gb", "retries", "slurm",
         "list", "sede", "no_such", "norerun", "", "-", "v", "undefok")  # fmt: skip
ARGUMENTS = ("toy", "table2", "tabel2", "tiny", "cpu", "paper", "0", "7", "-1", "1.5", "rates",
             "steps", "toy.Config.steps=2", "toy.Config.seed=5", "nowhere.gin",
             "True", "x" * 3000, "\n", "\0", "é\ud83d", "..", *map(str, HUGE[:7]))  # fmt: skip
GOOD_ARGUMENTS = ("--seed=3", "--seed=-0", "--scale=cpu", "--sweep=rates", "--workdir=runs",
                  "--sweep=steps,seed", "--launcher=here", "--jobs=1", "--retries=0",
                  "--rerun", "--noretrain", "--gin_bindings=toy.Config.rate=0.5", "--list=false",
                  "--gin_bindings=toy.Config.sizes=[4]", "--seed=4294967295",
                  "steps=2", "sizes=4,5", "sizes=[6]", "limit=None", "out=a b=c",
                  "kind='cubic'")  # fmt: skip
ENTRIES = {"toy": registry.Experiment(module="tests.experiments.toy", summary="a toy")}


@st.composite
def _argument_lists(draw) -> list[str]:
    found = ["--experiment=toy"] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.integers(0, 3)):
            found.append(draw(st.sampled_from(GOOD_ARGUMENTS)))
            continue
        name = draw(st.sampled_from(FLAGS) | st.text(max_size=5))
        value = draw(st.sampled_from(ARGUMENTS) | st.text(max_size=6))
        forms = (f"--{name}={value}", f"--{name}={value}", f"-{name}", f"--{name}", value, "--")
        found.append(draw(st.sampled_from(forms)))
    # absl's own flag that reads a file of flags, and those that talk to a debugger.
    return [each for each in found if not re.match(r"-+(flagf|pdb|run_with|use_c|only|h)", each)]


def _check_arguments(arguments: list[str], folder: Path) -> bool:
    """`parse_flags` and `main` with an experiment that only notes its config."""
    _known_flags()
    seen: list[Any] = []
    configs = folder / "configs"
    configs.mkdir()

    def execute(name, module, config, digest, **options):
        seen.append((config, options))
        return "complete", folder / "run"

    out, err = io.StringIO(), io.StringIO()

    def call():
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                argv = run.parse_flags(["run.py", *arguments])
                return run.main(argv, entries=ENTRIES, configs=configs)
            except SystemExit as stop:
                return stop.code

    with (
        flagsaver.flagsaver(),
        contextlib.chdir(folder),
        mock.patch("experiments.results.execute", execute),
        mock.patch("experiments.launcher._judge", return_value=("", False)),
        mock.patch("experiments.sweep_report.show_end"),
    ):
        outcome = attempt(call, folder=folder)
    code = outcome.value
    assert code in (0, 1, 2), code
    said = err.getvalue()
    assert "Traceback" not in said and len(said) < 3000, said[:500]
    if outcome.refusal is not None:
        raise AssertionError(f"not caught: {outcome.refusal}")
    if code != 0:
        assert (
            not seen and said.startswith("molora run: ") and len(said.strip().splitlines()) == 1
        ), said
        return False
    if not seen:  # --list
        assert out.getvalue()
        return True
    values = dict(re.findall(r"^--?(seed|scale|workdir)=(.*)$", "\n".join(arguments), re.M))
    plain = all(re.match(r"--?\w+=", each) or each == "--rerun" for each in arguments)
    for config, options in seen if plain else ():  # a flag alone may take the next as its value
        if "seed" in values:
            assert config.seed == int(values["seed"]), (config, values)
        assert options["scale"] == values.get("scale", "cpu")
    return True


def targets() -> list[Target]:
    ids = st.tuples(st.lists(IDS, max_size=12), ARRAYS, st.booleans())
    return [
        Target("jsonl", _data_files(), _check_data, 10),
        Target("token_ids", ids, _check_ids, 6),
        Target("gin", st.tuples(_gin_texts(), st.booleans()), _check_gin, 8),
        Target("arguments", _argument_lists(), _check_arguments, 6),
    ]
