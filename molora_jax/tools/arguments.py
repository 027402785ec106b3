"""The command lines of all verbs. Imports nothing heavy, so that --help answers at once."""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_SEED = 2**32 - 1  # what jax.random and numpy take alike
DTYPES = ("float32", "bfloat16", "float16")
_BASE = (
    "base model: a folder in Hugging Face's layout, a .gguf file, org/name, smollm2-135m, or "
    "tiny-random (random weights, offline)"
)


class Misuse(ValueError):
    """What the caller got wrong, in words; ends with exit code 2."""


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake and the nearest known name."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w.-]+", choice[2])
            message = f"unknown {choice[1]!r} (known: {', '.join(known)}){hint(choice[1], known)}"
        raise Misuse(f"{message} (see --help)")

    def refuse_unknown(self, argv: Sequence[str]) -> None:
        """A misspelt option, before argparse finds something else missing for want of it."""
        known = [option for action in self._actions for option in action.option_strings]
        for name in (item.split("=")[0] for item in argv if item.startswith("--") and item != "--"):
            if name not in known:
                self.error(f"unknown option {name}{hint(name, known)}")


def parse(argv: Sequence[str], *, prog: str = "python -m molora_jax.tools") -> argparse.Namespace:
    """A verb's arguments, `verb` and `prog` among them.

    Raises Misuse; --help prints and leaves with 0.
    """
    parser = Parser(prog=prog, description="Tools for adapter folders and models.")
    parser.set_defaults(prog=prog)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    parsers = {}
    for name, add in _ADD.items():
        summary = str(add.__doc__)
        parsers[name] = verbs.add_parser(name, help=summary, description=summary)
        add(parsers[name])
    if argv and argv[0] in parsers:
        parsers[argv[0]].refuse_unknown(argv[1:])
    return parser.parse_args(list(argv))


