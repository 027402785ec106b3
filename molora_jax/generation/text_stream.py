"""Tokens to text one by one: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from molora_jax.models.tokenizer import Tokenizer


class TextStream:
    """The text of a growing answer, in the parts that may be shown already.

    A character whose bytes are spread over tokens comes with its last one. Text that may be the
    beginning of a stop string is held back until it is not; a stop string ends the text before it.
    Special tokens are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()):
        if any(not isinstance(each, str) or not each for each in stop):
            raise ValueError(f"stop {list(stop)!r}: expected texts that are not empty")
        self.stopped = False  # a stop string was met
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._decoded = 0  # characters that the stream has given
        self._held = ""

    def push(self, token: int) -> str:
        """What may be shown after one more token."""
        self._tokens.append(token)
        text = self._stream.step(self._tokenizer.backend, token) or ""
        self._decoded += len(text)
        return self._release(text)

    def finish(self) -> str:
        """The rest, where no more tokens come: what was held back, and broken characters."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        text = self._release(whole[self._decoded :])
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for each in self._stop if (at := text.find(each)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of `text` that begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
