"""molora: adapters trained, composed, routed and served, and the experiments with them.

    molora run --experiment=NAME field=value ...
                            train an adapter or router of your own, or run an experiment
    molora results RUNS...  a table of what runs measured, the best first
    molora plan ...         memory and time of a step on H200s, on paper

    molora inspect          what an adapter, composition or checkpoint holds
    molora probe            what an adapter changes in its base
    molora statistics       what a router must know of an adapter's texts
    molora compose          adapters into one composition, without training
    molora generate         text by the base, by adapters and routed
    molora serve            the same over HTTP, for OpenAI's clients
    molora convert, merge   between checkpoints and PEFT folders; several adapters into one

    molora completion bash  words to complete: eval "$(molora completion bash)"; also zsh
    molora --version

Each takes --help. Where nothing is installed they are `python run.py`, `python -m` with
experiments.results and molora_jax.parallel --plan, and for the others `python -m molora_jax.tools`.
"""

import importlib.metadata
import sys
from collections.abc import Sequence

from molora_jax.ending import leave
from molora_jax.tools.arguments import VERBS, options

OTHERS = ("run", "results", "plan", "completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the rest of the command line to whom its first word names; returns the exit code.

    Without `argv` it is the program `molora` itself, and ends the process.
    """
    if argv is None:
        leave(lambda: main(sys.argv[1:]), "molora")
    verb, *rest = list(argv) or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(__doc__)
        return 0
    if verb == "--version":
        print(importlib.metadata.version("molora-jax"))
        return 0
    if verb in VERBS:
        from molora_jax.tools.__main__ import main as tools

        return tools([verb, *rest], prog="molora")
    if verb == "plan":
        from molora_jax.parallel.__main__ import main as plan

        return plan(["--plan", *rest], prog="molora plan")
    if verb == "results":
        from experiments import comparison

        return comparison.main(rest)
    if verb == "run":
        from absl import app

        from experiments import main as experiments

        app.run(experiments.main, argv=["molora run", *rest], flags_parser=experiments.parse_flags)
    if verb == "completion" and rest in (["bash"], ["zsh"]):
        print(completion(rest[0]))
        return 0
    return _unknown(verb, rest)


def completion(shell: str) -> str:
    """Lines for a shell that complete verbs and their options, experiments, scales and fields."""
    from experiments import field_names, registry

    fields = [
        f"    {name}) fields='{' '.join(f'{each}=' for each in field_names.names(entry.module))}';;"
        for name, entry in registry.EXPERIMENTS.items()
    ]
    words = {"completion": ["bash", "zsh"], **options()}
    verbs = [f"    {verb}) options='{' '.join(all_of)}';;" for verb, all_of in words.items()]
    flags = "--experiment= --scale= --sweep= --seed= --workdir= --fields --list --rerun --help"
    zsh = ["autoload -Uz bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join(
        [
            *zsh,
            "_molora() {",
            "  local word=${COMP_WORDS[COMP_CWORD]} before= name=compose fields= options= at next",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f"    COMPREPLY=($(compgen -W '{' '.join((*OTHERS, *VERBS))}' -- \"$word\"))",
            "    return",
            "  fi",
            '  if [ "${COMP_WORDS[1]}" != run ]; then',
            "    case ${COMP_WORDS[1]} in",
            *verbs,
            "    esac",
            "    [[ $word == -* || ${COMP_WORDS[1]} = completion ]] &&",
            '      COMPREPLY=($(compgen -W "$options" -- "$word"))',
            "    return",
            "  fi",
            # bash ends a word at =, so what follows it is a word of its own.
            '  if [ "$word" = = ]; then word= before=${COMP_WORDS[COMP_CWORD-1]}',
            '  elif [ "${COMP_WORDS[COMP_CWORD-1]}" = = ]; then',
            "    before=${COMP_WORDS[COMP_CWORD-2]}",
            "  fi",
            "  for ((at = 2; at < COMP_CWORD; at++)); do",
            '    next="${COMP_WORDS[at+1]}"; [ "$next" = = ] && next="${COMP_WORDS[at+2]}"',
            '    [ "${COMP_WORDS[at]}" = --experiment ] && name=$next',
            "  done",
            "  case $name in",
            *fields,
            "  esac",
            "  case $before in",
            f"    --experiment) fields='{' '.join(registry.EXPERIMENTS)}';;",
            "    --scale) fields='tiny cpu paper';;",
            "    ?*) return;;",  # a value: files, as the shell has them
            f'    *) fields="{flags} $fields"; compopt -o nospace 2>/dev/null;;',
            "  esac",
            '  COMPREPLY=($(compgen -W "$fields" -- "$word"))',
            "}",
            "complete -o default -F _molora molora",
        ]
    )


def _unknown(verb: str, rest: Sequence[str]) -> int:
    from experiments import registry

    known = (*OTHERS, *VERBS)
    if verb == "completion":
        said = f"{' '.join([verb, *rest])}: expected bash or zsh"
    else:
        near = registry.hint(verb, known)
        said = f"unknown command {registry.one_line(verb)!r} (known: {', '.join(known)}){near}"
        if verb in registry.EXPERIMENTS:
            said = f"{verb} is an experiment: molora run --experiment={verb}"
    print(f"molora: {said}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
