"""`python -m molora_jax.parallel --plan`: what a step would take on H200s that are not here.

0 done, 2 misused.
"""

import argparse
import json
import logging
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from molora_jax.display.terminal import fail, show
from molora_jax.ending import leave
from molora_jax.tools.arguments import Misuse, Parser, hint

COUNTS = (1, 8, 64, 512)
MOST = 65536  # devices; meshes of more would take minutes to go through
# By kind: rows for each device, and the rest of a step, where the command line does not say.
ROWS = {"decode": 32, "train": 4}
DEFAULTS = {
    "decode": {"length": 4096, "num_adapters": 64, "rank": 16, "top_k": 2},
    "train": {"length": 2048, "num_adapters": 8, "rank": 16, "top_k": 8},
}


MODULE = "python -m molora_jax.parallel"


def main(argv: Sequence[str] | None = None, *, prog: str = MODULE) -> int:
    """Prints a plan, or a table of plans, and returns the exit code. `prog` is what was typed."""
    try:
        options = _parse(sys.argv[1:] if argv is None else argv, prog)
        # Shapes are all that is looked at; JAX is asked for nothing else.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        logging.getLogger("jax").setLevel(logging.ERROR)
        parts = _run(options)
    except (Misuse, ValueError, OSError, NotImplementedError) as error:
        fail(prog, " ".join(str(error).split()))
        return 2
    show(*parts)
    return 0


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(
        prog=prog,
        description="Memory, time and traffic of a step on H200s, by count; no device is used. "
        "One model, number of devices and step are explained in full, more as a table.",
    )
    said = "what is printed" if prog == MODULE else argparse.SUPPRESS
    parser.add_argument("--plan", action="store_true", required=True, help=said)
    parser.add_argument("--model", nargs="+", metavar="NAME", help="qwen3-1.7b, -4b, -8b, -32b, or "
                        "a config.json; default: the four")  # fmt: skip
    parser.add_argument("--devices", nargs="+", type=int, metavar="N", default=None,
                        help=f"default: {' '.join(map(str, COUNTS))}")  # fmt: skip
    parser.add_argument("--kind", choices=("decode", "train"), help="default: both")
    rows = f"{ROWS['decode']} a device in decoding, {ROWS['train']} in training"
    parser.add_argument("--batch", type=int, metavar="B", help=f"rows of all; default: {rows}")
    parser.add_argument("--length", type=int, metavar="T", help="slots of cache a row, in "
                        "training tokens of a row; default: 4096 and 2048")  # fmt: skip
    parser.add_argument("--num_adapters", type=int, metavar="K", help="default: 64 and 8")
    parser.add_argument("--rank", type=int, metavar="R", help="default: 16")
    parser.add_argument("--top_k", type=int, metavar="k",
                        help="default: 2, and in training all (the dense mixture)")  # fmt: skip
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="this mesh and no other, as "
                        "data=2,fsdp=2,tensor=2")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="also compile the step for such a "
                        "mesh and compare; minutes, and the extra 'deviceless'")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.refuse_unknown(argv)
    return parser.parse_args(list(argv))


def _run(options: argparse.Namespace) -> list[Any]:
    """What is printed: texts and tables."""
    from molora_jax.models.qwen3 import QWEN3
    from molora_jax.parallel.mesh import parse_mesh
    from molora_jax.parallel.plan import Choice, choose, plan, text
    from molora_jax.parallel.rules import AXES

    sizes = None
    if options.mesh is not None:
        sizes = dict.fromkeys(AXES, 1) | parse_mesh(options.mesh)
    named = options.model or list(QWEN3)
    kinds = [options.kind] if options.kind else list(DEFAULTS)
    counts = options.devices or ([_product(sizes)] if sizes else COUNTS)
    found = []
    for kind in kinds:
        for name in named:
            config = _config(name)
            for count in counts:
                work = _work(options, kind, count)
                if sizes is None:
                    choice = choose(config, work, count)
                elif _product(sizes) != count:
                    raise Misuse(
                        f"--mesh {options.mesh} has {_product(sizes)} devices and --devices is "
                        f"{count}: name one of them, or sizes whose product is {count}"
                    )
                else:
                    choice = Choice([plan(config, work, sizes)])
                found.append((name, choice))
    compared = _compiled(options, found)
    if options.json:
        made = {"plans": [text.as_json(*each) for each in found]}
        made |= {"compiled": compared} if compared else {}
        return [json.dumps(made, indent=1)]
    shown = text.details(*found[0]) if len(found) == 1 else [text.summary(found)]
    for each in compared:
        from molora_jax.parallel.plan.compiled import compared_table

        shown += ["", compared_table(each)]
    return shown


def _compiled(options: argparse.Namespace, found) -> list[dict]:
    if not options.compile:
        return []
    from molora_jax.parallel.plan.compiled import compare

    return [compare(name, choice.best) for name, choice in found]


def _product(sizes: dict[str, int]) -> int:
    return math.prod(sizes.values())


def _work(options: argparse.Namespace, kind: str, devices: int):
    from molora_jax.parallel.plan import Workload

    if not 1 <= devices <= MOST:
        raise Misuse(f"--devices {devices}: expected a whole number from 1 to {MOST:,}")
    values = {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in DEFAULTS[kind].items()
    }
    if kind == "train" and options.top_k is None:
        values["top_k"] = values["num_adapters"]
    batch = ROWS[kind] * devices if options.batch is None else options.batch
    return Workload(kind=kind, batch=batch, **values)


def _config(name: str):
    from molora_jax.files import read_json
    from molora_jax.models.config import ModelConfig
    from molora_jax.models.qwen3 import QWEN3

    if name in QWEN3:
        return QWEN3[name]
    path = pathlib.Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise Misuse(
            f"--model {name!r} is none of {', '.join(QWEN3)} and no config.json{hint(name, QWEN3)}"
        )
    return ModelConfig.from_hf(read_json(path, where=str(path)))


if __name__ == "__main__":
    leave(main, MODULE)
