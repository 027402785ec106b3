"""Engine: many requests on many adapters, decoded together by one compiled step.

A request is admitted to a free row: its adapters are leased from the hot set, its prompt is read
into the row's cache, and from then on every step gives all rows one token each. Whose adapter,
which routing rule and how to sample are data, so that nothing is compiled after `warm_up`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from molora_jax.adapters.hot_set import HotSet, Lease
from molora_jax.adapters.names import shortened
from molora_jax.display.progress import Progress
from molora_jax.generation import programs
from molora_jax.generation.profiles import Profile, Profiles
from molora_jax.generation.request import Delta, Generation, Request, TokenLogprobs
from molora_jax.generation.text_stream import TextStream
from molora_jax.models.lookup import BaseModel
from molora_jax.parallel import check_rows, check_same, computing, current_mesh, place
from molora_jax.token_ids import check_token_ids
from pallas_kernels import Routing


class QueueFull(ValueError):
    """More requests wait than the engine takes."""


@dataclasses.dataclass(eq=False)
class _Row:
    """A request that is being decoded."""

    generation: Generation
    lease: Lease | None
    stream: TextStream


class Engine:
    """Continuous batching over the rows of one compiled decode step.

    base        the model
    hot_set     adapters; None serves the base alone
    rows        B, requests decoded together
    context     T, tokens of a prompt and its answer together
    buckets     lengths to which the prompts read together are padded, one program each; None:
                powers of two
    pack        prompts that are read together at most; None: as many as there are rows. With 1 the
                numbers of an answer depend on nothing else that is served, to the last bit;
                otherwise up to rounding, which in bfloat16 may turn a near tie
    profiles    routing rules by name; at most one kind of them has logits
    max_waiting requests that may wait for a row, the ones after it are refused
    strategy    of the routed delta, as in pallas_kernels

    Made under `parallel.use_mesh`, its weights, rows and cache are split over that mesh; `rows` has
    to divide.

    `submit` and `cancel` may be called from any thread; `step`, `run` and `warm_up` belong to one.

        >>> engine = mj.Engine(base, rows=2, context=32)
        >>> answers = engine.run([mj.Request(prompt=[104, 105], max_tokens=2, ignore_eos=True)])
        >>> [answer.finish_reason for answer in answers]
        ['length']
    """

    def __init__(
        self,
        base: BaseModel,
        hot_set: HotSet | None = None,
        *,
        rows: int = 8,
        context: int = 512,
        buckets: Sequence[int] | None = None,
        pack: int | None = None,
        profiles: Mapping[str, Profile] | None = None,
        max_waiting: int = 256,
        strategy: str = "auto",
    ):
        config = base.config
        if rows < 1 or not 2 <= context <= config.max_positions:
            raise ValueError(
                f"rows is {rows} and context {context}; expected at least one row, and 2 to "
                f"{config.max_positions} tokens, the model's positions"
            )
        self.base, self.hot_set, self.rows, self.context = base, hot_set, rows, context
        self.buckets = _checked_buckets(buckets, context)
        self.pack = rows if pack is None else min(pack, rows)
        if self.pack < 1 or max_waiting < 1:
            raise ValueError(f"pack is {pack} and max_waiting {max_waiting}; expected 1 or more")
        if profiles and hot_set is None:
            raise ValueError("profiles route to adapters: give a hot_set that holds them")
        self.profiles = Profiles(profiles or {}, config)
        self.max_waiting, self.strategy = max_waiting, strategy
        self._mesh = current_mesh()
        if hot_set is not None and hot_set.bank.mesh != self._mesh:
            raise ValueError(
                f"the bank was made for {_words_of(hot_set.bank.mesh)} and the engine for "
                f"{_words_of(self._mesh)}: make both under the same use_mesh"
            )
        check_rows(rows, self._mesh, what="rows of an engine")
        self._tables = place(jax.device_put(self.profiles.tables), self._mesh)
        self._learned = place(self.profiles.learned, self._mesh, title="router")
        # A scan compiles quickly; on a GPU it would copy the weights of every layer. On a CPU the
        # step reads the adapters layer by layer for the same reason; a GPU kernel finds its layer.
        decoder = place(base.decoder, self._mesh, title="base")
        self._stepper = place(decoder.unstacked(), self._mesh)
        self._on_gpu = jax.default_backend() == "gpu"
        self._reader = self._stepper if self._on_gpu else decoder
        state = programs.empty_state(
            base.decoder, rows=rows, context=context, num_columns=self.profiles.num_columns
        )
        self._state = place(state, self._mesh, title="cache and rows")
        self._programs: dict[str, jax.stages.Compiled] = {}
        self._rows: list[_Row | None] = [None] * rows
        self._waiting: collections.deque[Generation] = collections.deque()
        self._cancelled: set[Generation] = set()
        self._next_id = 0
        self._broken: str | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)

    # From any thread

    def submit(
        self, request: Request, *, on_delta: Callable[[Delta], None] | None = None
    ) -> Generation:
        """Queues a request; `on_delta` is called by the stepping thread with each of its tokens.

        An exception in it is logged, and it is not called again. Raises ValueError or KeyError for
        what can never be served (ids outside the vocabulary, too long, an unknown adapter or
        profile), QueueFull where too many wait already.
        """
        self._check(request)
        if self._mesh is not None:
            check_same("request", lambda: dataclasses.asdict(request))
        with self._lock:
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} requests wait already (max_waiting "
                    f"{self.max_waiting}): try again later"
                )
            generation = Generation(self._next_id, request, on_delta, submitted=time.monotonic())
            self._next_id += 1
            self._waiting.append(generation)
            self._news.notify_all()
        return generation

    def cancel(self, generation: Generation) -> None:
        """Ends a request before its next token, wherever it is; nothing where it is done."""
        with self._lock:
            if not generation.done:
                self._cancelled.add(generation)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is being decoded."""
        return self.num_waiting == self.num_running == 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        with self._lock:
            return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that are being decoded."""
        return sum(row is not None for row in self._rows)

    def wait(self, timeout: float) -> bool:
        """Sleeps while the engine is idle, `timeout` seconds at most; whether there is work now."""
        with self._news:
            return self._news.wait_for(lambda: bool(self._waiting) or any(self._rows), timeout)

    # From the thread that steps

    def warm_up(self) -> int:
        """Compiles every program, and returns how many there are: prefill buckets plus one.

        They are compiled ahead of time: another shape would be refused by them and not compiled.
        """
        start = time.monotonic()
        missing: dict[str, tuple[Callable, tuple]] = {
            f"prefill {S}": (programs.prefill, self._prefill_arguments(S, [])) for S in self.buckets
        }
        missing["decode"] = programs.decode, (np.zeros(self.rows, bool),)
        missing = {name: each for name, each in missing.items() if name not in self._programs}
        with Progress("programs compiled", len(missing)) as progress:
            for name, (program, arguments) in missing.items():
                chosen = functools.partial(program, strategy=self.strategy)
                with computing(self._mesh):
                    lowered = jax.jit(chosen, donate_argnums=4).lower(
                        *self._shared(name), *place(arguments, self._mesh)
                    )
                self._programs[name] = lowered.compile()
                progress.update(name)
        if self.hot_set is not None:
            self.hot_set.bank.warm_up()
        logging.info(
            "engine: %d programs (%s) compiled in %.1f s",
            len(self._programs),
            ", ".join(self._programs),
            time.monotonic() - start,
        )
        return len(self._programs)

    def step(self) -> list[Generation]:
        """Admits what fits, then gives every row one token. Returns the requests that ended.

        Where it raises, what the rows had read is gone (a program was given it): the requests under
        way have no end, and every later step raises RuntimeError.
        """
        if "decode" not in self._programs:
            self.warm_up()
        if self._broken is not None:
            raise RuntimeError(f"a step failed before ({self._broken}): make a new engine")
        try:
            return self._step()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def _step(self) -> list[Generation]:
        ended = self._drop_cancelled()
        for _ in range(self.rows):  # a bound: answers of one token free their rows at once
            if not (group := self._admit(ended)):
                break
            ended += self._prefill(group)
        if any(self._rows):
            ended += self._decode()
        return ended

    def run(self, requests: Iterable[Request] = ()) -> list[Generation]:
        """Submits requests and steps until nothing is left; their answers, in order."""
        submitted = [self.submit(request) for request in requests]
        while not self.idle:
            self.step()
        return submitted

    def _decode(self) -> list[Generation]:
        active = np.array([row is not None for row in self._rows])
        out = self._call("decode", active)
        ended = []
        for index in np.flatnonzero(active):
            ended += self._take(int(index), out, int(index), slice(index, index + 1))
        return ended

    def _admit(self, ended: list[Generation]) -> list[int]:
        """Gives free rows to what waits, as many prompts as are read together; which rows.

        Strictly in the order of arrival: a request for adapters that have no slot yet is not
        overtaken, or one that needs many could wait for ever. One that can no longer be served is
        added to `ended`.
        """
        group: list[int] = []
        room = self.buckets[-1]
        while None in self._rows and len(group) < self.pack:
            with self._lock:
                if not self._waiting or len(self._waiting[0].request.prompt) > room:
                    break
                generation = self._waiting[0]
            try:
                lease = self._lease(generation.request)
            except (KeyError, ValueError) as error:  # unloaded while it waited
                ended.append(self._refuse(generation, _words(error)))
                continue
            if lease is None and self.hot_set is not None:
                self._prefetch([generation])
                if any(self._rows):
                    break
                reason = "all slots of the bank are held outside this engine"
                ended.append(self._refuse(generation, reason))
                continue
            self._pop(generation)
            generation.admitted = time.monotonic()
            if lease is not None:
                generation.versions, generation.slots = dict(lease.versions), lease.slots
            stream = TextStream(self.base.tokenizer, stop=generation.request.stop)
            group.append(self._rows.index(None))
            self._rows[group[-1]] = _Row(generation, lease, stream)
            room -= len(generation.request.prompt)
        if group:
            with self._lock:
                ahead = list(self._waiting)[: self.rows]
            self._prefetch(ahead)
        return group

    def _prefill(self, group: Sequence[int]) -> list[Generation]:
        """Reads the prompts of rows that were just given away; the requests that ended with it."""
        total = sum(len(self._generation(index).request.prompt) for index in group)
        S = next(each for each in self.buckets if each >= total)
        out = self._call(f"prefill {S}", *self._prefill_arguments(S, group))
        ended, start = [], 0
        for at, index in enumerate(group):
            end = start + len(self._generation(index).request.prompt)
            ended += self._take(index, out, at, slice(start, end))
            start = end
        return ended

    def _take(self, index: int, out: programs.StepOut, at: int, read: slice) -> list[Generation]:
        """Gives a row its next token: number `at` of a program that read its tokens `read`.

        Returns the request and frees the row where it ended with that.
        """
        row = self._rows[index]
        assert row is not None
        self._extend(row, out, at, read)
        if not row.generation.done:
            return []
        self._free(index)
        return [row.generation]

    def _extend(self, row: _Row, out: programs.StepOut, at: int, read: slice) -> None:
        generation, request = row.generation, row.generation.request
        now = time.monotonic()
        if not generation.tokens:
            generation.first_token = now
        if out.routing is not None:
            ids, gates = out.routing.adapter_ids[:, read], out.routing.gates[:, read]
            generation._routing.append(Routing(ids.copy(), gates.copy()))
        if not out.finite[at]:
            _end(
                generation,
                "error",
                error="the logits are not finite: an adapter or the base overflowed on this text",
                text=row.stream.finish(),
            )
            return
        token = int(out.tokens[at])
        generation.tokens.append(token)
        numbers = None
        if request.logprobs is not None:
            top = zip(out.top_ids[at], out.top_logprobs[at], strict=True)
            likeliest = [(int(i), float(p)) for i, p in top][: request.logprobs]
            numbers = TokenLogprobs(float(out.logprob[at]), tuple(likeliest))
            generation.logprobs.append(numbers)
        text, reason = row.stream.push(token), None
        if row.stream.stopped or (token in self.base.tokenizer.eos_ids and not request.ignore_eos):
            reason = "stop"
        elif len(generation.tokens) == request.max_tokens:
            reason = "length"
        if reason is not None:
            text += row.stream.finish()
            if row.stream.stopped:
                reason = "stop"
            _end(generation, reason, token=token, text=text, logprobs=numbers)
        else:
            _tell(generation, Delta(token, text, numbers))

    def _drop_cancelled(self) -> list[Generation]:
        with self._lock:
            asked, self._cancelled = self._cancelled, set()
            dropped = [each for each in self._waiting if each in asked]
            for generation in dropped:
                self._waiting.remove(generation)
        for generation in dropped:
            _end(generation, "cancelled")
        for index, row in enumerate(self._rows):
            if row is not None and row.generation in asked:
                self._free(index)
                _end(row.generation, "cancelled", text=row.stream.finish())
                dropped.append(row.generation)
        return dropped

    def _free(self, index: int) -> None:
        row = self._rows[index]
        assert row is not None
        self._rows[index] = None
        if row.lease is not None and self.hot_set is not None:
            self.hot_set.release(row.lease)

    def _generation(self, index: int) -> Generation:
        row = self._rows[index]
        assert row is not None
        return row.generation

    def _refuse(self, generation: Generation, reason: str) -> Generation:
        self._pop(generation)
        _end(generation, "error", error=reason)
        return generation

    def _pop(self, generation: Generation) -> None:
        with self._lock:
            self._waiting.remove(generation)

    def _prefetch(self, waiting: Sequence[Generation]) -> None:
        if self.hot_set is None:
            return
        for generation in waiting:
            try:
                self.hot_set.prefetch(self.profiles.names(generation.request))
            except (KeyError, ValueError):  # said when it is admitted
                continue

    def _shared(self, name: str) -> tuple:
        """The arguments of a program that do not belong to one call of it."""
        decoding = name == "decode"
        adapters = None
        if self.hot_set is not None:
            bank = self.hot_set.bank
            adapters = bank.layers if decoding and not self._on_gpu else bank.stacks
        decoder = self._stepper if decoding else self._reader
        return decoder, adapters, self._learned, self._tables, self._state

    def _call(self, name: str, *arguments) -> programs.StepOut:
        arguments = place(arguments, self._mesh)
        self._state, out = self._programs[name](*self._shared(name), *arguments)
        return jax.device_get(out)

    def _prefill_arguments(self, S: int, group: Sequence[int]) -> tuple:
        """tokens (S,), lengths (p,), rows (p,) and settings (p, …) of these rows' prompts."""
        tokens = np.zeros(S, np.int32)
        lengths, rows = np.zeros(self.pack, np.int32), np.full(self.pack, self.rows, np.int32)
        settings = [programs.idle_settings(self.profiles.num_columns)] * self.pack
        for at, index in enumerate(group):
            generation = self._generation(index)
            prompt = generation.request.prompt
            start = lengths.sum()
            tokens[start : start + len(prompt)] = prompt
            lengths[at], rows[at] = len(prompt), index
            settings[at] = self.profiles.settings(generation.request, generation.slots)
        return tokens, lengths, rows, jax.tree.map(lambda *leaves: np.stack(leaves), *settings)

    # What a request means

    def _check(self, request: Request) -> None:
        check_token_ids(request.prompt, self.base.config.vocab_size, name="prompt")
        length, longest = len(request.prompt), self.buckets[-1]
        if length > longest or length + request.max_tokens > self.context:
            raise ValueError(
                f"a prompt of {length} tokens and max_tokens {request.max_tokens} do not fit: the "
                f"prompt may have {longest}, both together {self.context} (the engine's context)"
            )
        TextStream(self.base.tokenizer, stop=request.stop)
        names = self.profiles.names(request)
        if names and self.hot_set is None:
            raise ValueError("this engine serves the base alone: it was made without a hot set")
        for name in names:
            assert self.hot_set is not None
            self.hot_set.version(name)
        if len(set(names)) > (0 if self.hot_set is None else self.hot_set.bank.num_slots):
            raise ValueError(
                f"a request for {len(names)} adapters ({shortened(names)}) does not fit the bank's "
                "slots"
            )

    def _lease(self, request: Request) -> Lease | None:
        if self.hot_set is None:
            return None
        lease = self.hot_set.acquire(self.profiles.names(request))
        if lease is not None:
            try:
                self.profiles.check_digests(request, lease)
            except ValueError:
                self.hot_set.release(lease)
                raise
        return lease


