"""Token ids of text samples, by any tokenizer, with the context's apart from the question's.

The prompt reads: what the chat template puts before the user's text, context, question, what the template puts after
it, answer prefix. Without a template, or where the sample's text has one already: the tokenizer's opening tokens unless
the text spells them, context, question, answer prefix.

The cut between context and question is a cut between tokens. The context's ids are those of the context alone, so they
are the same whatever is asked, and the same when question and context are read in one go. The question's ids are those
it has right after the context's end; a token that would reach over the cut (none does where the context ends with one
line break and the question starts with a letter, in the tokenizers we know) is cut in two there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.task import Tokens, as_tokens
from kvjax.tasks.text_sample import TextQuestion, TextSample

PLACE = "<<the user's text>>"
"""Stands for the user's text in a rendered chat template."""

REACH = 32
"""Characters of what comes before that a question is tokenised with."""


@dataclass(frozen=True)
class Prompt:
    """A sample as token ids: its context, each question with template and answer prefix, and what is expected after
    each."""

    context: Tokens
    questions: tuple[Tokens, ...]
    answers: tuple[Tokens, ...]


class PromptEncoder:
    """Makes prompts with a tokenizer of transformers or of tokenizers.

    The tokenizer's chat template is used if it has one, unless `chat` is false: context and question are the user's
    turn, the answer prefix begins the assistant's (without its leading white space). Models that can think are asked
    not to (`enable_thinking`), since the answer continues the prefix.

    Raises:
        UserError: a chat template that does not show the user's text once.
    """

    def __init__(self, tokenizer: Any, chat: bool = True):
        self._tokenizer = tokenizer
        self._called = callable(tokenizer)  # as transformers' are, and those of tokenizers are not
        self._before, self._after = "", ""
        self.chat = chat and bool(getattr(tokenizer, "chat_template", None))
        if self.chat:
            rendered = tokenizer.apply_chat_template(
                [{"role": "user", "content": PLACE}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            if rendered.count(PLACE) != 1:
                raise UserError("the tokenizer's chat template does not show the user's text exactly once")
            self._before, _, self._after = rendered.partition(PLACE)
        letter = self._ids("a")
        # some tokenizers also put tokens at the end, which a prompt must not have
        opened = self._ids("a", add_special_tokens=True).tolist()
        self._opening = as_tokens(opened[: opened.index(letter[0])])

    @property
    def template_size(self) -> int:
        """Tokens of the chat template around the user's text; 0 without one."""
        return len(self._ids(self._before + self._after))

    def __call__(self, sample: TextSample) -> Prompt:
        chat = self.chat and not sample.templated
        before = self._before + sample.context if chat else sample.context
        context, opening = self._ids(before), self._opening
        if not chat and not np.array_equal(context[: len(opening)], opening):
            context = np.concatenate([opening, context])
        asked = [self._asked(question, chat) for question in sample.questions]
        return Prompt(
            context,
            tuple(self._continued(before[-REACH:], text) for text in asked),
            tuple(map(self._answer, asked, sample.questions)),
        )

    def _asked(self, question: TextQuestion, chat: bool) -> str:
        if chat:
            return question.text + self._after + question.answer_prefix.lstrip()
        return question.text + question.answer_prefix

    def _answer(self, asked: str, question: TextQuestion) -> Tokens:
        """A right answer to what was asked: the strings that are expected, or the first where one of them will do."""
        wanted = ", ".join(question.expected if question.scoring == "all" else question.expected[:1])
        space = "" if asked[-1:].isspace() else " "
        return self._continued(asked[-REACH:], space + wanted)

    def _ids(self, text: str, add_special_tokens: bool = False) -> Tokens:
        if self._called:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
            return as_tokens(encoded["input_ids"])
        return as_tokens(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _continued(self, before: str, text: str) -> Tokens:
        """The ids of `text` as it stands after `before`: without what a tokenizer puts at the start of any text."""
        alone, joined = self._ids(before), self._ids(before + text)
        return joined[len(alone) :] if np.array_equal(joined[: len(alone)], alone) else self._ids(text)


def prompt_size(sample: TextSample, encode: PromptEncoder) -> int:
    """Tokens of the longest of the sample's prompts with its reserved answer tokens."""
    prompt = encode(sample)
    asked = zip(prompt.questions, sample.questions, strict=True)
    return len(prompt.context) + max(len(ids) + question.reserved for ids, question in asked)
