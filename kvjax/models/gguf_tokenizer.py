"""The tokenizer in a GGUF file's metadata, as a tokenizer of transformers.

transformers' own conversion is not used. It needs torch, and it converts the byte-level BPE of a llama incorrectly (in
5.2): it does not split digits, uses the begin token as the end token, always adds the begin token, and invents five
tokens whose ids the model does not have.
"""

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.chat_template import MAX_CHARACTERS
from kvjax.errors import LARGEST_INT, UserError, shown
from kvjax.models.gguf_config import config_keys
from kvjax.models.gguf_file import GgufFile
from kvjax.models.json_file import JsonObject, write_json
from kvjax.models.quiet import quiet

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Token types."""
_LONGEST_TOKEN = 4096
"""The maximum characters of a token. The longest tokens of published vocabularies have a few hundred."""
_MAX_SPLITS = 1 << 27
"""The maximum sum of the squared lengths of SentencePiece's tokens, since every way to split a token in two is tried.
The sum is 2 million for Llama 2."""


@dataclasses.dataclass(frozen=True)
class _ByteLevel:
    """The steps of a byte-level BPE before merges, which `tokenizer.ggml.pre` names. The regexes come from the
    published tokenizer.json files."""

    regex: str | None = None
    """The regex that splits the text; None: GPT-2's."""
    digits: bool = False
    """True if every digit is split off first."""
    nfc: bool = False
    """True if the text is normalised (NFC)."""
    ignore_merges: bool = False
    """True if a word that is a token becomes that token without merges."""
    add_bos: bool = False
    """True if texts begin with the begin token by default."""


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {
    "gpt-2": _ByteLevel(),
    "smollm": _ByteLevel(digits=True),
    "qwen2": _ByteLevel(_QWEN2, nfc=True),
    "llama-bpe": _ByteLevel(_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), ignore_merges=True, add_bos=True),
}


def gguf_tokenizer(file: GgufFile) -> Any:
    """Return the Hugging Face tokenizer of a GGUF file. torch is not needed.

    Raises:
        UserError: the file has no tokenizer, or an unsupported one.
    """
    try:
        return _tokenizer(file)
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the library are not subclasses of Exception
        raise file.metadata.error(f"its tokenizer cannot be read ({error})") from None


def _tokenizer(file: GgufFile) -> Any:
    from tokenizers import AddedToken, processors

    with quiet():
        from transformers import PreTrainedTokenizerFast

    metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model", str)
    if model not in _MAKERS:
        raise metadata.error(f"a tokenizer of type {model!r} is not supported, only {', '.join(_MAKERS)}")
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    template = metadata.get("tokenizer.chat_template", str, None)
    for noun, text, max_length in (
        ("a token", max(tokens, key=len, default=""), _LONGEST_TOKEN),
        ("its chat template", template or "", MAX_CHARACTERS),
    ):
        if len(text) > max_length:
            raise metadata.error(f"{noun} has {len(text):,} characters, expected at most {max_length:,}")
    if len(types) != len(tokens):
        raise metadata.error(f"its tokenizer has {len(tokens)} tokens, but types of {len(types)}")
    # unused tokens only pad the embedding table
    vocabulary = {token: id_ for id_, token in enumerate(tokens) if types[id_] != _UNUSED}
    for id_, token in enumerate(tokens):
        if vocabulary.get(token, id_) != id_ and types[id_] != _UNUSED:
            raise metadata.error(f"its tokens {id_} and {vocabulary[token]} are both {shown(token)}")
    tokenizer, add_bos = _MAKERS[model](metadata, vocabulary, types)

    def tokens_of_type(type_: int) -> list[AddedToken]:
        return [
            AddedToken(token, normalized=False) for token, id_ in vocabulary.items() if types[id_] == type_
        ]

    tokenizer.add_special_tokens(tokens_of_type(_CONTROL))
    tokenizer.add_tokens(tokens_of_type(_USER_DEFINED))

    ids = {
        name: metadata.get(f"tokenizer.ggml.{key}_token_id", int, None)
        for name, key in _SPECIAL_TOKENS.items()
    }
    for name, id_ in ids.items():
        if id_ is not None and not 0 <= id_ <= LARGEST_INT:
            raise metadata.error(f"{name} must be a token id, got {id_}")
    special = {name: tokens[id_] for name, id_ in ids.items() if id_ is not None and id_ < len(tokens)}

    def added_token(name: str, default: bool) -> list[str]:
        adds = metadata.get(f"tokenizer.ggml.add_{name}", bool, default)
        return [special[name]] if adds and name in special else []

    begin, end = added_token("bos_token", add_bos), added_token("eos_token", False)
    if begin or end:
        first, second = ([*begin, f"${name}", *end] for name in "AB")
        ids = [(token, vocabulary[token]) for token in (*begin, *end)]
        tokenizer.post_processor = processors.TemplateProcessing(first, [*first, *second], ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        model_max_length=file.get("context_length", int),
        clean_up_tokenization_spaces=False,
        **special,
    )


