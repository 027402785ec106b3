"""What comes back: completions and chat completions, whole or in chunks, as OpenAI shapes them."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from molora_jax.generation import Delta, Generation
from molora_jax.generation.request import TokenLogprobs
from molora_jax.models.tokenizer import Tokenizer, byte_alphabet
from molora_jax.routing.metrics import main_adapter, top_1
from molora_jax.serving.protocol import Ask

Numbers = Sequence[tuple[int, TokenLogprobs, int]]  # token, its numbers, where its text begins


class CompletionForm:
    """/v1/completions."""

    whole, chunk, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def choice(self, text: str) -> dict[str, Any]:
        """The answer's text in a whole completion."""
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        """What an answer's first chunk holds, if it comes before its text."""
        return None

    def piece(self, text: str) -> dict[str, Any]:
        """The text in a chunk."""
        return {"text": text}

    def logprobs(self, numbers: Numbers) -> dict[str, Any]:
        """Four lists of one length; the chosen token is always among the likeliest."""
        top = []
        for token, each, _ in numbers:
            likeliest = {token_text(self._tokenizer, i): p for i, p in each.top}
            top.append(likeliest | {token_text(self._tokenizer, token): each.logprob})
        return {
            "tokens": [token_text(self._tokenizer, token) for token, _, _ in numbers],
            "token_logprobs": [each.logprob for _, each, _ in numbers],
            "top_logprobs": top if any(each.top for _, each, _ in numbers) else None,
            "text_offset": [offset for _, _, offset in numbers],
        }


class ChatForm:
    """/v1/chat/completions."""

    whole, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def choice(self, text: str) -> dict[str, Any]:
        """The answer as a message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        """Whose turn it is."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        """What the message grew by."""
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, numbers: Numbers) -> dict[str, Any]:
        """An entry for each token, with its bytes."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = token_bytes(self._tokenizer, token)
            return {
                "token": token_text(self._tokenizer, token),
                "logprob": logprob,
                "bytes": None if data is None else list(data),
            }

        return {
            "content": [
                entry(token, each.logprob) | {"top_logprobs": [entry(i, p) for i, p in each.top]}
                for token, each, _ in numbers
            ],
            "refusal": None,
        }


Form = CompletionForm | ChatForm


class Answer:
    """One choice while it grows: its text, and the numbers of its tokens."""

    def __init__(self):
        self.text = ""
        self.numbers: list[tuple[int, TokenLogprobs, int]] = []
        self.finish_reason: str | None = None

    def take(self, delta: Delta) -> Numbers:
        """Adds a delta, and returns the numbers that it brought."""
        new = []
        if delta.logprobs is not None and delta.token is not None:
            new.append((delta.token, delta.logprobs, len(self.text)))
        self.text += delta.text
        self.numbers += new
        self.finish_reason = delta.finish_reason
        return new


class Envelope:
    """What all parts of one response have in common."""

    def __init__(self, form: Form, ask: Ask):
        self._form, self._ask = form, ask
        self._id = f"{form.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, answers: Sequence[Answer], generations: Sequence[Generation]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = []
        for index, (answer, generation) in enumerate(zip(answers, generations, strict=True)):
            numbers = self._form.logprobs(answer.numbers) if self._with_numbers else None
            choice = {"index": index, **self._form.choice(answer.text), "logprobs": numbers}
            choice["finish_reason"] = answer.finish_reason
            choices.append(choice | self._routing(generation))
        return self._wrap(self._form.whole, choices) | {"usage": self.usage(generations)}

    def openings(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        if (opening := self._form.opening()) is None:
            return []
        return [self._chunk(i, opening, None, None, {}) for i in range(len(self._ask.requests))]

    def chunk(
        self, index: int, delta: Delta, new: Numbers, generation: Generation
    ) -> dict[str, Any] | None:
        """What a delta adds to a stream; None where it shows nothing yet."""
        if not (delta.text or delta.finish_reason or new):
            return None
        numbers = self._form.logprobs(new) if new else None
        routing = self._routing(generation) if delta.finish_reason else {}
        piece = self._form.piece(delta.text)
        return self._chunk(index, piece, numbers, delta.finish_reason, routing)

    def last(self, generations: Sequence[Generation]) -> dict[str, Any] | None:
        """The counts behind a stream, where they were asked for."""
        if not self._ask.include_usage:
            return None
        return self._wrap(self._form.chunk, []) | {"usage": self.usage(generations)}

    def usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all answers."""
        prompt, generated = self._ask.prompt_tokens, sum(len(g.tokens) for g in generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    @property
    def _with_numbers(self) -> bool:
        return self._ask.requests[0].logprobs is not None

    def _chunk(
        self, index: int, piece: dict[str, Any], numbers: Any, finish: str | None, routing: Any
    ) -> dict[str, Any]:
        choice = {"index": index, **piece, "logprobs": numbers, "finish_reason": finish}
        chunk = self._wrap(self._form.chunk, [choice | routing])
        return chunk | ({"usage": None} if self._ask.include_usage else {})

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _routing(self, generation: Generation) -> dict[str, Any]:
        return {"routing": routing_of(generation)} if self._ask.return_routing else {}


def routing_of(generation: Generation) -> dict[str, Any] | None:
    """Which adapter each token that was read used; None for an engine without adapters.

    {"adapters": names, "tokens": [its main adapter's name or null, …], "layers": [[index into
    adapters or −1, …], …]}: prompt and answer, without the answer's last token, which is not read.
    "layers" holds each layer's first choice, and one entry where all layers have the same.
    """
    routing = generation.routing
    if routing is None:
        return None
    names = sorted(generation.slots)
    index_of = {generation.slots[name]: at for at, name in enumerate(names)} | {-1: -1}
    of_tokens = main_adapter(routing.adapter_ids, routing.gates)
    layers, _ = top_1(routing.adapter_ids, routing.gates)
    layers = layers[:1] if (layers == layers[:1]).all() else layers
    return {
        "adapters": names,
        "tokens": [None if slot < 0 else names[index_of[slot]] for slot in of_tokens.tolist()],
        "layers": [[index_of[slot] for slot in layer] for layer in np.asarray(layers).tolist()],
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; of one that is part of a character, its bytes as OpenAI writes them."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text
    data = token_bytes(tokenizer, token)
    return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Its UTF-8 bytes, also of a part of a character; None where the tokenizer does not tell."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    piece, known = tokenizer.backend.id_to_token(token), _bytes_of_characters()
    if piece is None or any(character not in known for character in piece):
        return None
    return bytes(known[character] for character in piece)


@functools.cache
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_alphabet())}
