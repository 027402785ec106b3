"""The command lines of all verbs. Imports nothing heavy, so that --help answers at once."""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from molora_jax.tools import values

DTYPES = ("float32", "bfloat16", "float16")
_BASE = (
    "base model: a folder in Hugging Face's layout, a .gguf file, org/name, smollm2-135m, or "
    "tiny-random (random weights, offline)"
)


class Misuse(ValueError):
    """What the caller got wrong, in words; ends with exit code 2."""


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a known name is near."""
    known = list(known)
    longer = [each for each in known if len(name) > 3 and each.startswith(name)]
    near = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Every default is shown, once; an example stays as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        hidden = action.default in (None, "", argparse.SUPPRESS, [], {}) or action.nargs == 0
        return text if hidden or "default" in text else f"{text}; default: %(default)s"


_Group = argparse._ActionsContainer


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake and the nearest known name."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=_Help, **settings)

    def groups(self, example: str) -> tuple[_Group, _Group, _Group]:
        """The options of a verb: what it reads, where to it writes, how; and an example below."""
        self.epilog = f"example:\n  {example.format(prog=self.prog)}"
        what, where, how = map(self.add_argument_group, ("what", "where to", "how"))
        return what, where, how

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w.-]+", choice[2])
            message = f"unknown {choice[1]!r} (known: {', '.join(known)}){hint(choice[1], known)}"
        raise Misuse(f"{message} (see --help)")

    def options(self) -> list[str]:
        """All that it takes: --help, --base, ..."""
        every = [option for action in self._actions for option in action.option_strings]
        return [option for option in every if option.startswith("--")]

    def refuse_unknown(self, argv: Sequence[str]) -> None:
        """A misspelt option, before argparse finds something else missing for want of it."""
        known = self.options()
        for name in (item.split("=")[0] for item in argv if item.startswith("--") and item != "--"):
            if name not in known:
                self.error(f"unknown option {name}{hint(name, known)}")


def parse(argv: Sequence[str], *, prog: str = "python -m molora_jax.tools") -> argparse.Namespace:
    """A verb's arguments, `verb` and `prog` among them.

    Raises Misuse; --help prints and leaves with 0.
    """
    parser, of_verb = _parsers(prog)
    if argv and argv[0] in of_verb:
        of_verb[argv[0]].refuse_unknown(argv[1:])
    return _expanded(parser.parse_args(list(argv)))


def options() -> dict[str, list[str]]:
    """{verb: its options}, for a shell to complete."""
    return {verb: parser.options() for verb, parser in _parsers("molora")[1].items()}


def _parsers(prog: str) -> tuple[Parser, dict[str, Parser]]:
    """The parser of all verbs, and that of each."""
    parser = Parser(prog=prog, description="Tools for adapter folders and models.")
    parser.set_defaults(prog=prog)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    of_verb = {}
    for name, add in _ADD.items():
        summary = str(add.__doc__)
        of_verb[name] = verbs.add_parser(name, help=summary, description=summary)
        add(of_verb[name])
    return parser, of_verb


def _expanded(args: argparse.Namespace) -> argparse.Namespace:
    """With ~ as the home folder where it begins a path: a shell leaves --out=~/x as it is."""

    def expand(value: Any) -> Any:
        if isinstance(value, list):
            return [expand(each) for each in value]
        if isinstance(value, Path):
            return value.expanduser()
        if isinstance(value, str) and (match := re.match(r"(?:[\w.:-]+=)?(?=~)", value)):
            return match[0] + os.path.expanduser(value[match.end() :])
        return value

    for name, value in vars(args).items():
        if name not in ("prompt", "text", "stop"):
            setattr(args, name, expand(value))
    return args


def _inspect(parser: Parser) -> None:
    """What an adapter, composition or checkpoint holds; exit code 1 if it would not load."""
    what, _, how = parser.groups("{prog} out/code --base smollm2-135m")
    what.add_argument("path", help="its folder, or org/name of an adapter in the hub's cache")
    what.add_argument("--base", metavar="NAME", help=f"compare with a {_BASE}")
    _json(how)


def _convert(parser: Parser) -> None:
    """A training checkpoint into a PEFT folder, or back, or a PEFT folder into a smaller one."""
    what, where, how = parser.groups("{prog} out/code out/small --max_rank 4")
    what.add_argument("source", metavar="SRC", help="PEFT folder, or checkpoint or run folder")
    where.add_argument("out", metavar="DST", help="folder to write")
    _overwrite(where)
    how.add_argument(
        "--to",
        choices=("peft", "checkpoint"),
        help="default: the other kind; a PEFT folder stays one with --max_rank or --dtype",
    )
    how.add_argument("--max_rank", type=values.whole, metavar="R",
                     help="truncate every module by SVD")  # fmt: skip
    how.add_argument("--dtype", choices=DTYPES,
                     help="of the tensors in a PEFT folder; default: as they are")  # fmt: skip
    how.add_argument("--name", help="the adapter's name; default: its own, or that of DST")


def _merge(parser: Parser) -> None:
    """Adapters into one adapter, or with --base into a plain model folder."""
    what, where, how = parser.groups(
        "{prog} out/code out/math --weights code=0.7,math=0.3 --out out/both"
    )
    what.add_argument("adapters", nargs="+", metavar="[NAME=]ADAPTER", help="PEFT folders")
    what.add_argument("--base", metavar="NAME", help=_BASE)
    where.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    _overwrite(where)
    how.add_argument("--weights", type=values.weights, default={}, metavar="a=0.7,b=0.3",
                     help="by the adapters' names; 1 where none is given")  # fmt: skip
    how.add_argument("--rank", type=values.whole, metavar="R",
                     help="without --base: truncate to R; default: exact")  # fmt: skip
    how.add_argument("--dtype", choices=DTYPES, help="of the model written; default: float32")


def _statistics(parser: Parser) -> None:
    """What a router must know of an adapter's data, summed and left beside the adapter."""
    what, where, how = parser.groups("{prog} out/code --base smollm2-135m --data code.jsonl")
    what.add_argument("adapter", help="PEFT folder")
    what.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    what.add_argument("--data", required=True, metavar="FILE",
                      help="its own data, JSON lines with text or messages; of "
                      "these the questions count too: the router has to know them")  # fmt: skip
    where.add_argument("--out", metavar="DIR", help="write a copy of the adapter's folder there, "
                       "statistics and all; default: into the folder itself")  # fmt: skip
    where.add_argument("--overwrite", action="store_true", help="replace those that are there")
    how.add_argument("--features", type=values.features, default=256, metavar="M",
                     help="of a layer, or 'all' channels")  # fmt: skip
    how.add_argument(
        "--rows", type=values.whole, default=64, metavar="N", help="windows read, at most"
    )
    how.add_argument("--seq_len", type=values.whole, default=128, metavar="S",
                     help="tokens of a window")  # fmt: skip


