"""Many threads change adapters and ask at random: no answer knows of anything but its own version.

`MOLORA_ISOLATION_MINUTES` says for how long; two without it.
"""

import collections
import dataclasses
import os
import threading
import time

import jax
import numpy as np
import pytest

from molora_jax.adapters import AdapterBank
from molora_jax.adapters.hot_set import HotSet
from molora_jax.compilations import count_compilations
from molora_jax.generation.engine import Engine, QueueFull
from molora_jax.generation.profiles import Profile
from molora_jax.generation.request import Request
from molora_jax.models import load_base
from molora_jax.routing import VocabularyRouter
from tests.generation.test_engine import alone, prompt, weights

MINUTES = float(os.environ.get("MOLORA_ISOLATION_MINUTES", "2"))
NAMES = tuple(f"name{i}" for i in range(6))
SUBMITTERS, CHANGERS = 4, 3
# What a request may be told, beside its tokens: removed while it waited, or too many pins.
EXPECTED = ("is loaded", "does not fit the bank")


class Churn:
    """The threads, what they did, and what was answered."""

    def __init__(self, engine, contents, *, seed):
        self.engine, self.hot, self.contents, self.seed = engine, engine.hot_set, contents, seed
        self.stop, self.failed = threading.Event(), []
        # Lists, since appending is one step for all threads and counting is not.
        self.log, self.submitted, self.done = [], [], []

    def run(self, seconds):
        """Steps in this thread while the others go on, then lets what is left end."""
        threads = [threading.Thread(target=self.guard, args=(self.change, i))
                   for i in range(CHANGERS)]  # fmt: skip
        threads += [
            threading.Thread(target=self.guard, args=(self.submit, CHANGERS + i))
            for i in range(SUBMITTERS)
        ]
        for thread in threads:
            thread.start()
        end, rounds = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < end and not self.failed:
                self.done += self.engine.step()
                rounds += 1
                if rounds % 50 == 0:
                    self.refuse()
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        while not self.engine.idle:
            self.done += self.engine.step()
        assert not self.failed, self.failed[0]

    def guard(self, work, number):
        rng = np.random.default_rng((self.seed, number))
        try:
            while not self.stop.is_set():
                work(rng)
                time.sleep(float(rng.uniform(0, 0.004)))
        except Exception as error:
            self.failed.append(error)

    def change(self, rng):
        """One change; that a name is taken, is not there or cannot be pinned now is no fault."""
        name, content = str(rng.choice(NAMES)), self.contents[rng.integers(len(self.contents))]
        what = str(rng.choice(["add", "replace", "remove", "pin", "unpin", "prefetch"]))
        call = {
            "add": lambda: self.hot.add(content, name=name),
            "replace": lambda: self.hot.replace(name, content),
            "remove": lambda: self.hot.remove(name),
            "pin": lambda: self.hot.pin(name),
            "unpin": lambda: self.hot.unpin(name),
            "prefetch": lambda: self.hot.prefetch([name]),
        }[what]
        try:
            call()
            self.log.append(what)
        except (KeyError, ValueError) as error:
            if not any(each in str(error) for each in ("is loaded", "is not pinned")):
                raise

    def submit(self, rng):
        kind = rng.integers(8)
        chosen = {"adapter": str(rng.choice(NAMES))}
        if kind == 0:
            chosen = {}
        elif kind == 1:
            chosen = {"profile": "two"}
        length = int(rng.choice([3, 8, 15, 20]))
        request = Request(
            prompt=prompt(length, length), max_tokens=int(rng.integers(1, 9)), ignore_eos=True,
            **chosen,
        )  # fmt: skip
        try:
            generation = self.engine.submit(request)
        except KeyError:
            self.log.append("refused")
            return
        except QueueFull:
            time.sleep(0.05)
            return
        self.submitted.append(generation)
        if rng.random() < 0.1:
            time.sleep(float(rng.uniform(0, 0.05)))
            self.engine.cancel(generation)

    def refuse(self):
        """Weights that are not finite, from another thread, between two steps of this one.

        Only this thread writes slots, so that all of the bank must be the same afterwards.
        """
        bank = self.hot.bank
        before, occupants = jax.tree.map(np.array, (bank.stacks, bank.layers)), bank.list()
        broken, said = self.broken, []

        def try_it():
            for call in (
                lambda: self.hot.add(broken, name="broken"),
                lambda: self.hot.replace(self.hot.list()[0].name, broken),
                lambda: bank.load(broken, name="broken", evict=True),
            ):
                try:
                    call()
                    self.failed.append(AssertionError("weights that are not finite were taken"))
                except (ValueError, KeyError, IndexError) as error:
                    said.append(str(error))

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        assert any("NaN" in each or "finite" in each for each in said), said
        jax.tree.map(np.testing.assert_array_equal, (bank.stacks, bank.layers), before)
        assert bank.list() == occupants
        self.log.append("refused content")

    @property
    def broken(self):
        pairs = dict(self.contents[0].modules)
        module = "layers.2.mlp.up_proj"
        a = pairs[module].a.copy()
        a[1, 3] = np.nan
        pairs[module] = dataclasses.replace(pairs[module], a=a)
        return dataclasses.replace(self.contents[0], modules=pairs)


