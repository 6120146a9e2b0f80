"""Test log-probabilities of answers and prompts, and the texts and bytes of single tokens."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest

from kvjax import SamplingParams
from kvjax.engine import Request
from kvjax.inference import logits
from kvjax.serve.reply import Choice
from kvjax.serve.token_texts import TokenTexts
from kvjax.serve.worker import Answer, Update
from tests.serve.running import NAME, chat, model
from tests.tasks.model_tokenizers import byte_tokenizer, spaced_tokenizer


@pytest.mark.slow
def test_echo_returns_the_log_probabilities_of_the_prompt(served):
    tokens = byte_tokenizer()("Who is Emma?")["input_ids"]
    (choice,) = (
        served.client()
        .completions.create(model=NAME, prompt=tokens, echo=True, logprobs=2, max_tokens=0, temperature=0)
        .choices
    )
    all_logits = logits(model(), [tokens])[0]
    norm = np.log(np.exp(all_logits).sum(-1))
    expected = all_logits[np.arange(len(tokens) - 1), tokens[1:]] - norm[:-1]
    assert choice.text == "Who is Emma?"
    assert choice.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, rtol=1e-4, atol=1e-5)
    assert choice.logprobs.text_offset == list(range(len(tokens)))
    top = max(choice.logprobs.top_logprobs[-1].values())
    np.testing.assert_allclose(top, all_logits[-2].max() - norm[-2], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_log_probabilities_and_usage_end_with_the_text(served):
    client, options = served.client(), {"max_tokens": 30, "logprobs": True}
    whole = chat(client, "Who is Emma?", **options).choices[0]
    # Some stop texts begin in one block and end in the next.
    for start in range(4, 9):
        stop = whole.message.content[start : start + 2]
        cut = chat(client, "Who is Emma?", stop=stop, **options)
        text = cut.choices[0].message.content
        assert text == whole.message.content[: whole.message.content.index(stop)]
        assert "".join(token.token for token in cut.choices[0].logprobs.content) == text
        assert cut.usage.completion_tokens == len(cut.choices[0].logprobs.content)


def test_the_token_that_ends_a_completion_has_its_log_probability(served):
    """lm-evaluation-harness asks for one token after the text that it scores."""
    tokens = byte_tokenizer()("Who is Emma?")["input_ids"]
    (choice,) = (
        served.client()
        .completions.create(
            model=NAME,
            prompt=tokens,
            echo=True,
            logprobs=1,
            max_tokens=1,
            temperature=0,
            logit_bias={"257": 100},
        )
        .choices
    )
    assert choice.text == "Who is Emma?"
    assert len(choice.logprobs.token_logprobs) == len(tokens) + 1


def test_texts_of_tokens_add_up_to_the_text():
    """The tokenizer shows a space before a word, but not at the beginning of a text."""
    tokenizer = spaced_tokenizer()
    tokens, texts = tokenizer("the cat sat")["input_ids"], TokenTexts(tokenizer)
    parts = [texts.text(token, before) for before, token in itertools.pairwise([None, *tokens])]
    visible = [text for text, token in zip(parts, tokens, strict=True) if token not in texts.special]
    assert "".join(visible) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("words", [" cat sat", ".", "s and s"])
def test_a_completion_goes_on_where_the_prompt_ends(words):
    """The tokenizer drops the space at the beginning of an answer."""
    tokenizer = spaced_tokenizer()
    tokens = tokenizer(f"the door{words}", add_special_tokens=False)["input_ids"]
    count = len(tokenizer("the door", add_special_tokens=False)["input_ids"])
    request = Request(np.array(tokens[:count]), SamplingParams(), 0, 0, (), tokenizer=tokenizer)
    request.extend(tokens[count:])
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        choice = Choice(0, Answer(request, loop), tokenizer, echo=True)
        updates = Update(request.text, tokens[count:], [], None), Update("", [], [], "stop")
        pieces = [piece for update in updates for piece in choice.pieces(update)]
    assert choice.whole(pieces)["text"] == tokenizer.decode(tokens)


def test_a_part_of_a_character_has_its_own_bytes():
    texts, tokens = TokenTexts(byte_tokenizer()), byte_tokenizer()("é")["input_ids"]
    assert [x for token in tokens for x in texts.bytes(token, texts.text(token, None))] == [*"é".encode()]
