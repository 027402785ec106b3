"""`python -m molora_jax.tools VERB`: parse, run, and turn errors into one line and an exit code.

0 done, 1 failed, 2 misused (and nothing was started).
"""

import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence

from molora_jax.display.terminal import fail
from molora_jax.ending import leave
from molora_jax.models.cache import cache_folder
from molora_jax.tools.arguments import VERBS, Misuse, parse

PROG = "python -m molora_jax.tools"


def main(argv: Sequence[str] | None = None, *, prog: str = PROG) -> int:
    """Runs one verb and returns its exit code; --help leaves by SystemExit(0).

    prog  what was typed before the verb: messages and hints begin with it
    """
    argv = sys.argv[1:] if argv is None else argv
    verb = argv[0] if argv else ""
    # Compiling a whole model's step takes most of a short generation; the next call finds it done.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder() / "xla"))
    logger = logging.getLogger("absl")
    level = logger.level
    try:
        args = parse(argv, prog=prog)
        verb = args.verb
        logger.setLevel(logging.ERROR)  # the verbs print the warnings of what they load themselves
        # Imports JAX, which takes a second or two that --help and a mistake need not wait for.
        verb_module = importlib.import_module(f"molora_jax.tools.{verb}")
        with _mesh(getattr(args, "mesh", "")):
            code = verb_module.run(args)
        sys.stdout.flush()  # here, where a closed pipe is no accident
        return code
    except Misuse as error:
        return _failed(error, prog, verb, 2)
    except BrokenPipeError:  # an OSError, and no failure: `leave` sees to it
        raise
    except (ValueError, OSError) as error:
        return _failed(error, prog, verb, 1)
    except KeyboardInterrupt:
        fail(f"{prog} {verb}", "stopped")
        return 1
    finally:
        logger.setLevel(level)


def _mesh(text: str) -> contextlib.AbstractContextManager:
    """Splits what a verb loads over the mesh that was asked for."""
    if not text:
        return contextlib.nullcontext()
    from molora_jax.parallel import make_mesh, use_mesh

    try:
        return use_mesh(make_mesh(text))
    except ValueError as error:
        raise Misuse(f"--mesh: {error}") from None


def _failed(error: Exception, prog: str, verb: str, code: int) -> int:
    text = " ".join(str(error).split())
    # The package speaks of the command that an installation has.
    text = re.sub(rf"`molora (?={'|'.join(VERBS)})", f"`{prog} ", text)
    fail(f"{prog} {verb}".rstrip(), text)
    return code


if __name__ == "__main__":
    leave(main, PROG)
