"""How a program ends: with its exit code, and after Ctrl-C in one line, whatever it was at."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from molora_jax.display.terminal import fail

HAS_TIMER = hasattr(signal, "setitimer")
AGAIN_S = 0.05  # until an interrupt that came at a bad moment is tried again


def leave(program: Callable[[], Any], name: str) -> NoReturn:
    """Runs a program, which returns or raises its exit code, and ends the process with it.

    An interrupt that the program does not see to itself is a line, `NAME: stopped`, and code 1.

    Whatever fails or is stopped ends without the interpreter's teardown. XLA's threads may be
    computing still, and would read what the teardown takes away: the process died of SIGSEGV after
    most Ctrl-C. Of several processes the others, which may wait for this one, learn of its end at
    once and not after JAX's five minutes. What is written is closed by then: those who write, a
    checkpoint's thread too, are waited for by the `with` that they run in.
    """
    # Else it is ignored; and Windows sends no interrupt again.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and HAS_TIMER:
        sys.unraisablehook = _unraisable
        signal.signal(signal.SIGINT, _stop)
        signal.signal(signal.SIGALRM, _stop)  # the same interrupt, sent again
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # shows a letter that it does not have as its number
            stream.reconfigure(errors="backslashreplace")
    code: Any
    try:
        code = program()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        fail(name, "stopped")
        code = 1
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    if not code or not isinstance(code, int):  # a text is for sys.exit to print
        sys.exit(code)
    for number in [signal.SIGINT, *([signal.SIGALRM] if HAS_TIMER else [])]:
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C has nothing left to stop
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _stop(number: int, frame: Any) -> None:
    """Raises KeyboardInterrupt as Python's own handler does, but after an import: what initialises
    itself in C++ then aborts the process, or turns the interrupt into another error."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(what: Any) -> None:
    """Sends an interrupt again that came in a destructor or a callback of the collector, where
    Python prints and drops it."""
    if what.exc_type is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)  # no thread: a lock may be held here
    else:
        sys.__unraisablehook__(what)
