"""The fields of a JSON body, read one by one; what nobody reads is refused and never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from molora_jax.adapters.names import brief, nearest
from molora_jax.serving.errors import refused

ANYTHING = object()  # in a table of neutral values: the field changes no result, whatever it says


class Fields:
    """A body's fields. Null is the same as absent, as OpenAI's clients send it."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise refused(f"the body is {brief(body)}; expected a JSON object")
        self._left = dict(body)
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """Its value as it stands, None where it is absent."""
        self._known.add(name)
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        """A text that must be there."""
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise _wrong(name, value, "a text")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def whole(self, name: str, *, least: int, most: int | None = None) -> int | None:
        """A whole number, or None where it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        fits = type(value) is int and value >= least and (most is None or value <= most)
        if not fits:
            upper = "or more" if most is None else f"to {most}"
            raise _wrong(name, value, f"a whole number, {least} {upper}")
        return value

    def number(self, name: str, *, default: float, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, value, "a number")
        if not least <= value <= most:
            raise _wrong(name, value, f"{least:g} to {most:g}")
        return float(value)

    def texts(self, name: str, *, most: int, longest: int) -> list[str] | None:
        """A text or a list of texts, none of them empty; None where it is absent."""
        value = self.take(name)
        if value is None:
            return None
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or any(
            not isinstance(each, str) or not 0 < len(each) <= longest for each in found
        ):
            raise _wrong(name, value, f"a text or a list of texts of 1 to {longest} characters")
        if len(found) > most:
            raise _wrong(name, value, f"at most {most} texts, not {len(found)}")
        return found

    def finish(self, neutral: Mapping[str, Any]) -> None:
        """Refuses every field that was not read, unless it has the neutral value of the table.

        neutral  {field that is not supported: the values (a tuple) with which it changes nothing}
        """
        for name, value in self._left.items():
            if name not in neutral:
                near = nearest(name, [*self._known, *neutral])
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise refused(f"unknown field {brief(name)}{hint}", param=name[:80])
            allowed = neutral[name]
            if value is None or allowed is ANYTHING or _among(value, allowed):
                continue
            values = " or ".join(["null", *(brief(each) for each in allowed)])
            raise refused(
                f"{name} is not supported: only {values} is taken, which changes nothing, and not "
                f"{brief(value)}",
                param=name,
                code="unsupported_parameter",
            )


def _among(value: Any, allowed: Sequence[Any]) -> bool:
    """Equal and of one kind: 1 is not true, but it is 1.0."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    )


def _wrong(name: str, value: Any, expected: str) -> Exception:
    found = "missing" if value is None else brief(value)
    return refused(f"{name} is {found}; expected {expected}", param=name)