def _compose(parser: Parser) -> None:
    """Adapters trained apart and a router that nobody trains, as a composition to load or serve."""
    what, where, how = parser.groups(
        "{prog} out/code out/math --base smollm2-135m --out out/two \\\n"
        "    --check code=code_heldout.jsonl math=math_heldout.jsonl"
    )
    what.add_argument("adapters", nargs="*", metavar="[NAME=]ADAPTER", help="PEFT folders")
    what.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    what.add_argument("--add_to", metavar="DIR", help="a composition, whose adapters come first")
    what.add_argument("--without", nargs="+", action="extend", default=[], metavar="NAME",
                      help="of the composition's adapters")  # fmt: skip
    where.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    _overwrite(where)
    how.add_argument("--router", choices=("statistics", "arrow"),
                     help="made of the statistics beside each adapter, or of the weights alone; "
                     "default: as that of --add_to was, or statistics")  # fmt: skip
    how.add_argument("--top_k", type=values.whole, metavar="k",
                     help="adapters a token; default: the composition's, or 1")  # fmt: skip
    how.add_argument("--dtype", choices=DTYPES,
                     help="of the bank; default: the composition's, or float32")  # fmt: skip
    how.add_argument("--check", nargs="+", action="extend", default=[], metavar="NAME=FILE",
                     help="then measure how many tokens of these texts go to the adapter they are "
                     "of: JSON lines with text or messages, best held-out ones")  # fmt: skip


def _probe(parser: Parser) -> None:
    """Whether an adapter changes a base's logits, where and how much; exit code 1 if not at all."""
    what, _, how = parser.groups("{prog} out/code --base smollm2-135m")
    what.add_argument("adapter", help="PEFT folder")
    what.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    _text(what, "--text", "text to read; default: a few lines of prose, code and arithmetic")
    how.add_argument("--top", type=values.whole, default=8, metavar="N", help="positions to list")
    _json(how)


