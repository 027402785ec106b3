"""Makes the reference numbers in tests/parity/reference with transformers and peft.

    python -m tests.parity.make_reference [small_models random_models adapters smollm2]

from the project's folder, in an environment with tests/parity/requirements.txt. Everything is
float32 on CPU; log-softmax is taken in float64. `smollm2.json` has sentences of our own through the
GGUF file as it is shipped, dequantised by transformers; `small_models.json` the models of
small_models.py, read by transformers from the folders that our loader reads in the tests, and
`random_models.json` those of random_models.py. `adapters.json` has the cases of adapters.py: the
adapter_config.json that peft wrote, the modules that it adapted, and what came out.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from molora_jax.models.smollm2 import fetch_smollm2
from tests.parity.adapters import BASES, CASES, base_model, base_prompts
from tests.parity.decoding import their_logits, their_model
from tests.parity.peft_models import module_of, peft_folder
from tests.parity.random_models import NUM_MODELS, padded, random_model, random_prompts
from tests.parity.small_models import (
    SMALL_MODELS,
    hf_tensors,
    small_model,
    small_tokens,
    write_folder,
)

REFERENCE = Path(__file__).parent / "reference"
SENTENCES = (
    "The quick brown fox did not jump; it walked around the dog, twice.",
    "def area(width, height):\n    return width * height\n",
    "In 1969 three people flew 384400 km to the moon, and two of them walked on it.",
    "Grüße aus Köln — ça va? Ελληνικά, 日本語 and a 🙂 in one line.",
    "Ask not why the sea is salt, but who has wept so long beside it.",
)
MESSAGES = (
    {"role": "user", "content": "Name a fruit that is yellow."},
    {"role": "assistant", "content": "A banana is a yellow fruit."},
    {"role": "user", "content": "And a red one?"},
)


def nll(model, ids: list[int]) -> list[float]:
    """-log p(token i + 1 | tokens 0..i), and the logits behind the last token."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    logp = torch.log_softmax(logits, dim=-1)
    losses = -logp[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    return losses.tolist(), logits[-1].tolist()


def smollm2() -> dict:
    path = fetch_smollm2()
    options = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    cases = []
    for text in (*SENTENCES, chat):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        losses, last = nll(model, ids)
        cases.append(
            {
                "text": text,
                "ids": ids,
                "nll": np.round(losses, 5).tolist(),
                "mean_nll": round(float(np.mean(losses)), 5),
                "last_argmax_id": int(np.argmax(last)),
            }
        )
    return {"messages": MESSAGES, "chat": chat, "cases": cases}


def small_models() -> dict:
    results = {}
    for name in SMALL_MODELS:
        settings, arrays = small_model(name)
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), settings, hf_tensors(arrays))
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rows = [nll(model, row) for row in small_tokens().tolist()]
        results[name] = {
            "weights_sum": float(sum(np.abs(a).sum(dtype=np.float64) for a in arrays.values())),
            "nll": [np.round(losses, 5).tolist() for losses, _ in rows],
            "last_logits": [np.round(last, 5).tolist() for _, last in rows],
        }
    return results


def greedy_numbers(model, prompts) -> dict:
    """A few numbers of the prompts and of 32 greedy steps behind them; rows are prompts."""
    prompt, steps, ids = their_logits(model, prompts)
    logp = torch.log_softmax(torch.tensor(prompt).double(), dim=-1).numpy()
    tokens, mask = padded(prompts, "left")
    losses = []
    for row in range(len(prompts)):
        at = np.flatnonzero(mask[row])
        losses.append(float(-logp[row, at[:-1], tokens[row, at[1:]]].mean()))
    return {
        "ids": ids.T.tolist(),
        "mean_nll": np.round(losses, 5).tolist(),
        "prompt_logits": np.round(prompt[:, -1, :5], 5).tolist(),
        "last_logits": np.round(steps[-1, :, :5], 5).tolist(),
        "last_sum": np.round(steps[-1].astype(np.float64).sum(-1), 4).tolist(),
    }


def random_models() -> dict:
    results = {}
    for index in range(NUM_MODELS):
        settings, arrays = random_model(index)
        with tempfile.TemporaryDirectory() as folder:
            model = their_model(write_folder(Path(folder), settings, hf_tensors(arrays)))
        total = float(sum(np.abs(a).sum(dtype=np.float64) for a in arrays.values()))
        results[str(index)] = {"weights_sum": total} | greedy_numbers(model, random_prompts(index))
    return {"models": results}


def adapters() -> dict:
    from peft import PeftModel

    results: dict = {case: {"bases": {}} for case in CASES}
    for name in BASES:
        with tempfile.TemporaryDirectory() as temporary:
            settings, arrays = base_model(name)
            base = write_folder(Path(temporary) / "base", settings, hf_tensors(arrays))
            for case in CASES:
                folder = peft_folder(case, base, Path(temporary) / case)
                config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
                model = PeftModel.from_pretrained(their_model(base), folder).eval()
                modules = {
                    module_of(key).removesuffix(".A"): parameter.shape[0]
                    for key, parameter in model.named_parameters()
                    if ".lora_A" in key
                }
                # A set, which peft writes in any order.
                if isinstance(config["target_modules"], list):
                    config["target_modules"].sort()
                config["base_model_name_or_path"] = None
                results[case] |= {"config": config, "modules": modules}
                results[case]["bases"][name] = greedy_numbers(model, base_prompts())
    return {"cases": results}


def main() -> None:
    makers = {make.__name__: make for make in (small_models, random_models, adapters, smollm2)}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help="of " + ", ".join(makers))
    names = parser.parse_args().names or list(makers)
    if unknown := [name for name in names if name not in makers]:
        parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(makers)}")
    made_by = (
        f"transformers {transformers.__version__}, peft {peft.__version__}, "
        f"torch {torch.__version__}, float32 on CPU"
    )
    for name in names:
        content = {"made_by": made_by} | makers[name]()
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (REFERENCE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
