"""Text to token ids and back, with the chat template, from tokenizer.json or from GGUF metadata."""

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from molora_jax.files import MAX_TEXT_BYTES, one_line, read_json, read_text

Message = Mapping[str, Any]

# Splits of text before byte-level BPE, by the name that GGUF files give them.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
MAX_TOKENIZER_BYTES = 16 * MAX_TEXT_BYTES  # of tokenizer.json; large vocabularies take 30 MB
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that stand in text as one piece


class Tokenizer:
    """A `tokenizers` backend with what a chat template needs.

    `eos_ids` end an answer, `bos_id` begins a text where the tokenizer adds one (`encode` does
    then, the chat template writes its own). `special_tokens` {"bos_token": "<s>", …} is what the
    template may name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self._template = None if chat_template is None else _compiled(chat_template)

    @classmethod
    def from_folder(cls, folder: str | Path, *, eos_ids: Sequence[int] = ()) -> "Tokenizer":
        """From a Hugging Face folder. `eos_ids` are the model's; the tokenizer's own is added."""
        folder = Path(folder)
        if not (folder / "tokenizer.json").exists():
            raise ValueError(
                f"{folder}: tokenizer.json is missing, and a slow tokenizer (tokenizer.model, "
                "vocab.json) is not read. Save it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        path = folder / "tokenizer.json"
        text = read_text(path, where=str(path), root=folder, max_bytes=MAX_TOKENIZER_BYTES)
        with _in_words(f"{path} is no tokenizer that the tokenizers package reads"):
            backend = tokenizers.Tokenizer.from_str(text)
            backend.no_truncation()
            backend.no_padding()
        path = folder / "tokenizer_config.json"
        settings = read_json(path, where=str(path), root=folder) if os.path.lexists(path) else {}
        special = {
            name: _special_text(entry, f"{path}: {name}")
            for name in _SPECIAL
            if (entry := settings.get(name)) is not None
        }
        template = _template_text(settings.get("chat_template"), f"{path}: chat_template")
        path = folder / "chat_template.jinja"
        if os.path.lexists(path):
            template = read_text(path, where=str(path), root=folder)
        return cls(
            backend,
            eos_ids=_with(eos_ids, backend.token_to_id(special.get("eos_token", ""))),
            bos_id=backend.token_to_id(special.get("bos_token", "")),
            chat_template=template,
            special_tokens=special,
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, eos_ids: Sequence[int] = ()) -> "Tokenizer":
        """From the metadata of a GGUF file: byte-level BPE with one of the known splits."""
        kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
        if kind != "gpt2" or not isinstance(split, str) or split not in _SPLITS:
            found, value = ("model", kind) if kind != "gpt2" else ("pre-tokenizer", split)
            raise ValueError(
                f"GGUF: the tokenizer {found} {one_line(repr(value))} is not supported, only "
                "byte-level BPE ('gpt2') with "
                f"the pre-tokenizers {', '.join(_SPLITS)}. Use the model's Hugging Face folder, "
                "whose tokenizer.json says all."
            )
        tokens, kinds, merges = _gguf_vocabulary(fields)
        with _in_words("GGUF: the tokenizer's merges do not fit its tokens"):
            backend = byte_level_bpe(
                {token: index for index, token in enumerate(tokens)}, merges, split=split
            )
            backend.add_tokens(
                [
                    AddedToken(token, special=kind == _CONTROL, normalized=False)
                    for token, kind in zip(tokens, kinds, strict=True)
                    if kind in (_CONTROL, _USER_DEFINED)
                ]
            )
        ids = {}
        for name, key in zip(_SPECIAL, ("bos", "eos", "padding", "unknown"), strict=True):
            token = ids[name] = fields.get(f"tokenizer.ggml.{key}_token_id")
            if token is not None and not (type(token) is int and 0 <= token < len(tokens)):
                raise ValueError(
                    f"GGUF: tokenizer.ggml.{key}_token_id is {one_line(repr(token))}; expected a "
                    f"number below {len(tokens)}, the count of tokens"
                )
        special = {name: tokens[token] for name, token in ids.items() if token is not None}
        bos = ids["bos_token"]
        # Older Llama 3 files leave the key out; llama.cpp adds the token for them all the same.
        adds_bos = fields.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")
        if not isinstance(adds_bos, bool):
            found = one_line(repr(adds_bos))
            raise ValueError(f"GGUF: tokenizer.ggml.add_bos_token is {found}; expected a bool")
        if adds_bos and bos is not None:
            text = special["bos_token"]
            with _in_words(f"GGUF: the token {one_line(text)!r} cannot begin a text"):
                backend.post_processor = processors.TemplateProcessing(
                    single=[text, "$A"], special_tokens=[(text, bos)]
                )
        template = fields.get("tokenizer.chat_template")
        return cls(
            backend,
            eos_ids=_with(eos_ids, ids["eos_token"]),
            bos_id=bos,
            chat_template=_template_text(template, "GGUF: tokenizer.chat_template"),
            special_tokens=special,
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written in the text become their single ids.

        `add_special_tokens` adds what this tokenizer begins a text with (Llama's BOS; for many
        models nothing). False for text that the chat template rendered, which has it already.
        """
        with _in_words("the tokenizer cannot encode this text"):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the ids; bytes that are no whole character become U+FFFD."""
        ids = [int(token) for token in ids]
        with _in_words("the tokenizer cannot decode these ids"):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each id adds to the decoded text; a character of several ids stands at its last."""
        ids = [int(token) for token in ids]
        pieces, start, known = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self.decode(ids[start:end])
            if text.endswith("\ufffd") and end < len(ids):
                pieces.append("")
                continue
            pieces.append(text[len(known) :])
            # One id of context, because a decoder may treat the first id of a text in its own way.
            start, known = end - 1, self.decode(ids[end - 1 : end])
            if known.endswith("\ufffd"):
                start, known = end, ""
        return pieces

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """The conversation as text. Messages are {"role": …, "content": …}."""
        if self._template is None:
            raise ValueError(
                "this tokenizer has no chat template, so 'messages' cannot be rendered; use plain "
                "text ('text' in training data), or an instruction-tuned base"
            )
        with _in_words("the chat template cannot render these messages"):
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of the conversation; `add_generation_prompt`: up to where the answer begins."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat_with_mask(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of the conversation, and which of them the assistant writes.

        An answer is what stands between the prompt that generation would see and the end of its
        turn, its end-of-turn token included. Raises ValueError where the template renders a turn
        otherwise once more turns follow (some drop earlier reasoning): no span would then be what
        the model is shown.
        """
        text = self.render_chat(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render_chat(messages[:index], add_generation_prompt=True)
            through = self.render_chat(messages[: index + 1])
            if not (text.startswith(through) and through.startswith(before)):
                raise ValueError(
                    f"messages[{index}]: this chat template renders the assistant's turn otherwise "
                    "when more turns follow, so loss on responses only has no meaning here. Train "
                    "on conversations that end with their only assistant turn, or on plain text."
                )
            spans.append((len(before), len(through)))
        with _in_words("the tokenizer cannot encode this text"):
            encoded = self.backend.encode(text, add_special_tokens=False)
        ids, mask = encoded.ids, [False] * len(encoded.ids)
        for begin, end in spans:
            inside = [i for i, (_, last) in enumerate(encoded.offsets) if begin < last <= end]
            stops = [i for i in inside if ids[i] in self.eos_ids]
            for i in inside:  # what a template writes behind the end of turn, nobody generates
                mask[i] = not stops or i <= stops[-1]
        return ids, mask


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], *, split: str
) -> tokenizers.Tokenizer:
    """A BPE over bytes written as characters (GPT-2's alphabet), with one of the known splits."""
    # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say.
    backend = tokenizers.Tokenizer(
        models.BPE(dict(vocab), list(merges), ignore_merges=split == "llama-bpe")
    )
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split])
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


