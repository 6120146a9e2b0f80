"""Test conversations: every turn is read after the cached ones, with the result of one long text."""

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

SAID = "Who?", "When?", "Why?"
NEW = 8
"""With the texts of the user, conversations have at most 128 tokens, and so one cache's shapes."""
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
"""Answers are letters only: a text of half characters has other tokens when it is read again."""


def with_stops(model):
    """Return a model's config with a stop token that often ends its answers."""
    said = generate(model, [np.arange(65, 97)], LETTERS).tokens[0]
    common = int(np.bincount(said[5:]).argmax())
    return dataclasses.replace(model.config, eos_ids=(common,))


def test_the_last_answer_is_that_of_the_whole_text_read_at_once(llm, model, tokenizer, policy):
    session = Session(llm, system="Brief.")
    for index, text in enumerate(SAID):
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


def test_a_policy_goes_on_compressing(model, tokenizer):
    """It compresses at the same points as for a prefill, questions and answers of the same tokens."""
    policy = make_policy("r_kv:entries=40,when=every,every=8", model=model)
    session, cache, line = Session(LLM(model, policy, tokenizer=tokenizer)), None, []
    for text in SAID:
        session.say(text, SHORT)
        assert session.stats.entries.max() <= 40 + 8
        new = session.tokens[0 if cache is None else int(cache.seen[0]) : -NEW]
        blocks = list(stream(model, [new], SHORT, policy=policy, cache=cache))
        line += np.concatenate([block.tokens[0] for block in blocks]).tolist()
        cache = blocks[-1].cache
        assert line[-NEW:] == session.tokens[-NEW:]


def test_forks_share_a_beginning_and_nothing_else(llm):
    session = Session(llm)
    session.say(SAID[0], SHORT)
    other = session.fork()
    mine, theirs = session.say(SAID[1], SHORT), other.say(SAID[2], SHORT)
    assert len(session.messages) == len(other.messages) == 4
    assert session.messages[2:] != other.messages[2:]
    alone = Session(llm)
    alone.say(SAID[0], SHORT)
    assert alone.fork().say(SAID[1], SHORT) == mine
    assert alone.say(SAID[2], SHORT) == theirs


@pytest.fixture(scope="module")
def dropping(model, tokenizer):
    """Return an LLM whose caches know the positions of entries."""
    return LLM(model, make_policy("full:window=6,positions=true"), tokenizer=tokenizer)


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_turn_that_is_dropped_is_not_seen_by_later_ones(dropping, turn):
    """Turns are the messages: of the system, of the user and answers. A fork still sees it."""
    session = Session(dropping, system="Brief.")
    session.say(SAID[0], LETTERS)
    session.say(SAID[1], SHORT)
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
    one, two, three = (
        generate(dropping.model, asked, greedy, policy=dropping.policy, cache=x).logprobs[0].chosen
        for x in (session.cache, want, other.cache)
    )
    np.testing.assert_array_equal(one, two)
    assert (one != three).any()
    assert session.fork().say(SAID[2], SHORT) == session.say(SAID[2], SHORT)


def test_what_was_dropped_stays_dropped(dropping, tmp_path, monkeypatch):
    """This holds in a conversation that was saved, and where a template has it read again."""
    session = Session(dropping)
    session.say(SAID[0], SHORT)
    session.drop(0)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, dropping)
    assert loaded.say(SAID[1], SHORT) == session.fork().say(SAID[1], SHORT)
    # a template that changes what was read
    loaded.messages[1]["content"] = "Nobody."
    loaded.say(SAID[2], SHORT)
    assert loaded.dropped == [0]
    assert loaded.stats.entries.max() == loaded.stats.tokens - len(SAID[0])


@pytest.mark.parametrize("text", [SAID[1], "What now?"])
@pytest.mark.parametrize("turn", [2, 3])
def test_messages_that_were_changed_are_seen_again(dropping, turn, text):
    """The question that is answered is seen, too, if it is the same as one that was dropped."""
    session = Session(dropping)
    session.say(SAID[0], SHORT)
    session.say(SAID[1], SHORT)
    session.drop(0)
    session.drop(turn)
    del session.messages[2:]
    session.say(text, SHORT)
    assert session.dropped == [0]
    assert session.stats.entries.max() == session.stats.tokens - len(SAID[0])


