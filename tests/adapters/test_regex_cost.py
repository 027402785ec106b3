"""Which regular expressions of an adapter_config.json are refused because they could hang."""

import json
import re

import pytest

from molora_jax.adapters import load_adapter
from molora_jax.adapters.regex_cost import may_take_forever
from tests.adapters.make import arrays_for, modules_of, peft_tensors, write_peft


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "^model.layers.0.self_attn.q_proj",
        r".*\.layers\.(\d+)\.(self_attn|mlp)\.(q_proj|v_proj)",
        r"model\.layers\.(1[0-9]|2[0-7])\..*(gate|up|down)_proj",
        r"(?!.*vision).*\.[qv]_proj$",
        r"(.*\.)?(\d{1,3}\.)?up_proj",
        r"[a-z.]+\d+[a-z.]*",
        "[[a]",
        r"(a|b|c)*",  # one set of letters to Python
        # As a trainer that also knows multimodal models writes it.
        r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp|ffn).*?(?:q_proj|v_proj|up_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj|up_proj)))"
        r"|(?:\bmodel\.language_model\.layers\.[\d]{1,}\..*?\.(?:q_proj|v_proj|up_proj))",
    ],
)
def test_what_people_write_is_taken(pattern):
    assert not may_take_forever(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"([a-z._0-9]+)+X",
        r"(.*)*X",
        r"(a*)*",
        r"(?:(?:x.*)?)*y",
        r"(\w|[a-z.]x|.)+X",
        r"((ab|a|b)+)X",
        r"(a{1,99}){1,99}",
        r"(?=(.*a)*)x",
        r".*.*.*.*.*.*.*X",
        r"(?:(a+?)+?b)?",
    ],
)
def test_what_could_take_for_ever_is_told(pattern):
    re.compile(pattern)
    assert may_take_forever(pattern)


@pytest.mark.parametrize("field", ["target_modules", "rank_pattern", "alpha_pattern"])
def test_an_adapter_with_such_a_pattern_is_refused_at_once(tmp_path, field):
    folder = write_peft(tmp_path / "a", peft_tensors(arrays_for(modules_of())))
    config = json.loads((folder / "adapter_config.json").read_text())
    evil = r"([a-z._0-9]+)+X"
    config[field] = evil if field == "target_modules" else {evil: 3}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{field} is .* without nested repetitions"):
        load_adapter(folder)
