"""Tests of the tokenizers of GGUF files against tokenizers of the published designs with the same vocabulary."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvjax.errors import UserError
from kvjax.models import load_tokenizer
from kvjax.models.chat import encode
from kvjax.models.folder import copy_tokenizer
from tests.models.cases import LLAMA
from tests.models.gguf_cases import write_gguf
from tests.models.gguf_tokenizers import CORPUS, PUBLISHED, metadata_of, published

TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "x=2024\n\n\n 5 > 4",
    "e\u0301 ﬁ ½ ٣٤ 🙂🙂",
    "<|im_start|>user\n12<|im_end|>a <tool> b",
    "[PAD1]",
]


def write(file: Path, metadata: dict) -> Path:
    return write_gguf(file, LLAMA, {}, metadata=metadata, more={"token_embd": np.ones((61, 48), np.float32)})


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_ids_match_the_published_tokenizers(pre, tmp_path):
    original = published(pre)
    file = write(tmp_path / "model.gguf", metadata_of(original, pre))
    tokenizer = load_tokenizer(file)
    copy_tokenizer(file, tmp_path)
    begin = [1] if pre == "llama-bpe" else []
    for kind in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(kind) == original.get_vocab_size()
        assert (kind.bos_token_id, kind.eos_token_id, kind.pad_token_id) == (1, 2, 0)
        for text in TEXTS:
            ids = original.encode(text).ids
            assert kind(text)["input_ids"] == begin + ids
            assert kind.decode(ids) == original.decode(ids, skip_special_tokens=False)
        turn = "<|im_start|>user\n1 egg<|im_end|>\n<|im_start|>assistant\n"
        assert encode(kind, "1 egg") == original.encode(turn).ids
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_begin_and_end_tokens_follow_the_file(tmp_path):
    metadata = metadata_of(published("gpt-2"), "gpt-2")
    plain = load_tokenizer(write(tmp_path / "a.gguf", metadata))("eggs")["input_ids"]
    more = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(write(tmp_path / "b.gguf", metadata | more))
    assert tokenizer("eggs")["input_ids"] == [1, *plain, 2]
    assert tokenizer("eggs", add_special_tokens=False)["input_ids"] == plain


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
WORDS = [
    "▁",
    "e",
    "g",
    "s",
    "t",
    "h",
    "a",
    "▁e",
    "gg",
    "▁egg",
    "▁eggs",
    "▁t",
    "th",
    "▁th",
    "▁the",
    "he",
    "at",
    "▁a",
    "▁at",
]


def sentencepiece(text: str) -> list[int]:
    """Return ids by the definition of SentencePiece's BPE: repeatedly merge the adjacent pair whose token has the best
    score, the leftmost first."""
    scores = {piece: -i for i, piece in enumerate(WORDS[7:])}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        candidates = [(scores.get(parts[i] + parts[i + 1], -1e9), -i) for i in range(len(parts) - 1)]
        best, at = max(candidates, default=(-1e9, 0))
        if best == -1e9:
            break
        parts[-at : -at + 2] = [parts[-at] + parts[-at + 1]]
    ids = []
    for part in parts:
        ids += [259 + WORDS.index(part)] if part in WORDS else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_ids_match_the_definition(tmp_path):
    tokens = [*PIECES, *WORDS]
    letters = 7
    scores = [0.0] * (259 + letters) + [-float(i) for i in range(len(WORDS) - letters)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", metadata))
    for text in ("the eggs", "at the  egg that has a hat", "é🙂 eggs\n12", "thegghat"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *sentencepiece(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    bare = load_tokenizer(
        write(tmp_path / "bare.gguf", metadata | {"tokenizer.ggml.add_space_prefix": False})
    )
    assert bare("egg")["input_ids"] == [1, *(259 + WORDS.index(piece) for piece in ("e", "gg"))]
    short = write(tmp_path / "short.gguf", metadata | {"tokenizer.ggml.scores": scores[:-1]})
    with pytest.raises(UserError, match=f"has {len(tokens)} tokens, but scores of {len(tokens) - 1}$"):
        load_tokenizer(short)


REFUSED = {
    "tokenizer.ggml.model": ("bert", "a tokenizer of type 'bert' is not supported, only gpt2, llama"),
    "tokenizer.ggml.pre": (
        "tekken",
        "pre-tokenizer 'tekken' is not supported, only gpt-2, smollm, qwen2, llama-bpe",
    ),
    "tokenizer.ggml.tokens": (None, "tokenizer.ggml.tokens is missing"),
    "tokenizer.ggml.token_type": ([1, 1], r"its tokenizer has \d+ tokens, but types of 2$"),
    "tokenizer.ggml.merges": (["☃"], "the tokenizer's merges do not fit its tokens"),
    "tokenizer.ggml.eos_token_id": (2**31, "eos_token must be a token id, got 2147483648"),
    "tokenizer.ggml.add_bos_token": (1, "tokenizer.ggml.add_bos_token must be bool, got 1"),
    "tokenizer.chat_template": ("x" * 2**21, "its chat template has 2,097,152 characters, expected at most"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tokenizers_are_refused(name, tmp_path):
    value, message = REFUSED[name]
    file = write(tmp_path / "model.gguf", metadata_of(published("smollm"), "smollm") | {name: value})
    with pytest.raises(UserError) as caught:
        load_tokenizer(file)
    assert re.match(f"{re.escape(str(file))}: {message}", str(caught.value))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["a", "b", "a"], "its tokens 0 and 2 are both 'a'"),
        (["a", "b" * 200_000], "a token has 200,000 characters, expected at most 4,096"),
        (["a" * (n + 1) for n in range(3000)], "its tokens are too long for all their merges to be found"),
    ],
)
def test_faulty_tokens_are_refused(tokens, message, tmp_path):
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    file = write(tmp_path / "model.gguf", {f"tokenizer.ggml.{name}": x for name, x in metadata.items()})
    with pytest.raises(UserError, match=re.escape(f"{file}: {message}")):
        load_tokenizer(file)


def test_panic_of_the_library_raises_one_line(tmp_path, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(*_):
        raise PanicException("called `Option::unwrap()`\non a `None` value")

    file = write(tmp_path / "model.gguf", metadata_of(published("gpt-2"), "gpt-2"))
    monkeypatch.setattr("tokenizers.decoders.ByteLevel", panics)
    with pytest.raises(UserError, match=r"its tokenizer cannot be read \(called `Option::unwrap\(\)` on a"):
        load_tokenizer(file)
