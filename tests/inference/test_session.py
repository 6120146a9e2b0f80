"""Conversations: every turn is read behind what the cache holds, and is what one long text would have given."""

import dataclasses
import json

import jaxtyping
import numpy as np
import pytest

import kvjax
from kvjax.cache.saved import DESCRIPTION, describe_cache, sealed
from kvjax.errors import UserError
from kvjax.inference.sampling import prefill, sample, stream
from kvjax.inference.saving import save_cache
from kvjax.inference.session import Session
from kvjax.policies import make_policy
from tests.tasks.model_tokenizers import CHAT_TEMPLATE, byte_tokenizer
from tests.tiny_models import tiny_gates, tiny_model

SAID = "Who wrote Emma?", "When?", "And before that?"
NEW = 12


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), qk_norm=False)


@pytest.fixture(scope="module")
def policy(model):
    return make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model))


def with_stops(model):
    """One whose answers end: a token that it says often ends them."""
    said = sample(model, [np.arange(65, 100)], max_new_tokens=40).tokens[0]
    common = int(np.bincount(said[5:]).argmax())
    return dataclasses.replace(model.config, eos_ids=(common,))


def test_the_last_answer_is_that_of_the_whole_text_read_at_once(model, tokenizer, policy):
    session = Session(model, policy, tokenizer, system="Be brief.")
    for index, text in enumerate(SAID):
        before = len(session.tokens)
        answer = session.say(text, max_new_tokens=NEW)
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
    whole = sample(model, [ids], policy=policy, max_new_tokens=NEW, tokenizer=tokenizer)
    assert whole.texts == [answer]
    assert session.stats.tokens.tolist() == [len(session.tokens) - 1]


def test_a_policy_goes_on_compressing(model, tokenizer):
    """At the points of a prefill, questions and answers of the same tokens."""
    policy = make_policy("r_kv:entries=40,when=every,every=8", model=model)
    session, cache, line = Session(model, policy, tokenizer), None, []
    for text in SAID:
        session.say(text, max_new_tokens=NEW)
        assert session.stats.entries.max() <= 40 + 8
        new = session.tokens[0 if cache is None else int(cache.seen[0]) : -NEW]
        blocks = list(stream(model, [new], policy=policy, cache=cache, max_new_tokens=NEW))
        line += np.concatenate([parts[0] for parts, _ in blocks]).tolist()
        cache = blocks[-1][1]
        assert line[-NEW:] == session.tokens[-NEW:]


def test_forks_share_a_beginning_and_nothing_else(model, tokenizer, policy):
    session = Session(model, policy, tokenizer)
    session.say(SAID[0], max_new_tokens=NEW)
    other = session.fork()
    mine, theirs = session.say(SAID[1], max_new_tokens=NEW), other.say(SAID[2], max_new_tokens=NEW)
    assert len(session.messages) == len(other.messages) == 4
    assert session.messages[2:] != other.messages[2:]
    alone = Session(model, policy, tokenizer)
    alone.say(SAID[0], max_new_tokens=NEW)
    assert alone.fork().say(SAID[1], max_new_tokens=NEW) == mine
    assert alone.say(SAID[2], max_new_tokens=NEW) == theirs


def test_a_saved_conversation_goes_on(model, tokenizer, policy, tmp_path):
    session = Session(model, policy, tokenizer, system="Be brief.")
    session.say(SAID[0], max_new_tokens=NEW)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, model, policy, tokenizer)
    found = describe_cache(tmp_path)
    found["turns"]["tokens"][0] = "first"
    (tmp_path / DESCRIPTION).write_text(json.dumps(found | {"sha256": sealed(found)}))
    with pytest.raises(UserError, match="damaged .turns is"):
        Session.load(tmp_path, model, policy, tokenizer)
    assert loaded.messages == session.messages
    assert loaded.say(SAID[1], max_new_tokens=NEW) == session.say(SAID[1], max_new_tokens=NEW)


