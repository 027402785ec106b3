"""Tokenizers from metadata and from folders: ids, pieces, chat templates and spans of answers."""

import json

import pytest
from tokenizers import processors

from molora_jax.models.tiny import CHAT_TEMPLATE, tiny_tokenizer
from molora_jax.models.tokenizer import Tokenizer, byte_alphabet, byte_level_bpe

TEXTS = ["", "plain words", "grüße, 日本語 🙂\n\ttabs  and   spaces ", "x = 1234567 / 89"]
MESSAGES = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A test."},
    {"role": "user", "content": "Is it?"},
    {"role": "assistant", "content": "\nYes 🙂."},
]


def gguf_fields(split="smollm", **changes):
    """Metadata of a small byte-level BPE: single bytes, a few merges, two control tokens."""
    space = byte_alphabet()[ord(" ")]
    pairs = [(space, "a"), (space, space), ("l", "l"), ("1", "2"), ("12", "3"), (space, "1")]
    tokens = [*byte_alphabet(), *("".join(pair) for pair in pairs), "<s>", "</s>", "<user>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in pairs],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    } | changes


def pieces_of(tokenizer, text):
    return tokenizer.pieces(tokenizer.encode(text, add_special_tokens=False))


def test_bytes_are_ids():
    tokenizer = tiny_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.vocab_size == 260


@pytest.mark.parametrize("split", ["smollm", "llama-bpe", "qwen2", "gpt-2"])
def test_text_survives(split):
    tokenizer = Tokenizer.from_gguf(gguf_fields(split))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        pieces = tokenizer.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == text


def test_digits_are_split_first_where_the_metadata_says_so():
    def pieces(split, text):
        return pieces_of(Tokenizer.from_gguf(gguf_fields(split)), text)

    # Two spaces before a digit: the byte-level split alone keeps the last space for the number.
    assert pieces("smollm", "a  123") == ["a", "  ", "1", "2", "3"]
    assert pieces("gpt-2", "a  123") == ["a", " ", " ", "123"]
    assert pieces("llama-bpe", "a 1234") == ["a", " ", "123", "4"]
    assert pieces("qwen2", "a 123") == ["a", " ", "1", "2", "3"]


def test_contractions_ignore_case_in_the_newer_splits():
    merges = ["' L", "'L L", "l l"]
    fields = gguf_fields("llama-bpe")
    fields["tokenizer.ggml.merges"] = merges
    fields["tokenizer.ggml.tokens"] = [*byte_alphabet(), "'L", "'LL", "ll", "<s>", "</s>", "<user>"]
    fields["tokenizer.ggml.token_type"] = [1] * 259 + [3, 3, 4]
    fields["tokenizer.ggml.bos_token_id"] = fields["tokenizer.ggml.eos_token_id"] = 259
    assert pieces_of(Tokenizer.from_gguf(fields), "I'LL") == ["I", "'LL"]


def test_special_tokens_are_single_ids():
    tokenizer = Tokenizer.from_gguf(gguf_fields(), eos_ids=(5,))
    tokens = gguf_fields()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("a<s>b</s><user>")
    assert [tokens[token] for token in ids] == ["a", "<s>", "b", "</s>", "<user>"]
    assert tokenizer.decode(ids) == "a<s>b</s><user>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<user>"
    assert tokenizer.eos_ids == (5, tokens.index("</s>"))
    assert tokenizer.vocab_size == len(tokens)


def test_bos_is_added_as_the_metadata_says():
    bos = gguf_fields()["tokenizer.ggml.bos_token_id"]
    for split, says, added in [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ]:
        fields = gguf_fields(split)
        if says is not None:
            fields["tokenizer.ggml.add_bos_token"] = says
        tokenizer = Tokenizer.from_gguf(fields)
        assert (tokenizer.encode("a")[0] == bos) is added
        assert tokenizer.encode("a", add_special_tokens=False)[0] != bos
        # The template wrote one, and no second is added.
        assert tokenizer.apply_chat_template([{"content": "a"}]) == [bos, ord("a")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "model 'llama' is not supported"),
        ({"tokenizer.ggml.pre": ["smollm"]}, "is not supported"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "expected a list of texts"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "1 of them different"),
        ({"tokenizer.ggml.token_type": [1]}, "with 1 types"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' is no pair"),
        ({"tokenizer.ggml.merges": ["no pair"]}, "merges do not fit"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id is -1"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"tokenizer.chat_template": ["a"]}, "chat_template is"),
        ({"tokenizer.chat_template": "{% for"}, "no Jinja template"),
    ],
)
def test_other_and_damaged_tokenizers_are_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf(gguf_fields(**change))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "no tokenizer that the tokenizers package reads"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "no tokenizer that"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is 3; expected a token's text"),
        ("tokenizer_config.json", '{"eos_token": {"id": 3}}', "expected a token's text"),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', "chat_template is"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("chat_template.jinja", "{{ x|no_filter }}", "no Jinja template"),
    ],
)
def test_a_damaged_file_of_the_tokenizer_is_refused_in_one_line(tmp_path, name, content, words):
    tiny_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        Tokenizer.from_folder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_that_fails_says_so_in_words():
    for template in ("{{ messages[9].x.y }}", "{{ 1/0 }}", "{{ raise_exception('a\nb') }}"):
        with pytest.raises(ValueError, match="template") as caught:
            with_template(template).render_chat([])
        assert len(str(caught.value).splitlines()) == 1


