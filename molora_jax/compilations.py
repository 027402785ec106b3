"""The compile counter: which programs this process compiles, so that "none" can be asserted."""

import contextlib
from collections.abc import Iterator

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event for a program it compiled


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """The programs compiled inside, by name: `with count_compilations() as compiled: step(x)`.

    Of all threads of the process. Every array operation outside `jit` compiles a program of its own
    when its shapes are new, so prepare the inputs before entering.

        >>> with mj.count_compilations() as compiled:
        ...     _ = jax.jit(lambda x: x + 1)(np.float32(1))
        >>> len(compiled)
        1
    """
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == _COMPILED:
            compiled.append(str(details.get("fun_name", "?")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