def save_gguf_tokenizer(file: GgufFile, to: Path) -> None:
    """Write the tokenizer and the generation defaults as files of a Hugging Face folder."""
    tokenizer = gguf_tokenizer(file)
    tokenizer.save_pretrained(to, save_jinja_files=False)
    keys = config_keys(file).data
    eos = keys["eos_token_id"]
    generation = {
        "bos_token_id": keys["bos_token_id"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": tokenizer.pad_token_id,
    }
    write_json(to / "generation_config.json", generation)


def _byte_level(metadata: JsonObject, vocabulary: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """Return a byte-level BPE, and True if texts begin with the begin token by default."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", str)
    if name not in _BYTE_LEVEL:
        raise metadata.error(f"pre-tokenizer {name!r} is not supported, only {', '.join(_BYTE_LEVEL)}")
    kind = _BYTE_LEVEL[name]
    # a merge without a space gives an empty half, which is not a token and is refused later
    merges = [merge.partition(" ")[::2] for merge in metadata.get("tokenizer.ggml.merges", list)]
    tokenizer = _bpe(metadata, vocabulary, merges, ignore_merges=kind.ignore_merges)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    if kind.regex:
        steps.append(pre_tokenizers.Split(Regex(kind.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.add_bos


def _sentencepiece(metadata: JsonObject, vocabulary: dict[str, int], types: list[int]) -> tuple[Any, bool]:
    """Return SentencePiece's BPE in the form of Llama 2's published tokenizer.json, and True, since its texts begin
    with the begin token. SentencePiece merges the pair that makes the token with the best score. So every way to split
    a token in two is a merge, and merges are ordered by the scores of their tokens."""
    from tokenizers import decoders, normalizers

    tokens, scores = (metadata.get(f"tokenizer.ggml.{name}", list) for name in ("tokens", "scores"))
    if len(scores) != len(types):
        raise metadata.error(f"its tokenizer has {len(types)} tokens, but scores of {len(scores)}")
    if not all(isinstance(score, int | float) and score == score for score in scores):
        raise metadata.error("tokenizer.ggml.scores must be a list of numbers")
    pieces = {token: id_ for token, id_ in vocabulary.items() if types[id_] == _NORMAL}
    if sum(len(token) ** 2 for token in pieces) > _MAX_SPLITS:
        longest = max(map(len, pieces))
        raise metadata.error(
            f"its tokens are too long for all their merges to be found: {len(pieces):,} of up to {longest:,} characters"
        )
    merges = [
        (-scores[id_], pieces[token[:cut]], pieces[token[cut:]])
        for token, id_ in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    unknown = next((token for token, id_ in vocabulary.items() if types[id_] == _UNKNOWN), None)
    ordered = [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
    tokenizer = _bpe(metadata, vocabulary, ordered, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _bpe(
    metadata: JsonObject, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Any:
    from tokenizers import Tokenizer, models

    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # tokenizers has no specific exception
        why = str(error).splitlines()[0]
        raise metadata.error(f"the tokenizer's merges do not fit its tokens ({why})") from None


_MAKERS = {"gpt2": _byte_level, "llama": _sentencepiece}
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