def test_a_link_that_leads_nowhere_or_out_is_not_taken_for_a_missing_file(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    tiny_tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    (tmp_path / "template").write_text("{{ secret }}")
    (folder / "chat_template.jinja").symlink_to("../template")
    with pytest.raises(ValueError, match="leads out of"):
        Tokenizer.from_folder(folder)


def test_folder_with_its_settings(tmp_path):
    backend = tiny_tokenizer().backend
    backend.enable_truncation(4)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    bare = Tokenizer.from_folder(tmp_path, eos_ids=(7,))
    assert bare.encode("longer than four") == [256, *b"longer than four"]
    assert bare.eos_ids == (7,)
    with pytest.raises(ValueError, match="no chat template"):
        bare.render_chat(MESSAGES)
    settings = {
        "bos_token": {"content": "<|endoftext|>", "special": True},
        "eos_token": "<|im_end|>",
        "chat_template": [
            {"name": "tools", "template": "other"},
            {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (258,))
    assert tokenizer.apply_chat_template([]) == [256, 258]
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == tiny_tokenizer().render_chat(
        MESSAGES
    )


def with_template(template):
    return Tokenizer(tiny_tokenizer().backend, eos_ids=(258,), chat_template=template)


def test_templates_render_as_in_transformers():
    template = """{%- for message in messages %}
    {% if message.role == 'system' %}
        {{- raise_exception('no system here') }}
    {% endif %}
    {% generation %}
{{ message | tojson }}
    {% endgeneration %}
    {% if loop.first %}
        {% continue %}
    {% endif %}
    {{ strftime_now('%Y') | length }}
{% endfor %}"""
    tokenizer = with_template(template)
    messages = [{"role": "user", "content": "grüße <b>"}, {"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages) == (
        '{"role": "user", "content": "grüße <b>"}\n{"role": "user", "content": "x"}\n    4\n'
    )
    with pytest.raises(ValueError, match="refuses these messages: no system here"):
        tokenizer.render_chat([{"role": "system", "content": ""}])


def test_templates_cannot_reach_out():
    with pytest.raises(ValueError, match="'__class__' of 'list' object is unsafe"):
        with_template("{{ messages.__class__.__mro__ }}").render_chat([])


def test_mask_covers_what_the_assistant_writes():
    tokenizer = tiny_tokenizer()
    ids, mask = tokenizer.render_chat_with_mask(MESSAGES)
    assert ids == tokenizer.apply_chat_template(MESSAGES)
    spans, current = [], []
    for token, inside in zip(ids, mask, strict=True):
        if inside:
            current.append(token)
        elif current:
            spans.append(tokenizer.decode(current))
            current = []
    assert spans == ["A test.<|im_end|>", "\nYes 🙂.<|im_end|>"]
    assert not any(tokenizer.render_chat_with_mask(MESSAGES[:1])[1])


def test_mask_of_a_token_that_begins_in_the_prompt():
    """ "\\n\\n" is one token here: its end is in the answer, so the model has to write it."""
    vocab = {character: index for index, character in enumerate(byte_alphabet())}
    newline = byte_alphabet()[10]
    backend = byte_level_bpe(vocab | {newline * 2: 256}, [(newline, newline)], split="gpt-2")
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    tokenizer = Tokenizer(backend, chat_template=template)
    ids, mask = tokenizer.render_chat_with_mask([{"role": "assistant", "content": "\n\n."}])
    assert ids[mask.index(True)] == 256


def test_a_template_that_rewrites_the_past_is_refused():
    template = (
        "{% for m in messages %}{{ m.role }}:"
        "{% if loop.last %}<think>{% endif %}{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = with_template(template)
    with pytest.raises(ValueError, match=r"messages\[1\]: this chat template"):
        tokenizer.render_chat_with_mask(MESSAGES)


@pytest.mark.model
def test_smollm2_splits_digits_first(smollm2):
    tokenizer = smollm2.tokenizer
    for text in ("a  12 b", "add ½ and 3/4", "y²  7"):
        parts, word = [], ""
        for character in text:  # every digit stands alone before the byte-level split
            if character.isnumeric():
                parts += [word, character]
                word = ""
            else:
                word += character
        separate = [token for part in [*parts, word] for token in tokenizer.encode(part)]
        assert tokenizer.encode(text) == separate
    assert len(tokenizer.encode("<|im_end|>")) == 1
    assert tokenizer.vocab_size == smollm2.config.vocab_size == 49152