def _generate(parser: Parser) -> None:
    """Answers of the base, of each adapter and of a routed composition, one after another."""
    what, _, how = parser.groups(
        '{prog} --base smollm2-135m --composition out/two --prompt "def add_3(x):"'
    )
    what.add_argument("--base", required=True, metavar="NAME", help=_BASE)
    what.add_argument("--adapter", nargs="+", action="extend", default=[],
                      metavar="[NAME=]PATH", help="PEFT folders")  # fmt: skip
    what.add_argument("--composition", metavar="DIR", help="a folder that `compose` wrote")
    what.add_argument("--only", type=values.names, metavar="base,NAME,routed",
                      help="of these answers; default: all")  # fmt: skip
    _text(what, "--prompt", "what to continue", required=True)
    what.add_argument("--chat", action="store_true",
                      help="the prompt is a user's turn, in the base's chat template")  # fmt: skip
    how.add_argument(
        "--max_tokens", type=values.whole, default=64, metavar="N", help="of an answer"
    )
    how.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    how.add_argument(
        "--top_p", type=float, default=1.0, metavar="P", help="share kept of the likeliest"
    )
    how.add_argument("--top_k", type=int, default=0, metavar="K", help="tokens kept; 0 is all")
    how.add_argument("--seed", type=values.seed, default=0, metavar="N", help="of sampling")
    how.add_argument("--stop", nargs="+", type=values.not_empty, action="extend", default=[],
                     metavar="TEXT", help="end an answer before one of these")  # fmt: skip
    _mesh(how)
    _json(how)


def _serve(parser: Parser) -> None:
    """A base, its adapters and routing profiles over HTTP, as OpenAI's clients ask for them."""
    what, where, how = parser.groups("{prog} --model smollm2-135m --composition out/two")
    what.add_argument("--model", "--base", required=True, metavar="NAME", help=_BASE)
    what.add_argument(
        "--served_model_name",
        metavar="NAME",
        help="what clients call the base; default: its name, or its folder's",
    )
    _mesh(how)
    what.add_argument(
        "--adapters",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help='PEFT folders; also {"name": …, "path": …} in JSON',
    )
    what.add_argument(
        "--composition",
        metavar="DIR",
        help="a folder that Composition.save wrote: its adapters, and its learned "
        "router as a profile",
    )
    what.add_argument(
        "--composition_name",
        default="molora",
        metavar="NAME",
        help="what clients call that profile",
    )
    what.add_argument(
        "--vocab_routing",
        metavar="FILE",
        type=Path,
        help="token ids to adapters, as the profile vocab (see docs/serving.md)",
    )
    what.add_argument(
        "--control_tokens",
        metavar="FILE",
        type=Path,
        help="tokens that switch adapters on, as the profile control",
    )
    where.add_argument("--host", default="127.0.0.1", help="address to listen on")
    where.add_argument("--port", type=values.port, default=8000, help="0 is a free one")
    how.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the base and the adapters",
    )
    how.add_argument("--rows", type=values.whole, default=8, help="answers decoded together")
    how.add_argument(
        "--context",
        type=values.whole,
        metavar="T",
        help="tokens of a prompt and its answer together; default: 1024, or the model's",
    )
    how.add_argument(
        "--max_loras",
        type=values.whole,
        metavar="K",
        help="slots of the adapter bank; default: 8, or as many as a profile needs",
    )
    how.add_argument(
        "--memory_budget",
        type=values.size,
        metavar="BYTES",
        help="instead of --max_loras: as many slots as fit, e.g. 2GiB",
    )
    how.add_argument(
        "--max_lora_rank",
        type=values.whole,
        metavar="R",
        help="of the slots; default: 16, or the largest of the adapters given",
    )
    how.add_argument(
        "--max_cpu_loras",
        type=values.whole,
        default=64,
        metavar="N",
        help="adapters kept ready on the host",
    )
    how.add_argument(
        "--max_waiting",
        type=values.whole,
        default=256,
        metavar="N",
        help="answers that may wait for a row; more get 429",
    )
    how.add_argument(
        "--pack",
        type=values.whole,
        metavar="N",
        help="prompts read together at most; default: all that fit. With 1 an answer does not "
        "depend on its neighbours to the last bit, otherwise up to rounding",
    )
    how.add_argument(
        "--allow_runtime_lora_updates",
        action="store_true",
        help="clients may load and unload adapters, from --adapter_root alone",
    )
    how.add_argument(
        "--adapter_root",
        metavar="DIR",
        type=Path,
        help="the folder that clients may load adapters from",
    )
    how.add_argument(
        "--grace",
        type=values.seconds,
        default=10.0,
        metavar="SECONDS",
        help="for answers under way when the server is told to stop",
    )


def _mesh(parser: _Group) -> None:
    parser.add_argument(
        "--mesh", default="", metavar="AXES",
        help="devices along data, fsdp, tensor and slots, as data=2,tensor=4; default: one device",
    )  # fmt: skip


def _text(parser: _Group, option: str, text: str, *, required: bool = False) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument(option, metavar="TEXT", help=text)
    group.add_argument(
        "--prompt_file",
        metavar="FILE",
        type=Path,
        help="the same, from a file, without the line break at its end",
    )


def _json(parser: _Group) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _overwrite(parser: _Group) -> None:
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
