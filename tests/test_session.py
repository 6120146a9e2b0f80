"""Tests of conversations: each turn continues the cache, with the result of one long text."""

import dataclasses
import json
from unittest.mock import Mock

import jaxtyping
import numpy as np
import pytest

from kvjax.cache import Cache
from kvjax.cache.saved import DESCRIPTION, describe_cache, digest_of
from kvjax.errors import UserError
from kvjax.inference import allocation, generate, prefill, stream
from kvjax.inference.saving import save_cache
from kvjax.llm import LLM
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from kvjax.session import Session
from tests.tasks.model_tokenizers import CHAT_TEMPLATE, THINKING, byte_tokenizer
from tests.tiny_models import tiny_gates, tiny_model

TEXTS = "Who?", "When?", "Why?"
NEW = 8
"""With the texts of the user, conversations have at most 128 tokens, so that all caches have the same shapes."""
SHORT = SamplingParams(max_new_tokens=NEW)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), qk_norm=False)


@pytest.fixture(scope="module")
def policy(model):
    return make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model))


@pytest.fixture(scope="module")
def llm(model, tokenizer, policy):
    return LLM(model, policy, tokenizer=tokenizer)


LETTERS = SamplingParams(max_new_tokens=33, logit_bias=dict.fromkeys(range(64, 90), 100.0))
"""Answers are letters only, since text with broken characters has other tokens when it is read again."""


def with_stops(model):
    """Return a model's config with a stop token that often ends its answers."""
    answer = generate(model, [np.arange(65, 97)], LETTERS).tokens[0]
    most_common = int(np.bincount(answer[5:]).argmax())
    return dataclasses.replace(model.config, eos_ids=(most_common,))


def test_answers_match_reading_the_whole_text_at_once(llm, model, tokenizer, policy):
    session = Session(llm, system="Brief.")
    for index, text in enumerate(TEXTS):
        before = len(session.tokens)
        answer = session.say(text, SHORT)
        assert session.messages[1 + 2 * index :] == [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer},
        ]
        prompt = tokenizer.apply_chat_template(
            session.messages[:-1], add_generation_prompt=True, tokenize=False
        )
        ids = session.tokens[: len(session.tokens) - NEW]
        assert tokenizer.decode(ids) == prompt
        assert ids[:before] == session.tokens[:before]
    whole = generate(model, [ids], SHORT, policy=policy, tokenizer=tokenizer)
    assert whole.texts == [answer]
    assert session.stats.tokens.tolist() == [len(session.tokens) - 1]


def test_policy_compresses_later_turns(model, tokenizer):
    """It compresses at the same points as without a session, for the same tokens."""
    policy = make_policy("r_kv:entries=40,when=every,every=8", model=model)
    session, cache, line = Session(LLM(model, policy, tokenizer=tokenizer)), None, []
    for text in TEXTS:
        session.say(text, SHORT)
        assert session.stats.entries.max() <= 40 + 8
        new = session.tokens[0 if cache is None else int(cache.seen[0]) : -NEW]
        blocks = list(stream(model, [new], SHORT, policy=policy, cache=cache))
        line += np.concatenate([block.tokens[0] for block in blocks]).tolist()
        cache = blocks[-1].cache
        assert line[-NEW:] == session.tokens[-NEW:]


def test_forks_share_only_their_beginning(llm):
    session = Session(llm)
    session.say(TEXTS[0], SHORT)
    other = session.fork()
    mine, theirs = session.say(TEXTS[1], SHORT), other.say(TEXTS[2], SHORT)
    assert len(session.messages) == len(other.messages) == 4
    assert session.messages[2:] != other.messages[2:]
    alone = Session(llm)
    alone.say(TEXTS[0], SHORT)
    assert alone.fork().say(TEXTS[1], SHORT) == mine
    assert alone.say(TEXTS[2], SHORT) == theirs