def _end(
    generation: Generation,
    reason: str,
    *,
    token: int | None = None,
    text: str = "",
    logprobs: TokenLogprobs | None = None,
    error: str | None = None,
) -> None:
    generation.finish_reason, generation.error = reason, error
    generation.finished = time.monotonic()
    _tell(generation, Delta(token, text, logprobs, reason, error))


def _tell(generation: Generation, delta: Delta) -> None:
    generation.text += delta.text
    if generation.on_delta is not None:
        try:
            generation.on_delta(delta)
        except Exception:  # the caller's: it must not cost the other rows of the step their tokens
            logging.exception("request %d: its on_delta failed; not called again", generation.id)
            generation.on_delta = None


def _words_of(mesh: jax.sharding.Mesh | None) -> str:
    if mesh is None:
        return "no mesh"
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    return f"a mesh of {sizes or 'one device'} ({mesh.devices.flat[0]} and on)"


def _words(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__


def _checked_buckets(buckets: Sequence[int] | None, context: int) -> tuple[int, ...]:
    if buckets is None:
        powers = [16 << n for n in range(20) if 16 << n < context]
        return (*powers, context)
    found = tuple(sorted(set(buckets)))
    if not found or found[0] < 1 or found[-1] > context:
        raise ValueError(
            f"buckets is {list(buckets)}; expected lengths from 1 to context {context}"
        )
    return found
