"""What the tests of RULER's tasks share: question files, tokenizers, and fixtures of both (imported by name)."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvjax.builtin import builtin_model
from kvjax.evaluate.tasks import heldout_files
from kvjax.evaluate.tasks.ruler import Files
from kvjax.evaluate.tasks.ruler.words import ADJECTIVES, NOUNS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def squad():
    """Thirty articles of five paragraphs; each paragraph has two questions, one without an answer."""

    def paragraph(i, j):
        text = (
            f"In the year {1000 + 5 * i + j} the {ADJECTIVES[i]} {NOUNS[j]} was given to guild{i}x{j}. " * 2
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
    """Forty questions with two right documents and three others."""

    def entry(i):
        context = [
            [f"{NOUNS[i]} {j}", [f"The {ADJECTIVES[i]} {NOUNS[i]} has the mark m{i}n{j}. ", "It is old. "]]
            for j in range(5)
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