def test_the_question_is_seen_where_thoughts_are_cut(model, thinking):
    """The cache ends with the user's turn, and so could be continued."""
    llm = LLM(model, tokenizer=thinking)
    session = Session(llm)
    session.say(SAID[0], LETTERS)
    session.say(SAID[1], LETTERS)
    session.drop(2)
    del session.messages[2:]
    answer = session.say(SAID[1], LETTERS)
    assert session.dropped == []
    assert llm.generate(session.messages[:-1], LETTERS)[0].text == answer


def test_what_cannot_be_dropped_again_is_seen_again(model, dropping, monkeypatch):
    tokenizer = byte_tokenizer()
    session = Session(LLM(model, dropping.policy, tokenizer=tokenizer))
    session.say(SAID[0], SHORT)
    session.drop(0)
    other = session.fork()
    # templates that change what was read
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ bos", "!{{ bos")
    monkeypatch.setattr(Cache, "without", Mock(side_effect=UserError("not yet")))
    with pytest.warns(UserWarning, match="message 0 was read again and not dropped: not yet$"):
        session.say(SAID[1], SHORT)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ m['c", "{{ m['content'] }}{{ m['c")
    with pytest.warns(UserWarning, match="message 0 was read again and not dropped: .* exactly once$"):
        other.say(SAID[1], SHORT)
    for one in (session, other):
        assert one.dropped == []
        assert one.stats.entries.max() == one.stats.tokens


def test_nothing_of_a_beginning_without_text_is_dropped_again(model, dropping):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | trim }}\n{% endfor %}"
    session = Session(LLM(model, dropping.policy, tokenizer=tokenizer))
    session.say(" ", SHORT)
    session.drop(0)
    session.messages[1]["content"] = "Nobody."
    session.say(SAID[1], SHORT)
    assert session.dropped == [0]


def test_turns_are_dropped_where_thoughts_are_cut(model, thinking):
    session = Session(LLM(model, tokenizer=thinking))
    session.say(SAID[0], SHORT)
    with pytest.raises(UserError, match="the last answer is read with the next turn"):
        session.drop(1)
    session.messages[1]["content"] = "<think>\nhm\n</think>\n\nYes."
    session.say(SAID[1], SHORT)
    session.drop(0)
    session.drop(1)
    assert session.stats.entries.max() == session.stats.tokens - len(f"{SAID[0]}Yes.")


def test_a_saved_conversation_goes_on(llm, tmp_path):
    session = Session(llm, system="Brief.")
    session.say(SAID[0], SHORT)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, llm)
    turns = describe_cache(tmp_path)["turns"]
    for damage in ({"tokens": ["first", *session.tokens[1:]]}, {"dropped": {}}, {"dropped": ""}):
        write_turns(tmp_path, turns | damage)
        with pytest.raises(UserError, match="damaged .turns is"):
            Session.load(tmp_path, llm)
    assert loaded.messages == session.messages
    assert loaded.say(SAID[1], SHORT) == session.say(SAID[1], SHORT)


def write_turns(path, turns):
    """Replace the conversation of a saved cache."""
    found = describe_cache(path) | {"turns": turns}
    (path / DESCRIPTION).write_text(json.dumps(found | {"sha256": digest_of(found)}))


def test_a_conversation_of_an_older_kvjax_goes_on(dropping, tmp_path):
    """It does not say where its turns end, which is known once it is read again."""
    session = Session(dropping)
    session.say(SAID[0], SHORT)
    session.save(tmp_path)
    turns = describe_cache(tmp_path)["turns"]
    write_turns(tmp_path, {name: turns[name] for name in ("messages", "tokens", "parts")})
    for text in SAID[1:]:
        session = Session.load(tmp_path, dropping)
        session.say(text, SHORT)
        with pytest.raises(UserError, match="an older kvjax saved the conversation"):
            session.drop(2)
        session.save(tmp_path)
    session.messages[1]["content"] = "Nobody."
    session.say(SAID[0], SHORT)
    session.drop(2)
    assert session.stats.entries.max() == session.stats.tokens - len(SAID[1])


def test_an_answer_that_ends_by_itself_is_closed_by_the_template(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), qk_norm=False)
    model.config = with_stops(model)
    session = Session(LLM(model, tokenizer=tokenizer))
    ended = []
    for text in SAID:
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
def test_without_a_template_a_conversation_is_one_text(model, policy):
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


