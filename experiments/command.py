"""`molora`: one command for the experiments and the tools; the same as the modules it names.

    molora run --experiment=NAME ...       experiments by flags and gin (python run.py)
    molora results RUNS...                 a table of run folders, the best first
    molora plan ...                        a step on H200s, on paper (python -m molora_jax.parallel)
    molora inspect|convert|merge|statistics|compose|probe|generate|serve ...
                                           adapters and models (python -m molora_jax.tools)
    molora completion bash|zsh             words to complete: eval "$(molora completion bash)"
    molora --version

Each takes --help.
"""

import importlib.metadata
import sys
from collections.abc import Sequence

from molora_jax.tools.arguments import VERBS

OTHERS = ("run", "results", "plan", "completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the rest of the command line to whom its first word names; returns the exit code."""
    verb, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
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

        return plan(["--plan", *rest])
    if verb == "results":
        from experiments import comparison

        try:
            return comparison.main(rest)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return 2
    if verb == "run":
        from absl import app

        from experiments import main as experiments

        app.run(experiments.main, argv=["molora run", *rest], flags_parser=experiments.parse_flags)
    if verb == "completion" and rest in (["bash"], ["zsh"]):
        print(completion(rest[0]))
        return 0
    return _unknown(verb, rest)


def completion(shell: str) -> str:
    """Lines for a shell that complete verbs, and after --experiment= the experiments."""
    from experiments import registry

    verbs, names = " ".join((*OTHERS, *VERBS)), " ".join(registry.EXPERIMENTS)
    lines = ["autoload -Uz bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join(
        [
            *lines,
            "_molora() {",
            "  local word=${COMP_WORDS[COMP_CWORD]}",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f"    COMPREPLY=($(compgen -W '{verbs}' -- \"$word\"))",
            # bash ends a word at =, so what follows it is a word of its own.
            '  elif [ "${COMP_WORDS[COMP_CWORD-1]}" = = ] || [ "$word" = = ]; then',
            f"    COMPREPLY=($(compgen -W '{names}' -- \"${{word#=}}\"))",
            '  elif [ "${COMP_WORDS[1]}" = run ]; then',
            "    COMPREPLY=($(compgen -W '--experiment= --scale= --list --help' -- \"$word\"))",
            "    compopt -o nospace 2>/dev/null",
            "  fi",
            "}",
            "complete -o default -F _molora molora",
        ]
    )


def _unknown(verb: str, rest: Sequence[str]) -> int:
    from experiments import registry

    known = (*OTHERS, *VERBS)
    if verb == "completion":
        said = f"completion {' '.join(rest)}: expected bash or zsh"
    else:
        close = registry.nearest(verb, known)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        said = f"unknown command {registry.one_line(verb)!r} (known: {', '.join(known)}){hint}"
    print(f"molora: {said}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
