"""Tests of lm-eval's adapter against plain attention, and against continuations scored one token at a time."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax.errors import UserError
from kvjax.inference import generate, logits, prefill
from kvjax.sampling_params import SamplingParams
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies warn of each other
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    from kvjax.evaluate.lm_eval import KVJaxLM

SNAPKV = "snapkv:entries=8,observed=4"
STORY = "The quick brown fox jumps over the lazy dog."
PAIRS = [
    (STORY, " It ran."),
    (STORY, " No"),
    ("Numbers:", " one two three"),
    ("", "alone"),
    (STORY, " It barked."),
    ("x", "y"),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=258)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def harness(model, tokenizer):
    """Return a function that makes the adapter of a policy."""

    def make(policy, batch_size=3):
        return KVJaxLM(kvjax.LLM(model, policy, tokenizer=tokenizer), batch_size=batch_size)

    return make


def requests_of(arguments):
    return [SimpleNamespace(args=adapter) for adapter in arguments]


def attention_scores(model, context, continuation):
    """Return the log-probabilities of a continuation's tokens and the most likely tokens in their places, by plain
    attention."""
    found = logits(model, [[*context, *continuation[:-1]]])[0, -len(continuation) :].astype(np.float64)
    found -= np.logaddexp.reduce(found, -1, keepdims=True)
    return found[np.arange(len(continuation)), continuation], found.argmax(-1)


def test_a_full_cache_scores_like_plain_attention(model, tokenizer, harness):
    found = harness("full").loglikelihood(requests_of(PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        ids = tokenizer.encode(continuation)
        before = tokenizer.encode(context) or [tokenizer.bos_token_id]
        expected, best = attention_scores(model, before, ids)
        assert score == pytest.approx(expected.sum(), abs=1e-4)
        assert greedy == (best.tolist() == ids)


def test_only_the_models_own_continuation_is_greedy(harness):
    adapter = harness("full")
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    ids = adapter.llm.generate([adapter.tok_encode(STORY)], sampling)[0].tokens
    pairs = [(None, adapter.tok_encode(STORY), x) for x in (ids, [*ids[:2], (ids[2] + 1) % 256])]
    assert [greedy for _, greedy in adapter._loglikelihood_tokens(pairs, disable_tqdm=True)] == [True, False]


GUIDED = {"snapkv": {"entries": 8, "observed": 4, "observers": [65, 66, 67]}}
"""A policy whose own tokens observe the context, in place of the context's last tokens."""


@pytest.mark.parametrize("policy", [SNAPKV, GUIDED, "keydiff:ratio=0.3", "streaming_llm:sink=2,window=6"])
def test_continuations_are_scored_from_the_entries_kept(model, tokenizer, harness, policy):
    """The scores equal those of one token at a time, predicted by a compacted cache that read the tokens before it."""
    adapter, guided = harness(policy), policy is GUIDED
    found = adapter.loglikelihood(requests_of(PAIRS[:3]), disable_tqdm=True)
    whole = harness("full").loglikelihood(requests_of(PAIRS[:3]), disable_tqdm=True)
    policy = adapter.llm.policy
    for (context, continuation), (score, _), (other, _) in zip(PAIRS, found, whole, strict=False):
        *ids, last = tokenizer.encode(context)
        looks = {"observers": [[last]]} if policy.observes and not guided else {}
        cache = prefill(model, [ids], policy=policy, max_new_tokens=64, **looks)
        expected, given = 0.0, [last]
        for token in tokenizer.encode(continuation):
            forced = SamplingParams(max_new_tokens=1, logit_bias={token: 100}, logprobs=0)
            step = generate(model, [given], forced, policy=policy, cache=cache)
            assert step.tokens[0].tolist() == [token]
            expected += float(step.logprobs[0].chosen[0])
            given.append(token)
        assert score == pytest.approx(expected, abs=1e-4)
        if context == STORY:
            assert abs(score - other) > 1e-3


def test_scores_do_not_depend_on_the_batch_size(harness):
    scores = [harness(SNAPKV, size).loglikelihood(requests_of(PAIRS), disable_tqdm=True) for size in (1, 16)]
    np.testing.assert_allclose(*([score for score, _ in adapter] for adapter in scores), atol=1e-4)