@pytest.mark.parametrize(
    ("template", "times"),
    [
        (CHAT_TEMPLATE, 1),  # this template trims the messages
        (CHAT_TEMPLATE.replace("{% for m", "{{ messages | length }}{% for m"), len(SAID)),
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
        (CHAT_TEMPLATE.replace("trim }}", "trim | replace('W', messages | length) }}"), len(SAID)),
    ],
)
def test_a_template_that_changes_what_was_read_has_it_read_afresh(model, template, times, new_caches):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    llm = LLM(model, tokenizer=tokenizer)
    session = Session(llm)
    for text in SAID:
        answer = session.say(text, LETTERS)
    assert len(new_caches) == times
    assert llm.generate(session.messages[:-1], LETTERS)[0].text == answer


@pytest.fixture
def new_caches(monkeypatch):
    """Return a list with an item for each new cache that was allocated."""
    made, own = [], allocation.empty_cache
    monkeypatch.setattr(allocation, "empty_cache", lambda *a, **k: made.append(a) or own(*a, **k))
    return made


@pytest.fixture
def thinking():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    return tokenizer


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("admits", [False, True])
def test_thoughts_of_earlier_turns_are_cut_as_the_template_cuts_them(
    model, policy, thinking, admits, variables, tmp_path, new_caches
):
    """Each answer is that of all messages read at once, though only the first turn is read into a new cache."""
    llm = LLM(model, policy if admits else "full", tokenizer=thinking, chat_template_kwargs=variables)
    session = Session(llm, system="Brief.")
    for index, text in enumerate(SAID):
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
        assert session.messages[4]["content"].endswith(other.say(SAID[1], LETTERS))
    assert len(new_caches) == 1  # the cache of LLM.generate


def test_a_policy_goes_on_compressing_where_thoughts_are_cut(model, thinking):
    session = Session(LLM(model, "r_kv:entries=40,when=every,every=8", tokenizer=thinking))
    for text in SAID:
        session.say(text, SHORT)
        session.messages[-1]["content"] = "<think>\nhm\n</think>\n\nYes."
        assert session.stats.entries.max() <= 40
    assert session.stats.tokens > 60


def test_a_failed_turn_leaves_the_conversation_as_it_was(model, thinking, monkeypatch):
    session = Session(LLM(model, tokenizer=thinking))
    session.say(SAID[0], SHORT)
    before = session.cache, session.tokens, session.messages[:]
    monkeypatch.setattr("kvjax.session.whole_answers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.say(SAID[2], SHORT)
    assert (session.cache, session.tokens, session.messages) == before


def test_a_saved_conversation_goes_on_with_another_form_of_the_template(model, thinking, tokenizer, tmp_path):
    """A conversation that was saved with one template is checked against the other, in both directions."""
    for first, second in ((thinking, tokenizer), (tokenizer, thinking)):
        session = Session(LLM(model, tokenizer=first))
        session.say(SAID[0], LETTERS)
        session.save(tmp_path)
        llm = LLM(model, tokenizer=second)
        loaded = Session.load(tmp_path, llm)
        answer = loaded.say(SAID[1], LETTERS)
        assert llm.generate(loaded.messages[:-1], LETTERS)[0].text == answer


def test_what_cannot_be_is_one_line(llm, model, tokenizer, policy, tmp_path, monkeypatch):
    # users do not have the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UserError, match=r"Session: llm must be a kvjax\.LLM, got"):
        Session(model)
    with pytest.raises(UserError, match="Session: system must be a text, got 3"):
        Session(llm, system=3)
    session = Session(llm)
    with pytest.raises(UserError, match="expected a text, got ''"):
        session.say("")
    with pytest.raises(UserError, match="character 1 is none"):
        session.say("a\ud800b")
    for what in (lambda: session.save(tmp_path), lambda: session.stats):
        with pytest.raises(UserError, match="nothing was said yet"):
            what()
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
    with pytest.raises(UserError, match="a cache that is no conversation"):
        Session.load(tmp_path / "cache", llm)
    session.say(SAID[0], SHORT)
    with pytest.raises(UserError, match=r"Session\.drop: turn must be a whole number of at most 1, got 2"):
        session.drop(2)
    with pytest.raises(UserError, match="does not know the positions of its entries"):
        session.drop(0)
    with pytest.warns(UserWarning, match="compacts the first turn alone"):
        Session(LLM(model, "snapkv:ratio=0.5", tokenizer=tokenizer))
    # a warning is an error: a policy that looks only at the stored entries works, too
    Session(LLM(model, "knorm:entries=20,when=every,every=8", tokenizer=tokenizer))
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="system= needs a tokenizer with a chat template"):
        Session(LLM(model, policy, tokenizer=bare), system="Be brief.")
