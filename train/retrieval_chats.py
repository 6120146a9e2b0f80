"""Chats about facts for training gates: values that are hidden among similar ones, or in text, and asked for later.

    python -m train.retrieval_chats --text text/train --out text/facts

Without such data gates learn from text alone, in which hardly any value is looked up again. The sentences are none of
RULER's, and no name has a word of RULER's keys.
"""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvjax.cli.launch import parse_command, run_command
from kvjax.errors import UserError
from kvjax.files import read_text, write_text

FIRST_NAMES = (
    "Ada Bruno Chiara Dmitri Elena Farid Greta Hiro Ines Jonas Kofi Leila Mateo Nadia Omar Petra Quinn Rosa Sven Tariq "
    "Uma Viktor Wanda Xenia Yusuf Zofia"
)
LAST_NAMES = (
    "Abel Brandt Castro Dorsey Eklund Fischer Garcia Haddad Ivanov Jansen Kowalski Larsen Moreau Novak Okafor Petrov "
    "Quist Rossi Sato Torres Ulrich Varga Weber Yilmaz Zhang"
)
THINGS = (
    "aqueduct awning banister boomerang broomstick camcorder candlestick canister carafe chessboard colander corkscrew "
    "crowbar dartboard decanter doormat gramophone griddle headlamp inkwell jukebox keyring knapsack lampshade lectern "
    "letterbox mousetrap nightstand nutcracker padlock paintbrush parasol periscope pinwheel pitchfork rucksack "
    "stapler tapestry thermos thimble toolbox tricycle weathervane wheelbarrow windmill wristwatch"
)
COLORS = (
    "beige burgundy cerise charcoal cobalt cyan ebony fuchsia indigo khaki lavender mahogany mauve navy ochre pewter "
    "sandstone sapphire sepia sienna taupe teal turquoise umber vermilion"
)
DIGITS, LETTERS = "0123456789", "ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"


def digits(rng: random.Random) -> str:
    """Return a number of four to nine digits."""
    return "".join(rng.choice(DIGITS) for _ in range(rng.randint(4, 9)))


def code(rng: random.Random) -> str:
    """Return one to three groups of four letters and digits."""
    groups = rng.choice([1, 2, 3])
    return "-".join("".join(rng.choice(LETTERS) for _ in range(4)) for _ in range(groups))


def word(rng: random.Random, words: str) -> str:
    return rng.choice(words.split())


def thing(rng: random.Random) -> str:
    return f"{word(rng, COLORS)} {word(rng, THINGS)}"


def person(rng: random.Random) -> str:
    return f"{word(rng, FIRST_NAMES)} {word(rng, LAST_NAMES)}"


Draw = Callable[[random.Random], str]
Fact = tuple[str, str]
"""A name and its value."""


class Kind(NamedTuple):
    """A kind of fact: what has a value, the values, and the sentences of the fact, the question and the answer, with
    the name as {0} and the value as {1}."""

    name: Draw
    value: Draw
    stated: str
    asked: str
    answered: str


KINDS = (
    Kind(
        person, digits, "{} can be reached at extension {}.", "At which extension can {} be reached?",
        "{} can be reached at extension {}.",
    ),
    Kind(
        thing, digits, "Item {} is stored under number {}.", "Under which number is item {} stored?",
        "Item {} is stored under number {}.",
    ),
    Kind(
        person, code, "{}'s membership card reads {}.", "What does {}'s membership card read?", "It reads {1}.",
    ),
    Kind(
        thing, code, "The serial of the {} was recorded as {}.", "Which serial was recorded for the {}?",
        "The serial of the {} is {}.",
    ),
    Kind(person, thing, "{} chose the {} as a prize.", "Which prize did {} choose?", "{} chose the {}."),
    Kind(
        code, digits, "Order {} came to {} units.", "How many units did order {} come to?",
        "Order {} came to {} units.",
    ),
    Kind(thing, person, "The {} belongs to {}.", "Who owns the {}?", "The {} belongs to {}."),
    Kind(digits, thing, "Room {} holds the {}.", "What does room {} hold?", "Room {} holds the {}."),
)  # fmt: skip


class Sizes(NamedTuple):
    """The sizes of a chat, in characters and questions."""

    listed: int
    """Characters of a list of facts."""
    text: int
    """Characters of the text in which facts are hidden."""
    rest: int
    """The least characters from the beginning of that text to the end of its file, if the file has as many."""
    questions: int


SIZES = Sizes(2000, 2300, 2600, 24), Sizes(4800, 5600, 6200, 32)
"""Sizes of chats that fill 1,024 and 2,048 tokens of Qwen2.5."""


@dataclasses.dataclass(frozen=True)
class ChatsConfig:
    """Write chats about facts, and copies of the text files, to a new folder to train on."""

    text: Path
    """The folder of .txt files in which facts are hidden."""
    out: Path
    """A new folder."""
    chats: int = 1264
    """The number of chats, half of them long."""
    seed: int = 0


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(ChatsConfig, args)
    if config.out.exists():
        raise UserError(f"--out {config.out} already exists")
    files = sorted(config.text.glob("*.txt"))
    if not files:
        raise UserError(f"--text {config.text}: there is no .txt file")
    texts, rng = [read_text(file, "--text") for file in files], random.Random(config.seed)
    config.out.mkdir(parents=True)
    for file in files:
        shutil.copy(file, config.out)
    for index in range(config.chats):
        record = json.dumps({"messages": chat(rng, texts, SIZES[index % 2])})
        # one file each, because files are shuffled, and the records of one file stay together
        write_text(config.out / f"chat-{index:04}.jsonl", record + "\n")
    print(f"{config.out}: {config.chats} chats and {len(files)} texts")


def chat(rng: random.Random, texts: Sequence[str], sizes: Sizes) -> list[dict[str, str]]:
    """Return a chat about a list of similar facts, or about facts of two kinds in a text. A fact may be asked for
    several times."""
    if rng.random() < 0.5:
        kind = rng.choice(KINDS)
        facts = [(kind, fact) for fact in draw_facts(rng, kind, sizes.listed // (len(kind.stated) + 22))]
        context = "\n".join(kind.stated.format(*fact) for _, fact in facts)
    else:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - sizes.rest))
        lines = text[start : start + sizes.text].split("\n")
        facts = [
            (kind, fact)
            for kind in rng.sample(KINDS, 2)
            for fact in draw_facts(rng, kind, rng.choice([2, 4, 8]))
        ]
        for kind, fact in facts:
            lines.insert(rng.randrange(len(lines) + 1), kind.stated.format(*fact))
        context = "\n".join(lines)
    messages = []
    for index, (kind, fact) in enumerate([rng.choice(facts) for _ in range(sizes.questions)]):
        question = kind.asked.format(*fact)
        question = f"{context}\n\n{question}" if index == 0 else question
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": kind.answered.format(*fact)},
        ]
    return messages


def draw_facts(rng: random.Random, kind: Kind, count: int) -> list[Fact]:
    """Return `count` facts with different names."""
    facts: dict[str, str] = {}
    while len(facts) < count:
        facts[kind.name(rng)] = kind.value(rng)
    return list(facts.items())


if __name__ == "__main__":
    run_command(main)