def test_a_long_context_loses_its_beginning(harness, monkeypatch):
    adapter = harness("full")
    expected = adapter.loglikelihood(requests_of([(STORY[-8:], "abc")]), disable_tqdm=True)
    monkeypatch.setattr(KVJaxLM, "max_length", 10)
    with pytest.warns(UserWarning, match="contexts longer than the model's 10 tokens lose their beginning"):
        found = adapter.loglikelihood(requests_of([(STORY, "abc")]), disable_tqdm=True)
    assert found[0][0] == pytest.approx(expected[0][0], abs=1e-4)


def test_whole_texts_are_scored_in_windows(model, tokenizer, harness, monkeypatch):
    monkeypatch.setattr(KVJaxLM, "max_length", 16)
    found = harness("full").loglikelihood_rolling(requests_of([(STORY,), ("short",)]), disable_tqdm=True)
    ids, bos = tokenizer.encode(STORY), tokenizer.bos_token_id
    spans = ([bos], ids[:16]), (ids[15:16], ids[16:32]), (ids[27:32], ids[32:])
    expected = sum(attention_scores(model, *span)[0].sum() for span in spans)
    assert found[0] == pytest.approx(expected, abs=1e-4)
    assert found[1] == pytest.approx(
        attention_scores(model, [bos], tokenizer.encode("short"))[0].sum(), abs=1e-4
    )


def test_unsupported_measurements_are_refused(harness, model, tokenizer):
    with pytest.raises(UserError, match="evicts from prompts, and loglikelihood_rolling has none"):
        harness(SNAPKV).loglikelihood_rolling(requests_of([("text",)]))
    with pytest.raises(UserError, match="compacts while decoding, which log-likelihoods do not measure"):
        harness("knorm:entries=16,when=every,every=4").loglikelihood(requests_of(PAIRS), disable_tqdm=True)
    with pytest.raises(UserError, match="got an LLM with policy, expected these in the LLM"):
        KVJaxLM(kvjax.LLM(model, tokenizer=tokenizer), policy="full")


def test_answers_end_before_until(harness):
    adapter = harness(SNAPKV)
    free, again = (
        adapter.generate_until(requests_of([(STORY, own)]), disable_tqdm=True)[0]
        for own in (
            {"max_gen_toks": 12, "do_sample": False, "temperature": 0.7},
            {"max_new_tokens": 12, "until": []},
        )
    )
    expected = adapter.llm.generate([adapter.tok_encode(STORY)], SamplingParams(max_new_tokens=12))[0].text
    assert free == again == expected
    requests = [(STORY, {"until": free[5], "max_gen_toks": 12}), ("", {"max_gen_toks": 2})]
    cut, empty = adapter.generate_until(requests_of(requests), disable_tqdm=True)
    assert cut == free[: free.index(free[5])]
    assert isinstance(empty, str)


def test_chats_are_rendered_by_the_tokenizers_template(harness, tokenizer):
    adapter, chat = harness("full"), [{"role": "user", "content": "Hi"}]
    text = adapter.apply_chat_template(chat)
    assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert adapter.tok_encode(text) == tokenizer.encode(text, add_special_tokens=False)
    begun = [*chat, {"role": "assistant", "content": "The answer is"}]
    opened = adapter.apply_chat_template(begun, add_generation_prompt=False)
    assert opened == text + "The answer is"
    assert adapter.chat_template(True) == tokenizer.chat_template
    assert adapter.tokenizer_name == ""


@pytest.mark.filterwarnings("ignore")
def test_the_harness_evaluates_a_local_task(harness, tmp_path):
    """There are eight questions with two choices each. The more likely choice is labelled right, except for the first
    question."""
    adapter = harness(SNAPKV)
    questions = [f"{STORY} Question {n}:" for n in range(8)]
    choices = ["yes", "maybe"]
    pairs = [(question, f" {choice}") for question in questions for choice in choices]
    scores = np.reshape(
        [score for score, _ in adapter.loglikelihood(requests_of(pairs), disable_tqdm=True)], (8, 2)
    )
    labels = scores.argmax(-1)
    labels[0] = 1 - labels[0]
    rows = [
        {"question": question, "choices": choices, "label": int(label)}
        for question, label in zip(questions, labels, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "local.yaml").write_text(json.dumps(task))
    assert get_model("kvjax") is KVJaxLM
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(model=adapter, tasks=["local"], task_manager=manager, bootstrap_iters=0)
    assert results["results"]["local"]["acc,none"] == 7 / 8
