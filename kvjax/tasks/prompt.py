"""Samples that are written as text, for any tokenizer: their examples, how an answer is scored, and their token ids.

The prompt reads: what the chat template puts before the user's text, context, question, what the template puts after
it, answer prefix. Without a template, or where the example is read `as_is`: the tokenizer's opening tokens unless
the text spells them, context, question, answer prefix.

The cut between context and question is a cut between tokens. The context's ids are those of the context alone, so they
are the same whatever is asked, and the same when question and context are read in one go. The question's ids are those
it has right after the context's end; a token that would reach over the cut (none does where the context ends with one
line break and the question starts with a letter, in the tokenizers we know) is cut in two there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvjax.chat_template import around, between
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens

REACH = 32
"""Characters of what comes before that a question is tokenised with."""


def all_present(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that occur in the answer, whatever their case."""
    return sum(wanted.lower() in answer.lower() for wanted in expected) / len(expected)


def any_present(answer: str, expected: Sequence[str]) -> float:
    """1 if one of the expected strings occurs in the answer, whatever its case; else 0."""
    return float(any(wanted.lower() in answer.lower() for wanted in expected))


Scoring = Callable[[str, Sequence[str]], float]
"""How an answer is scored: from 0 to 1, given the answer and the expected strings."""
SCORES: dict[str, Scoring] = {"all": all_present, "any": any_present}
"""Those that have a name."""


@dataclass(frozen=True)
class ExampleQuestion:
    """A question's text, and what is expected."""

    text: str
    """It follows the context directly."""
    answer_prefix: str
    """How the answer begins, given to the model. It starts with the white space that parts it from the question, and
    ends without."""
    expected: tuple[str, ...]
    """The strings that `scoring` looks for."""
    scoring: str | Scoring
    """A name in `SCORES`, or what scores."""
    reserved: int
    """How many tokens the answer may have."""
    kind: str
    """The row that it is reported under."""

    def score(self, answer: str) -> float:
        """From 0 to 1, for the text that the model wrote after the prefix."""
        scoring = SCORES[self.scoring] if isinstance(self.scoring, str) else self.scoring
        return scoring(answer, self.expected)


@dataclass(frozen=True)
class Example:
    """The text of a sample, which a `PromptEncoder` makes into one."""

    context: str
    """Ends with the line break before the question, if there is one."""
    questions: tuple[ExampleQuestion, ...]
    """Each asked on its own, unless they are a `conversation`."""
    as_is: bool = False
    """Whether no chat template is put around the text: it has one already, or is asked without."""
    conversation: bool = False
    """Whether the questions are asked in turn, each after what was asked and said before. The texts of all but the
    first then begin with the encoder's `next_turn`."""


class PromptEncoder:
    """Makes samples of examples, with a tokenizer of transformers or of tokenizers.

    The tokenizer's chat template is used if it has one, unless `chat` is false: context and question are the user's
    turn, the answer prefix begins the assistant's (without its leading white space). Models that can think are asked
    not to (`enable_thinking`), since the answer continues the prefix.

    Raises:
        UserError: a chat template that does not show the user's text once.
    """

    def __init__(self, tokenizer: Any, chat: bool = True):
        self._tokenizer = tokenizer
        self._callable = callable(tokenizer)  # as transformers' are, and those of tokenizers are not
        self._before, self._after = "", ""
        self.chat = chat and bool(getattr(tokenizer, "chat_template", None))
        if self.chat:
            self._before, self._after = around(tokenizer, enable_thinking=False)
        letter = self._ids("a")
        # some tokenizers also put tokens at the end, which a prompt must not have
        whole = self._ids("a", add_special_tokens=True).tolist()
        self._opening = as_tokens(whole[: whole.index(letter[0])])

    @property
    def template_size(self) -> int:
        """Tokens of the chat template around the user's text; 0 without one."""
        return len(self._ids(self._before + self._after))

    @cached_property
    def next_turn(self) -> str:
        """Text between an answer and the user's next text: the chat template's, or an empty line."""
        return between(self._tokenizer, enable_thinking=False) if self.chat else "\n\n"

    def said(self, answer: str) -> str:
        """Return the text between a user's text, to which `answer` was given, and the next."""
        return self._after + answer + self.next_turn

    def __call__(self, example: Example) -> Sample:
        chat = self.chat and not example.as_is
        before = self._before + example.context if chat else example.context
        context, opening = self._ids(before), self._opening
        if not chat and not np.array_equal(context[: len(opening)], opening):
            context = np.concatenate([opening, context])
        questions = (self._question(question, before, chat) for question in example.questions)
        separable = example.context != ""
        return Sample(context, tuple(questions), separable, conversation=example.conversation)

    def _question(self, question: ExampleQuestion, before: str, chat: bool) -> Question:
        """The question as it stands after `before`. A right answer has the strings that are expected, or the first
        where one of them will do."""

        def score(tokens: Tokens) -> float:
            return question.score(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

        text = question.text + question.answer_prefix
        if chat:
            text = question.text + self._after + question.answer_prefix.lstrip()
        wanted = ", ".join(question.expected if question.scoring == "all" else question.expected[:1])
        space = "" if text[-1:].isspace() else " "
        return Question(
            self._ids_after(before[-REACH:], text),
            self._ids_after(text[-REACH:], space + wanted),
            question.kind,
            score,
            question.reserved,
            stops=True,
        )

    def without_end(self, text: str, count: int) -> str:
        """Return a text without its last `count` tokens; the empty text if it has no more."""
        if self._callable:
            encoding = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            offsets = encoding["offset_mapping"]
        else:
            offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[-count][0]] if count < len(offsets) else ""

    def _ids(self, text: str, add_special_tokens: bool = False) -> Tokens:
        if self._callable:
            encoding = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return as_tokens(encoding["input_ids"])
        return as_tokens(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _ids_after(self, before: str, text: str) -> Tokens:
        """The ids of `text` as it stands after `before`: without what a tokenizer puts at the start of any text."""
        alone, joined = self._ids(before), self._ids(before + text)
        return joined[len(alone) :] if np.array_equal(joined[: len(alone)], alone) else self._ids(text)


def prompt_size(example: Example, encode: PromptEncoder) -> int:
    """Tokens of the longest of the example's prompts with its reserved answer tokens."""
    sample = encode(example)
    return len(sample.context) + sample.room