def check(churn, wild):
    """Every answer against that of its very versions, served alone; returns how many differed."""
    engine, known = churn.engine, {}
    for name in NAMES:
        if name in {each.name for each in engine.hot_set.list()}:
            engine.hot_set.remove(name)

    def truth(generation):
        """Tokens and reason of the longest request with this prompt and these contents."""
        request, versions = generation.request, generation.versions
        digests = tuple(versions[n].digest for n in sorted(versions))
        key = tuple(request.prompt), request.adapter is None, request.profile, digests
        if key not in known:
            full = dataclasses.replace(request, max_tokens=8)
            added = []
            for name, version in versions.items():
                if request.adapter is not None:
                    full = dataclasses.replace(full, adapter="again")
                    name = "again"
                elif name in {each.name for each in engine.hot_set.list()}:
                    continue  # of the profile, which nobody changes
                engine.hot_set.add(version.staged.adapter, name=name)
                added.append(name)
            answer = alone(engine, full)
            known[key] = answer.tokens, answer.finish_reason
            for name in added:
                engine.hot_set.remove(name)
        return known[key]

    counts = collections.Counter()
    for generation in churn.done:
        reason = generation.finish_reason
        counts[reason] += 1
        if not generation.versions and (generation.request.adapter or generation.request.profile):
            # Never admitted.
            assert not generation.tokens
            assert reason == "cancelled" or any(each in generation.error for each in EXPECTED)
            continue
        tokens, expected = truth(generation)
        count = len(generation.tokens)
        assert generation.tokens == tokens[:count], generation.request
        overflows = any(v.digest in wild for v in generation.versions.values())
        if reason == "length":
            assert count == generation.request.max_tokens and not overflows
        elif reason == "error":
            assert overflows and expected == "error" and "not finite" in generation.error
            counts["overflowed"] += 1
        else:
            assert reason == "cancelled"
    return counts, len(known)


@pytest.mark.long
def test_no_answer_knows_of_what_other_threads_do():
    base = load_base("tiny-random")
    hot = HotSet(AdapterBank(base.config, num_slots=4, max_rank=4))
    good = [weights(base, seed) for seed in range(8)]
    wild = [weights(base, 50 + seed, size=1e18) for seed in range(2)]
    for name, content in zip(
        ("left", "right"), (weights(base, 90), weights(base, 91)), strict=True
    ):
        hot.add(content, name=name)
    rule = VocabularyRouter(np.arange(base.config.vocab_size) % 3 - 1)
    profiles = {"two": Profile(router=rule, adapters=("left", "right"))}
    engine = Engine(base, hot, rows=4, context=32, buckets=(8, 20), profiles=profiles)
    engine.warm_up()
    churn = Churn(engine, [*good, *wild], seed=0)
    with count_compilations() as compiled:
        churn.run(60 * MINUTES)
    assert not compiled
    assert not any(hot.bank.holds(each.digest) for each in hot.bank.list())
    assert {id(each) for each in churn.done} == {id(each) for each in churn.submitted}
    assert len(churn.done) == len(churn.submitted)
    counts, kinds = check(churn, {each.digest for each in wild})
    did = collections.Counter(churn.log)
    print(f"{len(churn.done)} answers of {kinds} kinds; {dict(counts)}; {dict(did)}")
    changes = ("add", "replace", "remove", "pin", "unpin", "prefetch", "refused content")
    assert all(did[each] for each in changes)
    assert counts["length"] > 20 and counts["overflowed"]
