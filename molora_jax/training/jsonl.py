"""A user's own data: JSON lines with `text`, or with `messages` through the chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax.files import one_line
from molora_jax.models import Tokenizer
from molora_jax.training.data import Batch, check_seq_len, concatenate, make_batch, pack

EXPECTED = (
    'expected one JSON object a line: {"text": "..."} or '
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)

_ARRAY = "write its entries one a line, without brackets and commas around them"

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What became of the lines of a file.

    `truncated` conversations lost their end to the window; `dropped` lines left no target at all
    (empty, or nothing to learn in what the window holds). Texts are packed and lose nothing.
    """

    path: str
    seq_len: int
    texts: int
    conversations: int
    truncated: int
    dropped: int
    windows: int
    targets: int

    def __str__(self) -> str:
        said = [f"{self.texts} texts"] if self.texts else []
        said += [f"{self.conversations} conversations"] if self.conversations else []
        lost = []
        if self.truncated:
            lost.append(f"{self.truncated} conversations cut at {self.seq_len} tokens")
        if self.dropped:
            lost.append(f"{self.dropped} lines dropped that left no target")
        return (
            f"{self.path}: {' and '.join(said)} in {self.windows} windows of {self.seq_len} "
            f"tokens, {self.targets} targets; {', '.join(lost) or 'nothing cut or dropped'}"
        )


def read_windows(
    path: str | Path, tokenizer: Tokenizer, *, seq_len: int, responses_only: bool = False
) -> tuple[Batch, DataReport]:
    """Windows of a JSON-lines file, and a report of what was cut or dropped, which is also printed.

    Texts are packed one behind the other, each closed by the tokenizer's first end id. A
    conversation has a row of its own, cut at `seq_len` and padded. With `responses_only` only the
    assistant's tokens are targets.

    Raises ValueError with file, line and what was expected for a line that cannot be read.
    """
    check_seq_len(seq_len)
    path = Path(path)
    texts, rows = [], []
    count = {"texts": 0, "conversations": 0, "truncated": 0, "dropped": 0}
    for where, entry in _entries(path):
        if "text" in entry:
            if responses_only:
                raise ValueError(
                    f"{where}: 'text' has no responses, so responses_only cannot be met. Give "
                    "'messages', or leave responses_only off."
                )
            count["texts"] += 1
            ids = tokenizer.encode(entry["text"])
            count["dropped"] += not ids
            texts += [ids] if ids else []
            continue
        count["conversations"] += 1
        ids, is_target = _conversation(where, entry["messages"], tokenizer, responses_only)
        # The first token of a row is never a target.
        if not any(is_target[1:seq_len]):
            count["dropped"] += 1
            continue
        count["truncated"] += len(ids) > seq_len
        rows.append((ids[:seq_len], is_target[:seq_len]))
    if not count["texts"] + count["conversations"]:
        raise ValueError(f"{path} is empty: it has no line that is not blank; {EXPECTED}")
    end = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    parts = [pack(texts, seq_len=seq_len, separator=end)] if texts else []
    parts += [_padded(rows, seq_len)] if rows else []
    if not parts:
        raise ValueError(
            f"{path}: no target is left of {count['texts']} texts and {count['conversations']} "
            f"conversations ({count['dropped']} dropped). With long prompts raise seq_len (here "
            f"{seq_len}); with responses_only some message needs the role 'assistant'."
        )
    windows = concatenate(parts)
    targets = int((windows.weights > 0).sum())
    report = DataReport(
        path=str(path), seq_len=seq_len, windows=windows.num_rows, targets=targets, **count
    )
    print(report, flush=True)
    return windows, report


def _entries(path: Path):
    """(file:line, object) of every line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig").strip()
                entry = json.loads(text) if text else None
                # JSON can spell half a character ("\ud83d"), which no tokenizer takes.
                json.dumps(entry, ensure_ascii=False).encode("utf-8")
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
                if number == 1 and line.lstrip().startswith(b"["):
                    raise ValueError(
                        f"{where}: the file is a JSON array; {_ARRAY}; {EXPECTED}"
                    ) from error
                said = str(error)
                if isinstance(error, json.JSONDecodeError):  # it takes the line for the whole file
                    said = f"{error.msg} at column {error.colno} of {one_line(text, limit=100)!r}"
                raise ValueError(f"{where}: {said}; {EXPECTED}") from error
            if entry is not None or text:
                _check(where, entry)
                yield where, entry


def _check(where: str, entry: Any) -> None:
    problem = None
    if not isinstance(entry, dict):
        problem = f"found {json.dumps(entry)[:60]}"
        if isinstance(entry, list):
            problem = f"the line is a JSON array; {_ARRAY}"
    elif "text" in entry and "messages" in entry:
        problem = "the line has 'text' and 'messages' too: keep one of them"
    elif "text" not in entry and "messages" not in entry:
        problem = f"the line has neither 'text' nor 'messages' (its keys: {sorted(entry)})"
    elif "text" in entry:
        if not isinstance(entry["text"], str):
            problem = f"'text' is {entry['text']!r:.60}, no string"
    elif not isinstance(entry["messages"], list) or not entry["messages"]:
        problem = f"'messages' is {entry['messages']!r:.60}, no list with messages in it"
    else:
        for index, message in enumerate(entry["messages"]):
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                problem = f"messages[{index}] is {message!r:.60}, without a text role and content"
            elif message["role"] not in ROLES:
                problem = (
                    f"messages[{index}] has the role {message['role']!r:.60}, which is none of "
                    f"{', '.join(ROLES)}"
                )
            if problem is not None:
                break
    if problem is not None:
        raise ValueError(f"{where}: {problem}; {EXPECTED}")


def _conversation(
    where: str, messages: list[dict], tokenizer: Tokenizer, responses_only: bool
) -> tuple[list[int], list[bool]]:
    try:
        if responses_only:
            return tokenizer.render_chat_with_mask(messages)
        ids = tokenizer.apply_chat_template(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return ids, [True] * len(ids)


def _padded(rows: list[tuple[list[int], list[bool]]], seq_len: int) -> Batch:
    tokens = np.zeros((len(rows), seq_len), np.int32)
    mask, is_target = np.zeros((2, len(rows), seq_len), bool)
    for index, (ids, targets) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        mask[index, : len(ids)] = True
        is_target[index, : len(ids)] = targets
    return make_batch(tokens, mask, is_target)
