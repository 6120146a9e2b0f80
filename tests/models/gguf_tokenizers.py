"""Tokenizers of the published designs, and their metadata in a GGUF file."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The 1st of 12 eggs weighed 57 g; in 2023 it was 1234567 tons, they'll say.",
    "def f(x):\n    return x * 3.14159\n\n\tprint('don't')  # naïve café 日本語 🙂",
    "I'LL go WE'VE been  to   many places\r\n\r\nand back again, again and again the eggs",
]

CONTROL, USER = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool>"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(regex: str):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), level])


# the pre-tokenizers in the tokenizer.json of GPT-2, SmolLM2, Qwen2.5 and Llama 3
PUBLISHED = {
    "gpt-2": (GPT2, None),
    "smollm": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None),
    "qwen2": (split(CL100K % ""), normalizers.NFC()),
    "llama-bpe": (split(CL100K % "{1,3}"), None),
}


def published(name: str) -> Tokenizer:
    """Return a byte-level BPE of the published design, trained on the corpus. Its special tokens come first."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer, normalizer = PUBLISHED[name]
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*CONTROL, *USER], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    types = [3 if token in CONTROL else 4 if token in USER else 1 for token in tokens]
    # converters pad the embedding table with such tokens
    padding = ["[PAD1]", "[PAD2]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [*types, 5, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