def test_an_answer_that_ends_by_itself_is_closed_by_the_template(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), qk_norm=False)
    model.config = with_stops(model)
    session = Session(model, None, tokenizer)
    ended = []
    for text in SAID:
        session.say(text, max_new_tokens=40)
        prompt = tokenizer.apply_chat_template(
            session.messages[:-1], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        whole = sample(model, [ids], max_new_tokens=40, tokenizer=tokenizer)
        ended += whole.stop_reasons
        assert session.messages[-1]["content"] == whole.texts[0]
    assert "eos" in ended


@pytest.mark.thorough
def test_without_a_template_a_conversation_is_one_text(model, policy):
    bare = byte_tokenizer()
    bare.chat_template = None
    session = Session(model, policy, bare)
    first = session.say("Once ", max_new_tokens=NEW)
    second = session.say(" and then ", max_new_tokens=NEW)
    ids = [*bare("Once ")["input_ids"], *session.tokens[5 : 5 + NEW], *bare(" and then ")["input_ids"]]
    assert session.tokens[: len(ids)] == ids
    whole = sample(model, [ids], policy=policy, max_new_tokens=NEW, tokenizer=bare)
    assert (second, first) == (
        whole.texts[0],
        bare.decode(session.tokens[5 : 5 + NEW], skip_special_tokens=True),
    )


@pytest.mark.parametrize(
    ("template", "goes_on"),
    [
        (CHAT_TEMPLATE, True),  # which trims what was said
        (CHAT_TEMPLATE.replace("{% for m", "{{ messages | length }}{% for m"), False),
        (
            CHAT_TEMPLATE.replace(
                "{{ m['content'] | trim }}",
                "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'][:2] }}",
            ),
            False,
        ),
    ],
)
def test_a_template_that_changes_what_was_read_is_refused_and_nothing_is_lost(
    model, policy, template, goes_on
):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    session = Session(model, policy, tokenizer)
    session.say(SAID[0], max_new_tokens=NEW)
    before = session.tokens[:], session.messages[:]
    if goes_on:
        session.say(SAID[1], max_new_tokens=NEW)
        return
    with pytest.raises(UserError, match="shows earlier turns otherwise once there is a later one") as caught:
        session.say(SAID[1], max_new_tokens=NEW)
    assert "\n" not in str(caught.value)
    assert (session.tokens, session.messages) == before


def test_what_cannot_be_is_one_line(model, tokenizer, policy, tmp_path, monkeypatch):
    # as users run it, without the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(UserError, match="tokenizer must come from kvjax.load"):
        kvjax.Session(model)
    with pytest.raises(UserError, match="Session: policy must come from kvjax.make_policy, got 'snapkv'"):
        kvjax.Session(model, "snapkv", tokenizer)
    with pytest.raises(UserError, match="Session: system must be a text, got 3"):
        kvjax.Session(model, policy, tokenizer, system=3)
    session = Session(model, policy, tokenizer)
    with pytest.raises(UserError, match="expected a text, got ''"):
        session.say("")
    with pytest.raises(UserError, match="character 1 is none"):
        session.say("a\ud800b")
    for what in (lambda: session.save(tmp_path), lambda: session.stats):
        with pytest.raises(UserError, match="nothing was said yet"):
            what()
    with pytest.raises(UserError, match="has no argument 'max_length'"):
        session.say("a", max_length=3)
    with pytest.raises(UserError, match=r"Session\.save has no argument 'paths'; it has path"):
        session.save(paths=tmp_path)
    with pytest.raises(
        UserError, match=r"Session\.load has no argument 'tokeniser'; .* nearest: tokenizer"
    ) as caught:
        Session.load(tmp_path, model, policy, tokeniser=tokenizer)
    assert "it has path, model, policy, tokenizer" in str(caught.value)
    save_cache(tmp_path / "cache", prefill(model, [[1, 2, 3]], policy=policy), model, policy)
    with pytest.raises(UserError, match="a cache that is no conversation"):
        Session.load(tmp_path / "cache", model, policy, tokenizer)
    with pytest.warns(UserWarning, match="compacts the first turn alone"):
        Session(model, make_policy("snapkv:ratio=0.5"), tokenizer)
    # a warning is an error: one that looks at what is stored alone goes on, too
    Session(model, make_policy("knorm:entries=20,when=every,every=8"), tokenizer)
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="system= needs a tokenizer with a chat template"):
        Session(model, policy, bare, system="Be brief.")
