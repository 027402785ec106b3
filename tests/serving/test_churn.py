"""Minutes of what a day brings: every answer under churn is one that its adapter gives alone."""

import concurrent.futures
import random
import time

import pytest

from tests.serving.conftest import CASES, LATER, TOKENS, prompt_of
from tests.serving.test_adapters import LOAD, UNLOAD
from tests.serving.test_clients import LONG, connection

SECONDS = 40.0


@pytest.mark.long
def test_answers_are_right_while_adapters_come_and_go_and_clients_leave(served):
    """Ten clients, one of whom loads, swaps and unloads; none is told anything but the truth."""
    end = time.monotonic() + SECONDS
    names = [name for name in CASES if name not in ("its next content", "sampled")]
    counts = dict.fromkeys((200, 400, 404, 429, "left"), 0)

    def ask(seed):
        rng = random.Random(seed)
        while time.monotonic() < end:
            name = rng.choice(names)
            body = {"prompt": prompt_of(name), "max_tokens": TOKENS, "ignore_eos": True}
            body |= {"temperature": 0} | CASES[name][0]
            if rng.random() < 0.15:
                body |= LONG | {"stream": rng.random() < 0.5, "n": rng.randrange(1, 4)}
                with connection(served, body):
                    time.sleep(rng.random() * 0.1)
                counts["left"] += 1
                continue
            status, answer, _ = served.call("POST", "/v1/completions", body)
            counts[status] += 1
            if status == 200:
                allowed = [served.expected[name][0].text]
                if name == "loaded later":  # the other content has another answer to this prompt
                    allowed = versions
                assert answer["choices"][0]["text"] in allowed, name
            elif status != 429:  # unloaded before it was asked for, or while it waited for a row
                assert name == "loaded later" and "'e'" in answer["error"]["message"]

    def swap():
        rng = random.Random(0)
        done = 0
        while time.monotonic() < end:
            path = rng.choice(sorted(LATER))
            load = {"lora_name": "e", "lora_path": path, "load_inplace": True}
            assert served.call("POST", LOAD, load)[0] == 200
            time.sleep(rng.random() * 0.2)
            if rng.random() < 0.5:
                assert served.call("POST", UNLOAD, {"lora_name": "e"})[0] == 200
            done += 1
        served.call("POST", UNLOAD, {"lora_name": "e"})
        return done

    versions = []
    for path in LATER:
        load = {"lora_name": "e", "lora_path": path, "load_inplace": True}
        assert served.call("POST", LOAD, load)[0] == 200
        versions.append(
            served.complete(model="e", prompt=prompt_of("loaded later"))["choices"][0]["text"]
        )
    assert versions[0] == served.expected["loaded later"][0].text != versions[1]
    compiled = served.metric("molora_compilations_since_warm_up_total")
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        swapping = pool.submit(swap)
        list(pool.map(ask, range(9)))
        swaps = swapping.result()
    print(
        f"\n{swaps} swaps, {counts}, {served.metric('molora_adapter_evictions_total'):g} evictions"
    )
    assert counts[200] > 100 and swaps > 20
    assert served.metric("molora_compilations_since_warm_up_total") == compiled
    served.settle()
