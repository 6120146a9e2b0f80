"""Samples as text, for any tokenizer: examples, the scoring of answers, and the encoding as token ids.

A prompt has the chat template's text before the user's, the context, the question, the template's text after the
user's, and the answer prefix. Without a template, or if the example is `as_is`, it has the tokenizer's opening
tokens (unless the text has them), the context, the question and the answer prefix.

Context and question are encoded separately. The context's ids do not depend on the question. The question's ids are
those that it has after the end of the context. A token across the boundary is split; with common tokenizers there is
none if the context ends with a single line break and the question starts with a letter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvjax.chat_template import between, text_around_placeholder
from kvjax.tasks.sample import Question, Sample, Tokens, as_tokens

REACH = 32
"""The number of preceding characters that are tokenised with a question."""


def all_present(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that occur in the answer, ignoring case."""
    return sum(wanted.lower() in answer.lower() for wanted in expected) / len(expected)


def any_present(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if an expected string occurs in the answer, ignoring case; else 0."""
    return float(any(wanted.lower() in answer.lower() for wanted in expected))


Scoring = Callable[[str, Sequence[str]], float]
"""Scores an answer from 0 to 1, given the answer and the expected strings."""
SCORES: dict[str, Scoring] = {"all": all_present, "any": any_present}
"""Scorings by name."""


@dataclass(frozen=True)
class ExampleQuestion:
    """A question's text and the expected answer."""

    text: str
    """The question. It follows the context directly."""
    answer_prefix: str
    """The given beginning of the answer. It starts with the white space between question and answer, and ends without
    white space."""
    expected: tuple[str, ...]
    """The strings that `scoring` looks for."""
    scoring: str | Scoring
    """A name in `SCORES`, or a scoring function."""
    reserved: int
    """The most tokens of the answer."""
    kind: str
    """The name under which its score is reported."""

    def score(self, answer: str) -> float:
        """Return the score, from 0 to 1, of the model's text after the prefix."""
        scoring = SCORES[self.scoring] if isinstance(self.scoring, str) else self.scoring
        return scoring(answer, self.expected)


@dataclass(frozen=True)
class Example:
    """A sample as text."""

    context: str
    """The context, with the line break before the question, if there is one."""
    questions: tuple[ExampleQuestion, ...]
    """Each is asked on its own, unless they are a `conversation`."""
    as_is: bool = False
    """True if no chat template is added, because the text has one already or needs none."""
    conversation: bool = False
    """True if each question follows the earlier questions and answers. All texts but the first then begin with the
    encoder's `next_turn`."""
    only_instructions: bool = False
    """True if the context has only instructions, and the question the whole problem."""

    @property
    def source(self) -> str:
        """The text that it is about, which other examples may share: its context, or else its question."""
        return self.questions[0].text if self.only_instructions or not self.context else self.context


class PromptEncoder:
    """Makes samples from examples, with a tokenizer of transformers or of tokenizers.

    The tokenizer's chat template is used if it has one, unless `chat` is False. Context and question are then the
    user's turn, and the answer prefix (without its leading white space) begins the assistant's. Thinking is disabled
    (`enable_thinking`), since the answer continues the prefix.

    Raises:
        UserError: a chat template that does not show the user's text exactly once.
    """

    def __init__(self, tokenizer: Any, chat: bool = True):
        self._tokenizer = tokenizer
        self._callable = callable(tokenizer)  # transformers' tokenizers are, those of tokenizers are not
        self._before, self._after = "", ""
        self.chat = chat and bool(getattr(tokenizer, "chat_template", None))
        if self.chat:
            self._before, self._after = text_around_placeholder(tokenizer, enable_thinking=False)
        letter = self._ids("a")
        # some tokenizers also add tokens at the end, which a prompt must not have
        with_special = self._ids("a", add_special_tokens=True).tolist()
        self._opening = as_tokens(with_special[: with_special.index(letter[0])])

    @property
    def template_size(self) -> int:
        """The number of tokens of the chat template around the user's text; 0 without one."""
        return len(self._ids(self._before + self._after))

    @cached_property
    def next_turn(self) -> str:
        """The text between an answer and the user's next text: the chat template's, or an empty line."""
        return between(self._tokenizer, enable_thinking=False) if self.chat else "\n\n"

    def answer_turn(self, answer: str) -> str:
        """Return the text between two user's texts, which contains the `answer` to the first."""
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
        """Return the question as token ids after the text `before`. Its right answer has the first expected string, or
        all if these score more."""

        def score(tokens: Tokens) -> float:
            return question.score(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

        text = question.text + question.answer_prefix
        if chat:
            text = question.text + self._after + question.answer_prefix.lstrip()
        first, every = ", ".join(question.expected[:1]), ", ".join(question.expected)
        right = every if first != every and question.score(every) > question.score(first) else first
        space = "" if text[-1:].isspace() else " "
        return Question(
            self._ids_after(before[-REACH:], text),
            self._ids_after(text[-REACH:], space + right),
            question.kind,
            score,
            question.reserved,
            stops=True,
        )

    def without_end(self, text: str, count: int) -> str:
        """Return a text without its last `count` tokens; the empty text if it has no other tokens."""
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
        """Return the ids of `text` after `before`, without the tokens that begin any text."""
        alone, joined = self._ids(before), self._ids(before + text)
        return joined[len(alone) :] if np.array_equal(joined[: len(alone)], alone) else self._ids(text)


def prompt_size(example: Example, encode: PromptEncoder) -> int:
    """Return the number of tokens of the example's longest prompt with its reserved answer tokens."""
    sample = encode(example)
    return len(sample.context) + sample.tokens_after_context
