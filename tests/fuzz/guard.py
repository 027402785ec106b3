"""The promise under test, held around every call: words, a clock, memory, and no file elsewhere.

`attempt` runs a call and says how it ended. It breaks (AssertionError) where the call did not keep
the promise: an exception of another kind or in many lines, a file opened outside the given folder,
a pickle or a process started, hundreds of megabytes asked for, seconds gone.
"""

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 10
MEMORY_BYTES = 700 * 2**20
MAX_MESSAGE = 1500
# Errors that are words; their subclasses such as UnicodeDecodeError are not ours.
REFUSALS = (
    ValueError,
    OSError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
_FORBIDDEN = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "shutil.rmtree",
)
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# What Python itself reads when a module is imported late, and JAX about the machine.
_CODE = (
    *(os.path.realpath(each) + os.sep for each in (sys.prefix, sys.base_prefix)),
    os.path.realpath(Path(__file__).parents[2]) + os.sep,
    *("/proc/", "/sys/", "/dev/null", "/etc/localtime", "/usr/share/zoneinfo/"),
)


@dataclass(frozen=True)
class Outcome:
    """How a call ended: the value that it returned, or the words that it was refused with."""

    value: Any = None
    refusal: str | None = None


class _Watch:
    """What happened while a call ran; the hook cannot be removed, so it is switched on and off."""

    roots: tuple[str, ...] | None = None
    seen: list[str] = []  # noqa: RUF012
    installed = False

    @classmethod
    def hook(cls, event: str, arguments: tuple) -> None:
        if cls.roots is None:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or path is None:
                return
            real = os.path.realpath(os.fsdecode(path))
            ours = real.startswith(cls.roots)
            if real.endswith(_PICKLE_ENDINGS):
                cls.seen.append(f"opened the pickle {real}")
            elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                if not real.startswith(cls.roots[1:]) and real != "/dev/null":
                    cls.seen.append(f"opened {real} to write")
            elif not ours and not real.startswith(_CODE):
                cls.seen.append(f"opened {real}, which is outside the given folder")
        elif event in _FORBIDDEN:
            first = arguments[0] if arguments else None
            # A cache writes beside the file and renames.
            if isinstance(first, str | Path) and str(first).startswith(cls.roots[1:]):
                return
            cls.seen.append(f"{event}{arguments!r:.200}")


class _TooSlow(BaseException):
    pass


@contextlib.contextmanager
def _watched(folder: Path, writable: Sequence[Path]) -> Iterator[None]:
    if not _Watch.installed:
        sys.addaudithook(_Watch.hook)
        _Watch.installed = True
    roots = [os.path.realpath(each) + os.sep for each in (folder, *writable)]
    _Watch.seen = []
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    timed = threading.current_thread() is threading.main_thread()

    def too_slow(*_: object) -> None:
        _Watch.seen.append(f"took more than {SECONDS} s")
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, too_slow) if timed else None
    try:
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        if timed:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _Watch.roots = tuple(roots)
        yield
    finally:
        _Watch.roots = None
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(
    call: Callable[[], Any],
    *,
    folder: Path,
    names: Sequence[str] = (),
    writable: Sequence[Path] = (),
    also: tuple[type[BaseException], ...] = (),
) -> Outcome:
    """Runs `call` and returns how it ended; AssertionError where it broke the promise.

    folder    the only place that it may read
    names     a refusal has to contain one of them: the name of a file, of a field, of an argument
    writable  folders where it may write (a cache)
    also      further exceptions that count as refusals
    """
    outcome, broken = Outcome(), None
    with _watched(folder, writable):
        try:
            outcome = Outcome(value=call())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            broken = error
    assert not _Watch.seen, f"{'; '.join(_Watch.seen[:3])} (ended with {broken!r:.200})"
    if broken is None:
        return outcome
    kind = f"{type(broken).__module__}.{type(broken).__name__}"
    if type(broken) not in (*REFUSALS, *also):
        raise AssertionError(f"ended with {kind}: {str(broken)[:300]}") from broken
    text = str(broken)
    problem = None
    if not text.strip() or len(text.splitlines()) > 1:
        problem = "its message is not one line"
    elif len(text) > MAX_MESSAGE:
        problem = f"its message has {len(text)} characters"
    elif names and not any(name in text for name in names):
        problem = "its message names no file, field or argument"
    if problem:
        raise AssertionError(f"{problem}: {kind}: {text[:400]!r}") from broken
    return Outcome(refusal=text)
