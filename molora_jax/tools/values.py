"""What the tools' options take beyond text: each reads a word or says what was expected."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

MAX_SEED = 2**32 - 1


def whole(text: str) -> int:
    """At least 1."""
    return checked(text, int, lambda value: value >= 1, "a whole number of at least 1")


def features(text: str) -> int | None:
    """None is all channels."""
    return None if text == "all" else checked(text, int, lambda m: m >= 1, "a number or 'all'")


def port(text: str) -> int:
    """0 is any that is free."""
    return checked(text, int, lambda port: 0 <= port < 2**16, "a port from 0 to 65535")


def seconds(text: str) -> float:
    """Up to an hour."""
    return checked(text, float, lambda value: 0 <= value <= 3600, "seconds, 0 to 3600")


def size(text: str) -> int:
    """Bytes, of a number with or without a unit."""

    def read(text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
        if match is None:
            raise ValueError
        power = " KMGT".index(match[2].upper() or " ")
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)

    return checked(text, read, lambda size: size > 0, "a size in bytes, as in 2GiB or 500MB")


def not_empty(text: str) -> str:
    """A text of a letter or more."""
    return checked(text, str, bool, "a text")


def seed(text: str) -> int:
    """What jax.random and numpy take alike."""
    return checked(text, int, lambda seed: 0 <= seed <= MAX_SEED, f"a seed from 0 to {MAX_SEED}")


def checked(text: str, read: Callable, fits: Callable[[Any], bool], expected: str) -> Any:
    """What `read` makes of the text; argparse.ArgumentTypeError unless that `fits`."""
    try:
        value = read(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return value


def weights(text: str) -> dict[str, float]:
    """{name: number} of name=number pairs."""
    expected = "name=number pairs with commas between, each name once, as in a=0.7,b=0.3"
    found: dict[str, float] = {}
    for item in text.split(","):
        name, equals, number = item.rpartition("=")
        name = name.strip()
        if not equals or not name or name in found:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        fits = "a finite number that is not 0"
        found[name] = checked(number, float, lambda x: math.isfinite(x) and x != 0, fits)
    return found


def names(text: str) -> list[str]:
    """Of names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]
