"""Settings of a command line: what `field=value` means, how it is refused, and written again."""

import dataclasses
import shlex
import sys
import typing

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import field_names, fields, gin_files, registry, results, settings, train_adapter
from experiments import main as command_line
from experiments.registry import Misuse, place, texts
from tests.experiments import toy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Fields of the kinds that toy has none of.

    name, files  a text; paths of files
    """

    name: str = "adapter"
    files: tuple[str, ...] = place(())
    said: str | tuple[str, ...] = texts()
    pair: tuple[float, float] = (1.0, 2.0)
    sizes: tuple[tuple[int, int], ...] = ((1, 2),)
    words: tuple[str, ...] | None = None
    flag: bool | None = None
    rate: float | None = None
    seed: int = 0


THIS = sys.modules[__name__]


def read(*words, module=THIS):
    return settings.read(module, words)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["steps=7"], 7),
        (["steps=-1_000"], -1000),
        (["rate=3e-4"], 3e-4),
        (["rate=2"], 2.0),
        (["rate=.5"], 0.5),
        (["kind=cubic"], "cubic"),
        (["kind='cubic'"], "cubic"),
        (["limit=None"], None),
        (["limit=4"], 4),
        (["verbose=true"], True),
        (["verbose=False"], False),
        (["sizes=3"], (3,)),
        (["sizes=3, 4"], (3, 4)),
        (["sizes=(3, 4)"], (3, 4)),
        (["sizes=[3]"], (3,)),
        (["sizes=()"], ()),
        (["sizes=3,4", "sizes=5"], (3, 4, 5)),
        (["out="], ""),
        (["out= a = b, 'c' "], " a = b, 'c' "),
        (["out='a b'"], "a b"),
        (['out="it\'s"'], "it's"),
        (["out='a' or 'b'"], "'a' or 'b'"),
        (["out=ü✓"], "ü✓"),
        (["out=None"], "None"),
        (["out='"], "'"),
    ],
)
def test_a_setting_is_read_as_its_fields_type_says(words, value):
    name = words[0].partition("=")[0]
    found = read(*words, module=toy)
    assert found == {name: value}
    assert type(found[name]) is type(value)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["files=a b.jsonl,c.jsonl"], ("a b.jsonl", "c.jsonl")),
        (["files=['a,b.jsonl']"], ("a,b.jsonl",)),
        (["said=one, two"], ("one, two",)),
        (["said=one", "said=(two, three)"], ("one", "(two, three)")),
        (["said=()"], ()),
        (["said='()'"], ("()",)),
        (["pair=1,2"], (1.0, 2.0)),
        (["pair=1", "pair=2"], (1.0, 2.0)),
        (["sizes=((1, 2), (3, 4))"], ((1, 2), (3, 4))),
        (["sizes=(1, 2), (3, 4)"], ((1, 2), (3, 4))),
        (["words=a,b"], ("a", "b")),
        (["words=None"], None),
        (["flag=None"], None),
        (["flag=true"], True),
        (["rate=1"], 1.0),
    ],
)
def test_several_values_texts_and_none(words, value):
    assert read(*words) == {words[0].partition("=")[0]: value}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr=3"], "lr=3: there is no such field; known are steps, rate"),
        (["step=3"], "did you mean steps"),
        (
            ["toy.Config.rate=3"],
            "toy.Config.rate=3: a field stands by its name alone; write rate=3",
        ),
        (["Config/rate=3"], "write rate=3"),
        (["=3"], "'=3': expected field=value"),
        (["="], "expected field=value"),
        (["rate="], "rate= is empty: expected a number, as in rate=0.5"),
        (["rate= "], "is empty"),
        (["sizes="], "sizes= is empty: expected whole numbers, as in sizes=1,2"),
        (["sizes=1,,2"], "a value is empty, and for none there is ()"),
        (["sizes=1,"], "a value is empty"),
        (["sizes=(3)"], "sizes=(3): a single value in brackets has a comma behind it"),
        (["sizes=(1, 2.5)"], "expected whole numbers"),
        (["sizes=(1"], "expected whole numbers"),
        (["rate=fast"], "rate=fast: expected a number, as in rate=0.5"),
        (["rate=nan"], "expected a number"),
        (["rate=1e999"], "expected a number"),
        (["rate=1,5"], "expected a number"),
        (["rate=٣"], "expected a number"),
        (["steps=2.0"], "steps=2.0: expected a whole number, as in steps=3"),
        (["steps=" + "9" * 5000], "expected a whole number"),
        (["verbose=yes"], "verbose=yes: expected true or false, as in verbose=false"),
        (["limit=none"], "limit=none: expected a whole number or None, as in limit=8"),
        (["kind=cubik"], "did you mean cubic? expected linear or cubic, as in kind=linear"),
        (["steps=3", "steps=3"], "steps=3: steps is set twice, and holds one value"),
        (["sizes=" + "(" * 5000 + ")" * 5000], "in brackets it is Python"),
    ],
)
def test_what_does_not_fit_is_said_with_its_type_and_an_example(words, said):
    with pytest.raises(Misuse) as caught:
        read(*words, module=toy)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 1500 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["files='a,b',c"], "values with quotes or commas in them need a Python list"),
        (["files=[a,b]"], "in brackets it is Python, where texts have quotes"),
        (["sizes=1,2"], "expected tuples of 2 whole numbers, as in sizes=((1, 2),)"),
        (["words=None", "words=a"], "set twice"),
        (["flag=maybe"], "expected true or false or None"),
    ],
)
def test_nothing_is_split_or_joined_in_silence(words, said):
    with pytest.raises(Misuse) as caught:
        read(*words)
    assert said in str(caught.value)


def test_a_file_with_a_comma_in_its_name_is_not_taken_for_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").touch()
    with pytest.raises(Misuse, match=r"a file has that name.*; write \"files=\['a,b'\]\"$"):
        read("files=a,b")
    assert settings.written(THIS, "files", ("a,b",)) == ["files=('a,b',)"]


TEXTS = ["", "a", "'a'", "''", "'", "'''", "\"a'b\"", "'a' or 'b'", "None", "()", "[1]", "a,b",
         " a ", "x=y", "~/x", "$HOME `id`", "ü✓", "a\nb", "\x00", "\ud83d"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("name", text) for text in TEXTS),
        *(("said", (text, "b")) for text in TEXTS),
        *(("files", (text, "b")) for text in TEXTS),
        *(("words", (text,)) for text in TEXTS),
        ("files", ()),
        ("said", ()),
        ("words", None),
        ("words", ()),
        ("sizes", ((1, 2), (3, -4))),
        ("sizes", ()),
        ("pair", (0.1, -1e300)),
        ("flag", False),
        ("rate", 5e-324),
        ("rate", 1.0),
        ("seed", 4294967295),
    ],
)
def test_what_is_written_is_read_as_the_same_value(name, value):
    words = settings.written(THIS, name, value)
    if words[0].startswith("--gin_bindings="):
        needed = value if isinstance(value, tuple) else (value,)
        assert not all(text.isprintable() for text in needed)
        text = words[0].removeprefix("--gin_bindings=")
        assert gin_files.bindings(THIS, texts=[text])[name] == value
    else:
        assert read(*words) == {name: value}
    assert all(word.isprintable() for word in words)
    assert shlex.split(" ".join(map(settings.quoted_for_shell, words))) == words


@pytest.mark.parametrize("name", list(registry.EXPERIMENTS))
def test_every_field_has_a_type_in_words_an_example_and_a_description(name):
    module = registry.EXPERIMENTS[name].load()
    described = fields.described(module.Config)
    values, hints = registry.defaults(module.Config), typing.get_type_hints(module.Config)
    assert [name for name in values if not described.get(name)] == []
    assert set(field_names.names(module.__name__)) == set(values)
    for name, _, _, text in fields.table(module.Config, values, title="").rows:
        assert text == described[name]
        given = values[name]
        words = settings.written(module, name, given)
        if not words[0].startswith("--gin_bindings"):  # the default can be written, and read again
            assert read(*words, module=module) == {name: registry.fit(given, hints[name])}


def argv_of(command: str) -> list[str]:
    program, *words = shlex.split(command.removeprefix("molora "))
    assert program == "run"
    return words


@pytest.mark.parametrize("scale", ["cpu", "tiny"])
@pytest.mark.parametrize("name", list(registry.EXPERIMENTS))
def test_the_command_of_a_report_makes_the_run_again(name, scale, tmp_path, monkeypatch):
    """Every value that could be given, and the ids of both: a text with quotes, a longer tuple."""
    module = registry.EXPERIMENTS[name].load()
    monkeypatch.setattr(module.Config, "__post_init__", registry.check_config)
    own = gin_files.own_values(name, module, scale)
    changed = {field: other(value) for field, value in own.items()}
    for values in (own, {**own, **changed}):
        config = module.Config(**values)
        command = settings.command(name, config, own, module=module, scale=scale)
        short = f"molora run --experiment={name}" + ("" if scale == "cpu" else f" --scale={scale}")
        assert command.startswith(short) and "\n" not in command
        assert values is not own or command == short
        with flagsaver.flagsaver():
            argv = command_line.parse_flags(["molora run", *argv_of(command)])
            again = command_line.resolve(name, module, given=argv[1:])
            assert flags.FLAGS.experiment == name
        assert again == config
        assert results.run_id(name, again, {}) == results.run_id(name, config, {})


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    if isinstance(value, tuple | list):
        return tuple(value)[::-1]
    return value


def test_a_setting_and_a_binding_of_gin_are_the_same_run():
    pairs = {
        "rate=2": "toy.Config.rate = 2",
        "sizes=4,5": "toy.Config.sizes = [4, 5]",
        "kind=cubic": "toy.Config.kind = 'cubic'",
        "out=o u t": "toy.Config.out = 'o u t'",
        "limit=None": "toy.Config.limit = None",
        "verbose=true": "toy.Config.verbose = True",
    }
    ids = [
        results.run_id("toy", toy.Config(**values), {})
        for values in (
            settings.read(toy, list(pairs)),
            gin_files.bindings(toy, texts=list(pairs.values())),
        )
    ]
    assert ids[0] == ids[1] != results.run_id("toy", toy.Config(), {})


def test_one_text_and_a_list_of_it_are_the_same_analysis(tmp_path):
    from experiments import analyse

    (tmp_path / "molora.json").touch()
    one, many = (
        analyse.Config(composition=str(tmp_path), texts=given) for given in ("a, b", ["a, b"])
    )
    assert one == many
    (word,) = settings.written(analyse, "texts", one.texts)
    assert word == "texts=a, b" and read(word, module=analyse) == {"texts": ("a, b",)}


def test_the_table_of_fields_is_a_row_a_field_those_of_the_experiment_first():
    values = registry.defaults(train_adapter.Config) | {"data": "d" * 80}
    table = fields.table(train_adapter.Config, values, title="Settings")
    names = [row[0] for row in table.rows]
    assert names[0] == "base" and set(names) == set(values) and names.index("lr") > 8
    title, header, first, *_ = str(table).splitlines()
    assert title == "Settings" and header.split() == ["field", "type", "value", "what", "it", "is"]
    assert first.startswith("base ") and "smollm2-135m" in first
    (data,) = [row for row in table.rows if row[0] == "data"]
    assert data[2].endswith("d…") and len(data[2]) == fields.LONGEST_VALUE
