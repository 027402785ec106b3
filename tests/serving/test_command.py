"""`python -m molora_jax.tools serve`, started as a program and told to stop."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from molora_jax.adapters import save_adapter
from molora_jax.serving.profiles import read_composition, read_control, read_vocabulary
from molora_jax.tools.arguments import Misuse, parse
from molora_jax.tools.serve import adapter_paths
from tests.adapters.test_composition import compose, learned_router
from tests.serving.conftest import weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(base, tmp_path_factory):
    """A composition of a, b, c, and an adapter `extra`; files of a table and of control tokens."""
    root = tmp_path_factory.mktemp("files")
    adapters = []
    for seed, name in enumerate("abc"):
        made = weights(base, seed)
        adapters.append(type(made)(name, made.modules, made.config))
    compose(base, adapters, learned_router(base)).save(root / "composition")
    save_adapter(weights(base, 40, rank=3), root / "extra")
    ranges = [
        {"start": 0, "stop": 128, "adapter": "a"},
        {"start": 128, "stop": 256, "adapter": "b"},
    ]
    (root / "vocab.json").write_text(json.dumps({"ranges": ranges}))
    switches = {"<|im_start|>": "b", "258": None}
    (root / "control.json").write_text(json.dumps({"tokens": switches, "initial": "extra"}))
    return root


def test_the_command_serves_until_sigterm_and_leaves_with_0(files, base):
    command = [
        sys.executable, "-m", "molora_jax.tools", "serve", "--model", "tiny-random", "--port", "0",
        "--adapters", f"extra={files / 'extra'}", "--composition", str(files / "composition"),
        "--vocab_routing", str(files / "vocab.json"), "--rows", "2", "--context", "16",
        "--max_lora_rank", "4", "--memory_budget", "300KiB", "--grace", "20",
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            lines = []
            while not lines or "ready" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            assert lines[0].startswith("adapter bank: 4 slots of rank 4, 64.1 KiB a slot, 256 KiB")
            address = next(word for word in lines[-1].split() if word.startswith("http")).strip(",")
            client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
            names = [each.id for each in client.models.list()]
            assert names[:2] == ["tiny-random", "extra"] and names[5:] == ["molora", "vocab"]
            assert sorted(names[2:5]) == ["a", "b", "c"]
            ask = {
                "prompt": "abc",
                "max_tokens": 6,
                "temperature": 0,
                "extra_body": {"ignore_eos": True},
            }
            found = {
                name: client.completions.create(model=name, **ask).choices[0].text for name in names
            }
            assert len(set(found.values())) == len(names) - (found["vocab"] == found["a"])
            with pytest.raises(openai.PermissionDeniedError, match="--adapter_root"):
                client.post(
                    "/load_lora_adapter", body={"lora_name": "x", "lora_path": "x"}, cast_to=str
                )
            # A stream that is under way when the end is asked for comes to its own.
            stream = client.completions.create(model="a", stream=True, **ask | {"max_tokens": 13})
            first = next(iter(stream))
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
            assert rest[-1].choices[0].finish_reason == "length"
            assert "".join(c.choices[0].text for c in [first, *rest]).startswith(found["a"][:3])
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
            assert process.stdout.read().endswith("stopped\n")
        finally:
            process.kill()


def test_a_composition_is_a_profile_for_its_own_adapters(base, files):
    profile, adapters = read_composition(files / "composition", base)
    assert sorted(adapters) == ["a", "b", "c"]
    assert list(profile.adapters) == ["a", "b", "c"]
    assert profile.digests == tuple(adapters[name].digest for name in "abc")


def test_tables_and_control_tokens_are_read_from_files(base, files):
    profile = read_vocabulary(files / "vocab.json", base)
    assert profile.adapters == ["a", "b"]
    table = profile.router.table[...]
    assert table[:128].tolist() == [0] * 128 and table[128:].tolist() == [1] * 128 + [-1] * 4
    profile = read_control(files / "control.json", base)
    assert profile.adapters == ["b", "extra"] and profile.router.initial == 1
    table = profile.router.table[...]
    assert table[257] == 0 and table[258] == -1 and table[5] == -2


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        (read_vocabulary, [], "holds a list; expected a JSON object"),
        (read_vocabulary, {}, "ranges is missing"),
        (read_vocabulary, {"ranges": [], "rangs": 1}, "'rangs'; did you mean 'ranges'"),
        (read_vocabulary, {"ranges": []}, "expected a list of ranges"),
        (read_vocabulary, {"ranges": [[0, 1, "a"]]}, "ranges[0] is [0, 1, 'a']; expected start"),
        (read_vocabulary, {"ranges": [{"start": 0, "stop": 261, "adapter": "a"}]}, "size 260"),
        (read_vocabulary, {"ranges": [{"start": 5, "stop": 5, "adapter": "a"}]}, "does not fit"),
        (read_vocabulary, {"ranges": [{"start": "0", "stop": 5, "adapter": "a"}]}, "token ids"),
        (read_vocabulary, {"ranges": [{"start": 0, "stop": 5, "adapter": None}]}, "is None"),
        (read_vocabulary, {"ranges": [{"start": 0, "stop": 5, "adapter": "a"},
                                      {"start": 4, "stop": 9, "adapter": "b"}]}, "overlaps"),
        (read_control, {"tokens": {}}, "expected adapters by token"),
        (read_control, {"tokens": {"nope": "a"}}, "'nope' is no token of the base's vocabulary"),
        (read_control, {"tokens": {"999": "a"}}, "999"),
        (read_control, {"tokens": {"<|pad|>": "a", "259": "b"}}, "names the token 259 twice"),
        (read_control, {"tokens": {"<|pad|>": None}}, "switch to no adapter"),
        (read_control, {"tokens": {"<|pad|>": 5}}, "is 5; expected an adapter's name"),
    ],
)  # fmt: skip
def test_a_routing_file_that_is_wrong_is_named(tmp_path, base, read, content, words):
    file = tmp_path / "routing.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        read(file, base)
    assert str(caught.value).startswith(str(file))


def test_adapters_are_named_as_in_vllm():
    form = '{"name": "sql", "path": "x/y", "base_model_name": "org/Tiny-Random"}'
    assert adapter_paths([form, "a=p,b=q", "c=r"], "tiny-random") == {
        "sql": "x/y", "a": "p", "b": "q", "c": "r"
    }  # fmt: skip
    for item, words in (
        ('{"name": "x"}', "expected name and path"),
        ('{"name": "x", "path": 5}', "expected name and path"),
        ("{", "cannot be read as JSON"),
        ('{"name": "x", "path": "p", "base_model_name": "other"}', "is not --model tiny-random"),
        ("a=p,a=q", "two adapters are called 'a'"),
    ):
        with pytest.raises(Misuse, match=words):
            adapter_paths([item], "tiny-random")


def test_sizes_are_read_with_their_units():
    def size(text):
        return parse(["serve", "--model", "x", "--memory_budget", text]).memory_budget

    assert size("5000") == 5000 and size("2GiB") == 2**31 and size("1.5mb") == 1_500_000
    for text in ("2XB", "-1", "GiB", "0"):
        with pytest.raises(Misuse, match="a size in bytes"):
            size(text)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--model", "x", "--adapter_root", "."], 2, "belong together"),
        (["--model", "x", "--allow_runtime_lora_updates"], 2, "belong together"),
        (["--model", "x", "--allow_runtime_lora_updates", "--adapter_root", "no"], 2, "no folder"),
        (["--model", "x", "--port", "70000"], 2, "a port from 0 to 65535"),
        (["--model", "x", "--grace", "-1"], 2, "seconds, 0 to 3600"),
        (["--model", "nope", "--port", "0"], 1, "neither a path that exists nor a known name"),
        (["--model", "tiny-random", "--port", "0", "--adapters", "a=nowhere"], 1, "no adapter at"),
        (["--model", "tiny-random", "--port", "0", "--host", "256.1.1.1"], 1, "cannot listen on"),
        (["--model", "tiny-random", "--port", "0", "--vocab_routing", "{vocab}"], 1,
         "routes to the adapter 'a', which is not loaded"),
        (["--model", "tiny-random", "--port", "0", "--adapters", "{extra}", "--max_loras", "2",
          "--memory_budget", "1MiB"], 2, "give one"),
        (["--model", "tiny-random", "--port", "0", "--context", "5000"], 1, "model's positions"),
        (["--model", "tiny-random", "--port", "0", "--adapters", "{extra}", "--max_lora_rank", "2"],
         1, "rank 3 exceeds max_rank 2"),
    ],
)  # fmt: skip
def test_a_misuse_is_one_line(argv, code, words, files, capsys):
    from molora_jax.tools.__main__ import main

    places = {"extra": files / "extra", "vocab": files / "vocab.json"}
    assert main(["serve", *(each.format(**places) for each in argv)]) == code
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and "Traceback" not in said


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch, capsys):
    from molora_jax.tools import serve
    from molora_jax.tools.__main__ import main

    monkeypatch.setattr(serve, "PACKAGES", ("uvicorn", "no_such_package"))
    assert main(["serve", "--model", "tiny-random"]) == 1
    said = capsys.readouterr().err
    assert 'needs no_such_package, of the extra serve: pip install "molora-jax[serve]"' in said
