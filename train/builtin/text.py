"""The built-in model's text and tokenizer.

The text is the standard library's source, part of it held out. The tokenizer is a BPE trained on the rest.
"""

import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvjax.models.json_file import write_json
from kvjax.tasks import SPECIAL_TOKENS, Vocabulary
from kvjax.tasks.builtin import FILE_HEADING

VOCABULARY = 1088
HELDOUT_BYTES = 295_000
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
"""Folders of other code, of tests, or of tables of characters."""
LICENCE_LINE = "Files of the Python standard library, © Python Software Foundation, PSF License Agreement.\n"


def standard_library() -> dict[str, str]:
    """Return the source of each file of this Python's standard library by its path, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for file in root.rglob("*.py"):
        path = file.relative_to(root)
        if not SKIPPED_FOLDERS & set(path.parts):
            source = file.read_text(encoding="utf-8", errors="ignore")
            if source.strip():
                files[path.as_posix()] = source
    return dict(sorted(files.items()))


def hold_out(files: dict[str, str], seed: int = 0) -> tuple[list[str], str]:
    """Return the sources to train on, and a packaged text of the held-out files."""
    names, held_out, size = list(files), [], 0
    for i in np.random.default_rng(seed).permutation(len(names)):
        n_bytes = len(files[names[i]].encode())
        if 4_000 < n_bytes < 30_000 and size + n_bytes < HELDOUT_BYTES:
            held_out.append(names[i])
            size += n_bytes
    packaged = LICENCE_LINE + "".join(f"\n{FILE_HEADING}{name}\n{files[name]}" for name in sorted(held_out))
    return [source for name, source in files.items() if name not in set(held_out)], packaged


def train_tokenizer(sources: list[str]) -> Tokenizer:
    """Train a byte-level BPE on the sources, with the marks of the tasks as special tokens at the end.

    Texts begin with `<|begin|>`, as in the model's training.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    begin = "<|begin|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, folder: Path) -> None:
    """Write the files from which transformers reads a tokenizer, and the defaults of generation."""
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    ids = {"bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end, "pad_token_id": vocabulary.end}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings | marks)
    write_json(folder / "generation_config.json", ids)