@pytest.fixture(scope="module")
def dropping(model, tokenizer):
    """Return an LLM whose caches know the positions of entries."""
    return LLM(model, make_policy("full:window=6,positions=true"), tokenizer=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_dropped_turn_is_invisible_to_later_turns(dropping, turn):
    """The turn is a message of the system, of the user or an answer. A fork still sees it."""
    session = Session(dropping, system="Brief.")
    session.say(TEXTS[0], LETTERS)
    session.say(TEXTS[1], SHORT)
    other, before = session.fork(), session.stats
    text = session.messages[turn]["content"]
    ids = dropping.tokenizer(text)["input_ids"]
    start = next(i for i in range(len(session.tokens)) if session.tokens[i : i + len(ids)] == ids)
    session.drop(turn)
    session.drop(turn)
    assert session.stats.entries.max() == before.entries.max() - len(text)
    assert session.stats.pages < before.pages or len(text) < 16
    want = other.cache.without(0, start, start + len(text))
    asked = [np.array(session.tokens[-1:])]
    greedy = SamplingParams(max_new_tokens=2, logprobs=0)
    dropped, expected, kept = (
        generate(dropping.model, asked, greedy, policy=dropping.policy, cache=x).logprobs[0].chosen
        for x in (session.cache, want, other.cache)
    )
    np.testing.assert_array_equal(dropped, expected)
    assert (dropped != kept).any()
    assert session.fork().say(TEXTS[2], SHORT) == session.say(TEXTS[2], SHORT)


def test_dropped_turns_stay_dropped_after_loading_and_rereading(dropping, tmp_path):
    """The conversation is saved and loaded, and then read again after a change."""
    session = Session(dropping)
    session.say(TEXTS[0], SHORT)
    session.drop(0)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, dropping)
    assert loaded.say(TEXTS[1], SHORT) == session.fork().say(TEXTS[1], SHORT)
    # a template that changes what was read
    loaded.messages[1]["content"] = "Nobody."
    loaded.say(TEXTS[2], SHORT)
    assert loaded.dropped == [0]
    assert loaded.stats.entries.max() == loaded.stats.tokens - len(TEXTS[0])