def _inspect(parser: argparse.ArgumentParser) -> None:
    """What an adapter, composition or checkpoint holds, and whether it would load (exit code 0)."""
    parser.add_argument("path", help="its folder, or org/name of an adapter in the hub's cache")
    parser.add_argument("--base", metavar="NAME", help=f"compare with a {_BASE}")
    _json(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    """A training checkpoint into a PEFT folder, or back, or a PEFT folder into a smaller one."""
    parser.add_argument("source", metavar="SRC", help="PEFT folder, or checkpoint or run folder")
    parser.add_argument("out", metavar="DST", help="folder to write")
    parser.add_argument(
        "--to",
        choices=("peft", "checkpoint"),
        help="default: the other kind; a PEFT folder stays one with --max_rank or --dtype",
    )
    parser.add_argument("--max_rank", type=_whole, metavar="R", help="truncate every module by SVD")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors in a PEFT folder")
    parser.add_argument("--name", help="the adapter's name; default: its own, or that of DST")
    _overwrite(parser)


def _merge(parser: argparse.ArgumentParser) -> None:
    """Adapters into one adapter, or with --base into a plain model folder."""
    parser.add_argument("adapters", nargs="+", metavar="[NAME=]ADAPTER", help="PEFT folders")
    parser.add_argument("--weights", type=_weights, default={}, metavar="a=0.7,b=0.3",
                        help="by the adapters' names; 1 where none is given")  # fmt: skip
    parser.add_argument("--base", metavar="NAME", help=_BASE)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--rank", type=_whole, metavar="R", help="without --base: truncate to R")
    parser.add_argument("--dtype", choices=DTYPES, help="of the model written (float32)")
    _overwrite(parser)


def _statistics(parser: argparse.ArgumentParser) -> None:
    """What a router must know of an adapter's data, summed and left beside the adapter."""
    parser.add_argument("adapter", help="PEFT folder; the file is written into it")
    parser.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    parser.add_argument("--data", required=True, metavar="FILE",
                        help="its own data, JSON lines with text or messages; of "
                        "these the questions count too: the router has to know them")  # fmt: skip
    parser.add_argument("--features", type=_features, default=256, metavar="M",
                        help="of a layer, or 'all' channels (%(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=_whole, default=64, help="windows read (%(default)s)")
    parser.add_argument("--seq_len", type=_whole, default=128, metavar="S",
                        help="tokens of a window (%(default)s)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace those that are there")


def _compose(parser: argparse.ArgumentParser) -> None:
    """Adapters trained apart and a router that nobody trains, as a composition to load or serve."""
    parser.add_argument("adapters", nargs="*", metavar="[NAME=]ADAPTER", help="PEFT folders")
    parser.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--add_to", metavar="DIR", help="a composition, whose adapters come first")
    parser.add_argument("--without", nargs="+", action="extend", default=[], metavar="NAME",
                        help="of the composition's adapters")  # fmt: skip
    parser.add_argument("--router", choices=("statistics", "arrow"),
                        help="made of the statistics beside each adapter (the default), or of the "
                        "weights alone")  # fmt: skip
    parser.add_argument("--top_k", type=_whole,
                        help="adapters a token; default: the composition's, or 1")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES,
                        help="of the bank; default: the composition's, or float32")  # fmt: skip
    _overwrite(parser)


def _probe(parser: argparse.ArgumentParser) -> None:
    """Whether an adapter changes a base's logits, where and how much; exit code 1 if not at all."""
    parser.add_argument("adapter", help="PEFT folder")
    parser.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    _text(parser, "--text", "text to read (default: a few lines of prose, code and arithmetic)")
    parser.add_argument("--top", type=_whole, default=8, help="positions to list (%(default)s)")
    _json(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    """Answers of the base, of each adapter and of a routed composition, one after another."""
    parser.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    parser.add_argument("--adapter", nargs="+", action="extend", default=[],
                        metavar="[NAME=]PATH", help="PEFT folders")  # fmt: skip
    parser.add_argument("--composition", metavar="DIR", help="a folder that Composition.save wrote")
    _mesh(parser)
    parser.add_argument("--only", type=_names, metavar="base,NAME,routed", help="of these arms")
    _text(parser, "--prompt", "what to continue", required=True)
    parser.add_argument("--chat", action="store_true", help="as a user's turn, by the template")
    parser.add_argument("--max_tokens", type=_whole, default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, the default")
    parser.add_argument("--top_p", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--top_k", type=int, default=0, help="0 is all tokens, the default")
    parser.add_argument("--seed", type=_seed, default=0, help="of sampling (%(default)s)")
    parser.add_argument("--stop", nargs="+", type=_not_empty, action="extend", default=[],
                        metavar="TEXT", help="end an answer before one of these")  # fmt: skip
    _json(parser)


def _serve(parser: argparse.ArgumentParser) -> None:
    """A base, its adapters and routing profiles over HTTP, as OpenAI's clients ask for them."""
    parser.add_argument("--model", required=True, metavar="NAME", help=_BASE)
    parser.add_argument(
        "--served_model_name",
        metavar="NAME",
        help="what clients call the base; default: its name, or its folder's",
    )
    _mesh(parser)
    parser.add_argument(
        "--adapters",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help='PEFT folders; also {"name": …, "path": …} in JSON',
    )
    parser.add_argument(
        "--composition",
        metavar="DIR",
        help="a folder that Composition.save wrote: its adapters, and its learned "
        "router as a profile",
    )
    parser.add_argument(
        "--composition_name",
        default="molora",
        metavar="NAME",
        help="what clients call that profile (%(default)s)",
    )
    parser.add_argument(
        "--vocab_routing",
        metavar="FILE",
        type=Path,
        help="token ids to adapters, as the profile vocab (see docs/serving.md)",
    )
    parser.add_argument(
        "--control_tokens",
        metavar="FILE",
        type=Path,
        help="tokens that switch adapters on, as the profile control",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0 is a free one (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the base and the adapters (%(default)s)",
    )
    parser.add_argument(
        "--rows", type=_whole, default=8, help="answers decoded together (%(default)s)"
    )
    parser.add_argument(
        "--context",
        type=_whole,
        metavar="T",
        help="tokens of a prompt and its answer together (1024, or the model's)",
    )
    parser.add_argument(
        "--max_loras",
        type=_whole,
        metavar="K",
        help="slots of the adapter bank (8, or as many as a profile needs)",
    )
    parser.add_argument(
        "--memory_budget",
        type=_size,
        metavar="BYTES",
        help="instead of --max_loras: as many slots as fit, e.g. 2GiB",
    )
    parser.add_argument(
        "--max_lora_rank",
        type=_whole,
        metavar="R",
        help="of the slots (16, or the largest of the adapters given)",
    )
    parser.add_argument(
        "--max_cpu_loras",
        type=_whole,
        default=64,
        metavar="N",
        help="adapters kept ready on the host (%(default)s)",
    )
    parser.add_argument(
        "--max_waiting",
        type=_whole,
        default=256,
        metavar="N",
        help="answers that may wait for a row; more get 429 (%(default)s)",
    )
    parser.add_argument(
        "--pack",
        type=_whole,
        metavar="N",
        help="prompts read together at most (all that fit); with 1 an answer does not depend on "
        "its neighbours to the last bit, otherwise up to rounding",
    )
    parser.add_argument(
        "--allow_runtime_lora_updates",
        action="store_true",
        help="clients may load and unload adapters, from --adapter_root alone",
    )
    parser.add_argument(
        "--adapter_root",
        metavar="DIR",
        type=Path,
        help="the folder that clients may load adapters from",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="for answers under way when the server is told to stop (%(default)s)",
    )


def _mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", default="", metavar="AXES",
        help="devices along data, fsdp, tensor and slots, as data=2,tensor=4; default: one device",
    )  # fmt: skip


def _text(
    parser: argparse.ArgumentParser, option: str, text: str, *, required: bool = False
) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument(option, metavar="TEXT", help=text)
    group.add_argument("--prompt_file", metavar="FILE", type=Path, help="the same, from a file")


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it is ours")


def named_paths(items: Sequence[str]) -> dict[str, str]:
    """{name: path} of `NAME=PATH` or `PATH`, whose name is its last folder's. Raises Misuse."""
    found: dict[str, str] = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not equals or Path(item).exists():
            name, path = Path(item).expanduser().resolve().name.split("@")[0], item
        if not name or not path:
            raise Misuse(f"{item!r}: expected NAME=PATH or PATH")
        if name in found:
            raise Misuse(
                f"two adapters are called {name!r} ({found[name]} and {path}): write NAME=PATH"
            )
        found[name] = path
    return found


def _whole(text: str) -> int:
    return _checked(text, int, lambda value: value >= 1, "a whole number of at least 1")


def _features(text: str) -> int | None:
    """None is all channels."""
    return None if text == "all" else _checked(text, int, lambda m: m >= 1, "a number or 'all'")


def _port(text: str) -> int:
    return _checked(text, int, lambda port: 0 <= port < 2**16, "a port from 0 to 65535")


def _seconds(text: str) -> float:
    return _checked(text, float, lambda value: 0 <= value <= 3600, "seconds, 0 to 3600")


def _size(text: str) -> int:
    """Bytes, of a number with or without a unit."""

    def read(text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
        if match is None:
            raise ValueError
        power = " KMGT".index(match[2].upper() or " ")
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)

    return _checked(text, read, lambda size: size > 0, "a size in bytes, as in 2GiB or 500MB")


def _not_empty(text: str) -> str:
    return _checked(text, str, bool, "a text")


def _seed(text: str) -> int:
    return _checked(text, int, lambda seed: 0 <= seed <= MAX_SEED, f"a seed from 0 to {MAX_SEED}")


def _checked(text: str, read: Callable, fits: Callable[[Any], bool], expected: str) -> Any:
    try:
        value = read(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return value


def _weights(text: str) -> dict[str, float]:
    expected = "name=number pairs with commas between, each name once, as in a=0.7,b=0.3"
    found: dict[str, float] = {}
    for item in text.split(","):
        name, equals, number = item.rpartition("=")
        name = name.strip()
        if not equals or not name or name in found:
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
        fits = "a finite number that is not 0"
        found[name] = _checked(number, float, lambda x: math.isfinite(x) and x != 0, fits)
    return found


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_ADD = {
    add.__name__.strip("_"): add
    for add in (
        _inspect,
        _convert,
        _merge,
        _statistics,
        _compose,
        _probe,
        _generate,
        _serve,
    )
}
VERBS = tuple(_ADD)
