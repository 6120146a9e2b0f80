"""What the tests of RULER's tasks share: question files, tokenizers, and fixtures of both (imported by name)."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvjax.builtin import builtin_model
from kvjax.tasks import heldout_files
from kvjax.tasks.ruler import Files
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)

CHAT_ML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def squad():
    """Thirty articles of five paragraphs; each paragraph has two questions, one without an answer."""

    def paragraph(i, j):
        text = (
            f"In the year {1000 + 5 * i + j} the {ADJECTIVES[i]} {NOUNS[j]} was given to guild{i}x{j}. "
            + "Nobody knows why. " * ((3 * i + j) % 7)
        )
        right = {"text": f"guild{i}x{j}", "answer_start": 0}
        return {
            "context": text,
            "qas": [
                {"question": f"Who owned it after {1000 + 5 * i + j}?", "answers": [right, right]},
                {"question": "Why?", "answers": [], "is_impossible": True},
            ],
        }

    articles = [{"title": f"a{i}", "paragraphs": [paragraph(i, j) for j in range(5)]} for i in range(30)]
    return {"version": "2.0", "data": articles}


def hotpotqa():
    """A hundred questions with ten documents each, of which two are needed."""

    def entry(i):
        context = [
            [
                f"{NOUNS[i]} {j}",
                [f"The {ADJECTIVES[i]} {NOUNS[i]} has the mark m{i}n{j}. ", "It is old. " * (j % 4)],
            ]
            for j in range(10)
        ]
        return {
            "_id": str(i),
            "question": f"Which mark has the {ADJECTIVES[i]} one?",
            "answer": f"m{i}n3",
            "supporting_facts": [[f"{NOUNS[i]} 3", 0], [f"{NOUNS[i]} 1", 1]],
            "context": context,
        }

    return [entry(i) for i in range(100)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    (folder / "squad.json").write_text(json.dumps(squad()))
    (folder / "hotpot.json").write_text(json.dumps(hotpotqa()))
    return Files(squad=folder / "squad.json", hotpotqa=folder / "hotpot.json")


@pytest.fixture(scope="module")
def builtin():
    return Tokenizer.from_file(str(builtin_model() / "tokenizer.json"))


@pytest.fixture(scope="session")
def smol():
    """As SmolLM2's: bytes, every digit a token, a chat template with a system prompt of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    words = [f"a {word} " for word in (*ADJECTIVES, *NOUNS)] * 3
    tokenizer.train_from_iterator([*heldout_files().values(), *words], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_ML,
    )


@pytest.fixture(scope="module")
def chatty():
    """A tokenizer that starts a text with a space and a mark, knows no borders but spaces, and has a chat template."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [chr(i) for i in range(33, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(heldout_files().values())[:3], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