@pytest.mark.parametrize("text", [TEXTS[1], "What now?"])
@pytest.mark.parametrize("turn", [2, 3])
def test_changed_messages_become_visible_again(dropping, turn, text):
    """So does a new question with the same text as a dropped one."""
    session = Session(dropping)
    session.say(TEXTS[0], SHORT)
    session.say(TEXTS[1], SHORT)
    session.drop(0)
    session.drop(turn)
    del session.messages[2:]
    session.say(text, SHORT)
    assert session.dropped == [0]
    assert session.stats.entries.max() == session.stats.tokens - len(TEXTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("thoughtful", [False, True])
def test_changed_messages_are_read_before_turns_are_dropped(model, dropping, thinking, thoughtful):
    """Else the tokens of another text would be dropped."""
    session = Session(LLM(model, tokenizer=thinking) if thoughtful else dropping)
    session.say(TEXTS[0], SHORT)
    session.say(TEXTS[1], SHORT)
    session.messages[0]["content"] += " Or not?"
    with pytest.raises(UserError, match="messages were changed since they were read: call say first"):
        session.drop(2)
    session.say(TEXTS[2], SHORT)
    session.drop(2)
    assert session.dropped == [2]


def test_replaced_question_is_visible_with_thinking_templates(model, thinking):
    """The cache ends with the user's turn, so that it could be continued without reading the question."""
    llm = LLM(model, tokenizer=thinking)
    session = Session(llm)
    session.say(TEXTS[0], LETTERS)
    session.say(TEXTS[1], LETTERS)
    session.drop(2)
    del session.messages[2:]
    answer = session.say(TEXTS[1], LETTERS)
    assert session.dropped == []
    assert llm.generate(session.messages[:-1], LETTERS)[0].text == answer


def test_messages_that_cannot_be_dropped_again_become_visible(model, dropping, monkeypatch):
    tokenizer = byte_tokenizer()
    session = Session(LLM(model, dropping.policy, tokenizer=tokenizer))
    session.say(TEXTS[0], SHORT)
    session.drop(0)
    other = session.fork()
    # templates that change what was read
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ bos", "!{{ bos")
    monkeypatch.setattr(Cache, "without", Mock(side_effect=UserError("not yet")))
    with pytest.warns(UserWarning, match="message 0 was read again and not dropped: not yet$"):
        session.say(TEXTS[1], SHORT)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ m['c", "{{ m['content'] }}{{ m['c")
    with pytest.warns(UserWarning, match="message 0 was read again and not dropped: .* exactly once$"):
        other.say(TEXTS[1], SHORT)
    for conversation in (session, other):
        assert conversation.dropped == []
        assert conversation.stats.entries.max() == conversation.stats.tokens


def test_dropped_empty_message_stays_dropped(model, dropping):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | trim }}\n{% endfor %}"
    session = Session(LLM(model, dropping.policy, tokenizer=tokenizer))
    session.say(" ", SHORT)
    session.drop(0)
    session.messages[1]["content"] = "Nobody."
    session.say(TEXTS[1], SHORT)
    assert session.dropped == [0]


def test_turns_are_dropped_with_thinking_templates(model, thinking):
    session = Session(LLM(model, tokenizer=thinking))
    session.say(TEXTS[0], SHORT)
    with pytest.raises(UserError, match="the last answer is read with the next turn"):
        session.drop(1)
    session.messages[1]["content"] = "<think>\nhm\n</think>\n\nYes."
    session.say(TEXTS[1], SHORT)
    session.drop(0)
    session.drop(1)
    assert session.stats.entries.max() == session.stats.tokens - len(f"{TEXTS[0]}Yes.")


def test_saved_conversation_continues(llm, tmp_path):
    session = Session(llm, system="Brief.")
    session.say(TEXTS[0], SHORT)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, llm)
    turns = describe_cache(tmp_path)["turns"]
    for damage in ({"tokens": ["first", *session.tokens[1:]]}, {"dropped": {}}, {"dropped": ""}):
        write_turns(tmp_path, turns | damage)
        with pytest.raises(UserError, match="damaged .turns is"):
            Session.load(tmp_path, llm)
    assert loaded.messages == session.messages
    assert loaded.say(TEXTS[1], SHORT) == session.say(TEXTS[1], SHORT)


def write_turns(path, turns):
    """Replace the conversation of a saved cache."""
    description = describe_cache(path) | {"turns": turns}
    (path / DESCRIPTION).write_text(json.dumps(description | {"sha256": digest_of(description)}))


def test_conversation_of_an_older_kvjax_continues(dropping, tmp_path):
    """It lacks the ends of turns until it is read again."""
    session = Session(dropping)
    session.say(TEXTS[0], SHORT)
    session.save(tmp_path)
    turns = describe_cache(tmp_path)["turns"]
    write_turns(tmp_path, {name: turns[name] for name in ("messages", "tokens", "parts")})
    for text in TEXTS[1:]:
        session = Session.load(tmp_path, dropping)
        session.say(text, SHORT)
        with pytest.raises(UserError, match="an older kvjax saved the conversation"):
            session.drop(2)
        session.save(tmp_path)
    session.messages[1]["content"] = "Nobody."
    session.say(TEXTS[0], SHORT)
    session.drop(2)
    assert session.stats.entries.max() == session.stats.tokens - len(TEXTS[1])


@pytest.mark.slow
def test_answers_that_end_with_a_stop_token_are_continued(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), qk_norm=False)
    model.config = with_stops(model)
    session = Session(LLM(model, tokenizer=tokenizer))
    ended = []
    for text in TEXTS:
        session.say(text, LETTERS)
        prompt = tokenizer.apply_chat_template(
            session.messages[:-1], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = generate(model, [ids], LETTERS, tokenizer=tokenizer)
        ended += whole.finish_reasons
        assert session.messages[-1]["content"] == whole.texts[0]
    assert "stop" in ended


@pytest.mark.thorough
def test_conversation_without_a_template_is_one_text(model, policy):
    bare = byte_tokenizer()
    bare.chat_template = None
    session = Session(LLM(model, policy, tokenizer=bare))
    first = session.say("Once ", SHORT)
    second = session.say(" and then ", SHORT)
    ids = [*bare("Once ")["input_ids"], *session.tokens[5 : 5 + NEW], *bare(" and then ")["input_ids"]]
    assert session.tokens[: len(ids)] == ids
    whole = generate(model, [ids], SHORT, policy=policy, tokenizer=bare)
    assert (second, first) == (
        whole.texts[0],
        bare.decode(session.tokens[5 : 5 + NEW], skip_special_tokens=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "times"),
    [
        (CHAT_TEMPLATE, 1),  # this template trims the messages
        (CHAT_TEMPLATE.replace("{% for m", "{{ messages | length }}{% for m"), len(TEXTS)),
        (
            CHAT_TEMPLATE.replace(
                "{{ m['content'] | trim }}",
                "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:2] }}",
            ),
            1,
        ),
        # the template's probe has neither an answer without thoughts nor a W
        (
            CHAT_TEMPLATE.replace(
                "{{ m['c", "{{ '' if '<think>' in m['content'] or loop.index != 2 else '!' }}{{ m['c"
            ),
            2,
        ),
        (CHAT_TEMPLATE.replace("trim }}", "trim | replace('W', messages | length) }}"), len(TEXTS)),
    ],
)
def test_template_that_changes_earlier_text_causes_rereading(model, template, times, new_caches):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    llm = LLM(model, tokenizer=tokenizer)
    session = Session(llm)
    for text in TEXTS:
        answer = session.say(text, LETTERS)
    assert len(new_caches) == times
    assert llm.generate(session.messages[:-1], LETTERS)[0].text == answer


@pytest.fixture
def new_caches(monkeypatch):
    """Return a list with an item for each new cache that was allocated."""
    calls, empty_cache = [], allocation.empty_cache
    monkeypatch.setattr(allocation, "empty_cache", lambda *a, **k: calls.append(a) or empty_cache(*a, **k))
    return calls


@pytest.fixture
def thinking():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("admits", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_thoughts_of_earlier_turns_are_removed_as_by_the_template(
    model, policy, thinking, admits, variables, tmp_path, new_caches
):
    """Each answer matches reading all messages at once, though only the first turn needs a new cache."""
    llm = LLM(model, policy if admits else "full", tokenizer=thinking, chat_template_kwargs=variables)
    session = Session(llm, system="Brief.")
    for index, text in enumerate(TEXTS):
        new_caches.clear()
        answer = session.say(text, LETTERS)
        assert len(new_caches) == (index == 0)
        assert llm.generate(session.messages[:-1], LETTERS)[0].text == answer
        # the model is too small to think
        session.messages[-1]["content"] = f"<think>\nhm\n</think>\n\n{answer}"
        shown = thinking.apply_chat_template(session.messages[:-1], tokenize=False)
        assert thinking.decode(session.tokens) == shown
        assert "hm" not in shown
        assert session.stats.tokens.tolist() == [len(session.tokens)]
        if index == 0:
            session.save(tmp_path)
            others = Session.load(tmp_path, llm), session.fork()
    for other in others:
        assert session.messages[4]["content"].endswith(other.say(TEXTS[1], LETTERS))
    assert len(new_caches) == 1  # the cache of LLM.generate


def test_policy_compresses_later_turns_with_thinking_templates(model, thinking):
    session = Session(LLM(model, "r_kv:entries=40,when=every,every=8", tokenizer=thinking))
    for text in TEXTS:
        session.say(text, SHORT)
        session.messages[-1]["content"] = "<think>\nhm\n</think>\n\nYes."
        assert session.stats.entries.max() <= 40
    assert session.stats.tokens > 60


def test_failed_turn_leaves_the_conversation_unchanged(model, thinking, monkeypatch):
    session = Session(LLM(model, tokenizer=thinking))
    session.say(TEXTS[0], SHORT)
    before = session.cache, session.tokens, session.messages[:]
    monkeypatch.setattr("kvjax.session.whole_answers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.say(TEXTS[2], SHORT)
    assert (session.cache, session.tokens, session.messages) == before


def test_saved_conversation_continues_with_another_template(model, thinking, tokenizer, tmp_path):
    """The templates differ in keeping thoughts; both directions are tested."""
    for first, second in ((thinking, tokenizer), (tokenizer, thinking)):
        session = Session(LLM(model, tokenizer=first))
        session.say(TEXTS[0], LETTERS)
        session.save(tmp_path)
        llm = LLM(model, tokenizer=second)
        loaded = Session.load(tmp_path, llm)
        answer = loaded.say(TEXTS[1], LETTERS)
        assert llm.generate(loaded.messages[:-1], LETTERS)[0].text == answer


def test_invalid_calls_raise_one_line(llm, model, tokenizer, policy, tmp_path, monkeypatch):
    # users do not have the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UserError, match=r"Session: llm must be a kvjax\.LLM, got"):
        Session(model)
    with pytest.raises(UserError, match="Session: system must be a text, got 3"):
        Session(llm, system=3)
    session = Session(llm)
    with pytest.raises(UserError, match="expected a text, got ''"):
        session.say("")
    with pytest.raises(UserError, match="character 1 is not"):
        session.say("a\ud800b")
    for call in (lambda: session.save(tmp_path), lambda: session.stats):
        with pytest.raises(UserError, match="nothing was said yet"):
            call()
    with pytest.raises(UserError, match=r"Session\.drop: nothing was said yet"):
        session.drop(0)
    with pytest.raises(UserError, match="has no argument 'max_new_tokens'"):
        session.say("a", max_new_tokens=3)
    with pytest.raises(UserError, match="sampling must be one SamplingParams with n=1, got 3"):
        session.say("a", 3)
    with pytest.raises(UserError, match="stop must be tokens of the tokenizer, got .'ab'.: "):
        session.say("a", SamplingParams(stop=("ab", "<|im_end|>")))
    with pytest.raises(UserError, match=r"Session\.save has no argument 'paths'; it has path"):
        session.save(paths=tmp_path)
    save_cache(tmp_path / "cache", prefill(model, [[1, 2, 3]], policy=policy), model, policy)
    with pytest.raises(UserError, match="the saved cache has no conversation"):
        Session.load(tmp_path / "cache", llm)
    session.say(TEXTS[0], SHORT)
    with pytest.raises(UserError, match=r"Session\.drop: turn must be a whole number of at most 1, got 2"):
        session.drop(2)
    with pytest.raises(UserError, match="does not know the positions of its entries"):
        session.drop(0)
    with pytest.warns(UserWarning, match="compacts the first turn alone"):
        Session(LLM(model, "snapkv:ratio=0.5", tokenizer=tokenizer))
    # this policy causes no warning, which would be an error
    Session(LLM(model, "knorm:entries=20,when=every,every=8", tokenizer=tokenizer))
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="system= needs a tokenizer with a chat template"):
        Session(LLM(model, policy, tokenizer=bare), system="Be brief.")