@contextlib.contextmanager
def _in_words(problem: str) -> Iterator[None]:
    """Whatever the packages below raise for bad content becomes a ValueError in one line.

    tokenizers raises plain Exception, and pyo3's PanicException, which is no Exception at all.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        text = str(error)
        if isinstance(error, ValueError) and len(text) < 400 and len(text.splitlines()) == 1:
            raise
        raise ValueError(f"{problem}: {one_line(text or type(error).__name__)}") from error


def _special_text(entry: Any, where: str) -> str:
    """A special token's text, which stands alone or in the object of an AddedToken."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise ValueError(f"{where} is {one_line(repr(entry))}; expected a token's text")
    return text


def _template_text(entry: Any, where: str) -> str | None:
    """The chat template; of several by name the one called default."""
    if isinstance(entry, list) and all(isinstance(each, dict) for each in entry):
        entry = {str(each.get("name")): each.get("template") for each in entry}.get("default")
    if entry is not None and not isinstance(entry, str):
        raise ValueError(f"{where} is {one_line(repr(entry))}; expected a text, or texts by name")
    return entry


def _gguf_vocabulary(
    fields: Mapping[str, Any],
) -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """Tokens, their types and the pairs of merges, each as the format has it."""
    lists: dict[str, list] = {}
    for key, kind in (("tokens", str), ("token_type", int), ("merges", str)):
        values = fields.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not all(type(each) is kind for each in values):
            found = "missing" if values is None else one_line(repr(values)[:99])
            what = "texts" if kind is str else "whole numbers"
            raise ValueError(f"GGUF: tokenizer.ggml.{key} is {found}; expected a list of {what}")
        lists[key] = values
    tokens, kinds = lists["tokens"], lists["token_type"]
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"GGUF: tokenizer.ggml.tokens holds {len(tokens)} tokens, {len(set(tokens))} of them "
            f"different, with {len(kinds)} types; expected one of each"
        )
    pairs = [pair.partition(" ") for pair in lists["merges"]]
    if wrong := [left for left, space, _ in pairs if not space]:
        raise ValueError(
            f"GGUF: tokenizer.ggml.merges: {one_line(wrong[0])!r} is no pair of tokens"
        )
    return tokens, kinds, [(left, right) for left, _, right in pairs]


def _with(ids: Sequence[int], more: int | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys([*ids, *([] if more is None else [more])]))


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which some templates put around answers: its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(template: str) -> jinja2.Template:
    """The template in a sandbox, with the settings and names that transformers gives it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )

    def raise_exception(message: str) -> None:
        raise ValueError(f"the chat template refuses these messages: {message}")

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    with _in_words("the chat template is no Jinja template"):
        return environment.from_string(template)
