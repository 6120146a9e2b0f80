"""Tests that `LLM` gives the results of `generate`, for all kinds of prompts, contexts, several answers and streams."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.cache import stats
from kvjax.errors import UserError
from kvjax.inference import generate
from kvjax.llm import LLM
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import save_gates
from kvjax.sampling_params import SamplingParams
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_gates, tiny_model

SHORT = SamplingParams(max_new_tokens=12)
TEXT, CHAT = "Who is Emma?", [{"role": "user", "content": "When?"}]
"""With the chat template, these and all other prompts here have at most 32 tokens, and are read in calls of 16."""


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), qk_norm=False)


@pytest.fixture(scope="module")
def llm(model, tokenizer):
    return LLM(model, tokenizer=tokenizer)


def test_prompts_are_texts_token_ids_or_chats(llm, model, tokenizer):
    prompts = [TEXT, [65, 66, 67], CHAT]
    found = llm.generate(prompts, SHORT)
    want = generate(model, prompts, SHORT, tokenizer=tokenizer)
    assert [out.text for out in found] == want.texts
    assert [out.prompt for out in found] == [0, 1, 2]
    for out, tokens in zip(found, want.tokens, strict=True):
        assert out.tokens == tokens.tolist()
        assert (out.finish_reason, out.kv_ratio, out.logprobs) == ("length", 1, None)
    for prompt, out in zip((TEXT, np.array([65, 66, 67]), CHAT), found, strict=True):
        (alone,) = llm.generate(prompt, SHORT)
        assert alone.text == out.text


@pytest.mark.slow
def test_more_answers_than_slots_are_generated_in_turns(model, tokenizer):
    prompts, few = [TEXT, [65, 66, 67], CHAT, "Why?"], LLM(model, tokenizer=tokenizer, slots=2)
    each = [SHORT, SamplingParams(max_new_tokens=5, temperature=1.0, n=2, logprobs=1), SHORT, SHORT]
    found, want = few.generate(prompts, each), LLM(model, tokenizer=tokenizer).generate(prompts, each)
    assert [out.prompt for out in found] == [0, 1, 1, 2, 3]
    for out, other in zip(found, want, strict=True):
        assert (out.text, out.tokens, out.finish_reason) == (other.text, other.tokens, other.finish_reason)
        assert out.kv_ratio == other.kv_ratio
        assert (out.logprobs is not None) == (out.prompt == 1)
        if out.logprobs is not None:
            np.testing.assert_allclose(out.logprobs, other.logprobs, atol=1e-5)
            assert [place.keys() for place in out.top_logprobs] == [
                place.keys() for place in other.top_logprobs
            ]
    halved = LLM(model, "knorm:ratio=0.5", tokenizer=tokenizer, slots=2)
    assert all(out.kv_ratio < 0.8 for out in halved.generate([TEXT, CHAT, TEXT], SHORT))


def test_context_is_read_once_and_used_repeatedly(model, tokenizer):
    """Each question is answered as if it were the only one, and the context does not change."""
    llm = LLM(model, "knorm:ratio=0.5", tokenizer=tokenizer)
    context = llm.prefill("A novel. " * 2)
    kept, questions = stats(context), ["Who wrote it?", "When?"]
    together = llm.generate(questions, SHORT, context=context)
    for index, question in enumerate(questions):
        (alone,) = llm.generate(question, SHORT, context=context)
        assert (alone.text, alone.kv_ratio) == (together[index].text, together[index].kv_ratio)
    assert all(kept.kv_ratio < out.kv_ratio < 1 for out in together)
    np.testing.assert_array_equal(stats(context).entries, kept.entries)
    # two contexts with one question each
    both = llm.prefill(["A novel. " * 2, "A letter."])
    asked = llm.generate(questions, SHORT, context=both)
    assert asked[0].text == together[0].text


@pytest.mark.slow
def test_several_answers_of_a_prompt_are_in_order(llm):
    sampling = SamplingParams(max_new_tokens=12, temperature=1.5, n=2, logprobs=1)
    found = llm.generate([TEXT, "When?"], sampling)
    assert [out.prompt for out in found] == [0, 0, 1, 1]
    assert found[0].text != found[1].text
    for out in found:
        assert out.logprobs.shape == (len(out.tokens),)
        assert list(map(len, out.top_logprobs)) == [1] * len(out.tokens)
    each = llm.generate([TEXT, "When?"], [SamplingParams(max_new_tokens=3), sampling])
    assert [(out.prompt, len(out.tokens)) for out in each] == [(0, 3), (1, 12), (1, 12)]
    assert [out.text for out in each[1:]] == [out.text for out in found[2:]]


def test_streamed_pieces_make_the_answer(llm):
    """The same holds if a stop text ends the answer. The stop text is never shown."""
    sampling = SamplingParams(max_new_tokens=33, temperature=1.5, seed=3)
    (whole,) = llm.generate(TEXT, sampling)
    pieces = list(llm.generate(TEXT, sampling, stream=True))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    stop = whole.text[20:22]
    sampling = SamplingParams(max_new_tokens=33, temperature=1.5, seed=3, stop=(stop,))
    (cut,) = llm.generate(TEXT, sampling)
    assert cut.finish_reason == "stop"
    assert "".join(llm.generate(TEXT, [sampling], stream=True)) == cut.text
    assert cut.text == whole.text[: whole.text.index(stop)]


@pytest.mark.slow
def test_chat_template_variables_apply_to_every_call(model):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{{ '' if thinks | default(true) else '<none>' }}"
    llm = LLM(model, tokenizer=tokenizer, slots=1, chat_template_kwargs={"thinks": False})
    # the texts are the same from a tokenizer whose template has no such variable
    fixed = byte_tokenizer()
    fixed.chat_template += "<none>"
    want = [out.text for out in LLM(model, tokenizer=fixed).generate([TEXT, CHAT], SHORT)]
    assert [llm.generate(prompt, SHORT)[0].text for prompt in (TEXT, CHAT)] == want
    assert [out.text for out in llm.generate([TEXT, CHAT], SHORT)] == want
    assert "".join(llm.generate(CHAT, SHORT, stream=True)) == want[1]
    context = llm.prefill(TEXT[:5])
    assert llm.generate(TEXT[5:], SHORT, context=context)[0].text == want[0]


def test_gates_are_read_from_a_folder(model, tokenizer, tmp_path):
    gates = tiny_gates(model)
    save_gates(tmp_path / "gates", gates, {"tau": 0.5, "window": 6})
    (found,) = LLM(model, "wgkv", gates=tmp_path / "gates", tokenizer=tokenizer).generate(TEXT, SHORT)
    policy = make_policy("wgkv:tau=0.5,window=6", model=model, gates=gates)
    (want,) = LLM(model, policy, tokenizer=tokenizer).generate(TEXT, SHORT)
    assert (found.text, found.kv_ratio) == (want.text, want.kv_ratio)
    assert found.kv_ratio < 1


def test_model_is_loaded_with_its_tokenizer():
    options = {"weights": "int8", "capacity": "8MiB"}
    llm = LLM(builtin_model("test_model"), "streaming_llm:window=8,sink=2", **options)
    assert llm.model.layers.qkv.dtype == jnp.int8
    (out,) = llm.generate("import os\nimport re\nimport sys\n", SamplingParams(max_new_tokens=4))
    assert out.text == llm.tokenizer.decode(out.tokens, skip_special_tokens=True)
    assert out.kv_ratio < 1


def test_invalid_calls_raise_one_line(llm, model, tmp_path, monkeypatch):
    # users do not have the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for call, message in (
        (lambda: LLM(model), "a loaded model needs tokenizer="),
        (lambda: LLM(model, tokenizer=llm.tokenizer, dtype="bfloat16"), "got dtype with a loaded model"),
        (lambda: LLM(model, tokenizer=llm.tokenizer, capacity="0%"), "more than 0% and at most 100%"),
        (lambda: LLM(builtin_model("test_model"), capacity="8 apples"), "expected entries per kv head"),
        (lambda: LLM(model, tokenizer=llm.tokenizer, page_size=0), "page_size must be .* at least 1, got 0"),
        (lambda: LLM(model, tokenizer=llm.tokenizer, chunk=0), "chunk must be .* at least 1, got 0"),
        (lambda: LLM(model, chat_template_kwargs=["a"]), r"chat_template_kwargs must be a .* got \['a'\]"),
        (
            lambda: LLM(model, chat_template_kwargs={1: True}),
            "chat_template_kwargs must be a .* got {1: True}",
        ),
        (lambda: LLM(model, chat_template_kwargs={"a": object}), "JSON values, got {'a': <class"),
        (lambda: LLM(model, chat_template_kwargs={"messages": []}), "other than messages and add_generation"),
        (lambda: LLM((model, llm.tokenizer)), "a model is the path of a folder"),
        (lambda: LLM((model, llm.tokenizer), "wgkv", gates="builtin"), "a model is the path of a folder"),
        (lambda: LLM(builtin_model("test_model"), "snapk:ratio=0.5"), "nearest.*: snapkv"),
        (lambda: LLM(builtin_model("test_model"), "wgkv", gates=tmp_path / "none"), "holds no gates"),
        (lambda: llm.generate(TEXT, max_new_tokens=3), "LLM.generate has no argument 'max_new_tokens'"),
        (lambda: llm.generate(TEXT, 8), "SamplingParams"),
        (
            lambda: llm.generate([TEXT, TEXT], stream=True),
            "stream=True is for one answer, got 2 prompts with 2",
        ),
        (lambda: llm.generate([]), "no prompt was given"),
        (lambda: llm.generate([[], [65]]), "prompt 0 is empty"),
        (lambda: llm.generate({"input_ids": [1]}), "prompts must be a text, token ids, a chat or a list"),
        (lambda: llm.generate([TEXT] * 3, context=llm.prefill([TEXT] * 2)), "the same number of questions"),
    ):
        with pytest.raises(UserError, match=message):
            call()
