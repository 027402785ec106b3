"""What a completion continues and what a chat has said, from the fields of a body."""

from __future__ import annotations

from typing import Any

from molora_jax.adapters.names import brief
from molora_jax.generation import Engine
from molora_jax.serving.errors import ApiError, refused
from molora_jax.serving.fields import Fields

_MESSAGE_NEUTRAL: dict[str, Any] = {
    "refusal": (),
    "annotations": ([],),
    "audio": (),
    "tool_calls": ([],),
    "function_call": (),
    "name": (),
}
_ROLES = ("system", "developer", "user", "assistant")


def read_prompts(value: Any, engine: Engine) -> list[list[int]]:
    """Token ids of a text, a list of texts, a list of ids or a list of such lists.

    Raises ApiError, naming the prompt, for ids outside the vocabulary and for an empty one.
    """
    expected = "a text, a list of texts, a list of token ids or a list of such lists"
    found = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(found, list) or not found:
        what = "missing" if value is None else brief(value)
        raise refused(f"prompt is {what}; expected {expected}", param="prompt")
    texts = [each for each in found if isinstance(each, str)]
    if len(texts) not in (0, len(found)):
        raise refused(f"prompt mixes texts and token ids; expected {expected}", param="prompt")
    if len(found) > engine.max_waiting:  # before the work of encoding them
        raise refused(
            f"prompt holds {len(found)} prompts; the queue takes {engine.max_waiting}",
            param="prompt",
        )
    prompts = []
    for index, each in enumerate(found):
        where = "prompt" if len(found) == 1 else f"prompt[{index}]"
        if not isinstance(each, str) and not _is_ids(each):
            raise refused(f"{where} is {brief(each)}; expected {expected}", param=where)
        try:
            ids = engine.base.tokenizer.encode(each) if isinstance(each, str) else list(each)
        except ValueError as error:
            raise refused(f"{where}: {error}", param=where) from None
        if not ids:
            raise refused(f"{where} is empty: it needs at least one token", param=where)
        size = engine.base.config.vocab_size
        if wrong := [token for token in ids if not 0 <= token < size]:
            raise refused(
                f"{where} holds token id {brief(wrong[0])}; the vocabulary has {size}: expected 0 "
                f"to {size - 1}",
                param=where,
            )
        prompts.append(ids)
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def read_messages(value: Any) -> list[dict[str, str]]:
    """{"role", "content"} of every message, its parts of text joined. Raises ApiError."""
    if not isinstance(value, list) or not value:
        found = "missing" if value is None else brief(value)
        raise refused(f"messages is {found}; expected a list of messages", param="messages")
    messages = []
    for index, each in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(each, dict):
            raise refused(f"{where} is {brief(each)}; expected role and content", param=where)
        try:
            fields = Fields(each)
            role, content = fields.take("role"), fields.take("content")
            fields.finish(_MESSAGE_NEUTRAL)
        except ApiError as error:
            raise refused(f"{where}: {error.message}", param=where, code=error.code) from None
        if role not in _ROLES:
            raise refused(
                f"{where}: role is {brief(role)}; expected one of {', '.join(_ROLES)}", param=where
            )
        # What was called system is called developer in newer clients; templates know the former.
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": _content(content, where)})
    return messages


def _content(value: Any, where: str) -> str:
    """A text, or the texts of a list of parts one after another."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        found = "missing" if value is None else brief(value)
        raise refused(f"{where}: content is {found}; expected a text", param=where)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise refused(
                f"{where}: a part of content is {brief(part)}; only parts of type text are read: "
                '{"type": "text", "text": "…"}',
                param=where,
            )
        texts.append(part["text"])
    return "".join(texts)
