"""Test Fast KVzip against its authors' rule, computed with masks: prompts in chunks, and answers under a fixed
budget."""

import itertools

import jax
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax import inference
from kvjax.cache import CapacityError
from kvjax.errors import UserError
from kvjax.inference.allocation import new_cache
from kvjax.inference.forward import last_logits, padded
from kvjax.inference.prefill import CHUNK
from kvjax.inference.prefill import read as read_prompts
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models.chat import encode
from kvjax.policies import make_policy
from kvjax.policies.eviction.fast_kvzip import FastKVzip, save_gates
from kvjax.policies.eviction.wrapper import innermost
from kvjax.sampling_params import SamplingParams
from tests.policies.captured import entries, pages_are_whole
from tests.policies.eviction.fast_kvzip import masked
from tests.tasks.model_tokenizers import byte_tokenizer, smol_tokenizer
from tests.tiny_models import tiny_model, tiny_sink_gates

PAGE = 4
LENGTHS = 41, 24, 9
ROWS = [np.random.default_rng(length).integers(0, 61, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def gates(model):
    return tiny_sink_gates(model)


def read(model, policy, rows, chunk=CHUNK):
    """Return the cache, and the logits after each prompt."""
    with use_mesh(model):
        cache, logits = read_prompts(model, policy.compile(model), rows, 0, chunk, page_size=PAGE)
        return cache, np.asarray(logits)


def assert_holds(cache, row, kept, keys):
    """Check that a sequence's heads hold exactly the kept ones of these keys."""
    for layer, head in np.ndindex(kept.shape[:2]):
        expected = keys[layer, head][kept[layer, head]]
        np.testing.assert_allclose(entries(cache, layer, row, head), expected, atol=1e-4)


OPENING = (*ROWS[0][:7].tolist(), 60)
"""An opening. The first prompt begins with its first 7 tokens, and the others with none of them."""
PROMPT_ARGUMENTS = [
    {"ratio": 0.5, "chunk": 10, "window": 4, "prefix": 0},
    {"ratio": 0.3, "chunk": 10, "window": 6, "prefix": 3},
    {"ratio": 0.1, "chunk": 10, "window": 8, "prefix": 3},  # the window alone exceeds this budget
    {"ratio": 0.6, "chunk": 10, "window": 12, "opening": OPENING},  # the window is longer than a chunk
    {"ratio": 0.4, "chunk": 64, "window": 0, "prefix": 0},
]


@pytest.mark.parametrize("arguments", PROMPT_ARGUMENTS)
def test_a_prompt_keeps_the_authors_entries(model, gates, arguments):
    """The kept sets and the logits, for a batch of prompts, are those of a dense computation under the same masks."""
    policy = make_policy({"fast_kvzip": {"short": 0, **arguments}}, model=model, gates=gates)
    cache, logits = read(model, policy, ROWS)
    first = {name: arguments[name] for name in arguments if name != "opening"}
    for row, tokens in enumerate(ROWS):
        kept, keys, expected = masked.read(model, gates, tokens, **{"prefix": 4 if row else 7} | first)
        assert kept.sum() < kept.size
        pages_are_whole(cache)
        assert_holds(cache, row, kept, keys)
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)


TEXT = "The first city is Paris. " * 3
INSTRUCTION = "Read this.\n"


@pytest.mark.parametrize("make", [byte_tokenizer, smol_tokenizer], ids=["bytes", "with a system prompt"])
def test_the_chat_templates_opening_is_the_prefix(gates, tmp_path, make):
    """The prefix may have any length. It includes the instruction that gates were trained with, if the prompt has it,
    and at most the first 4 tokens of the user's text."""
    tokenizer = make()
    plain, asked = (np.array(encode(tokenizer, x, "beginning")) for x in (TEXT, INSTRUCTION + TEXT))
    beginning = encode(tokenizer, "", "beginning")
    trained = encode(tokenizer, INSTRUCTION, "beginning")
    bare = np.array(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert 4 < len(beginning) < len(trained) < len(asked)

    def prefixes(method):
        return [method.needs.prefix_of(row) for row in (plain, asked, bare)]

    save_gates(tmp_path, gates, {"opening": trained})
    for arguments in ({}, {"tokenizer": tokenizer}):
        assert prefixes(FastKVzip(tmp_path, **arguments)) == [len(beginning), len(trained), 4]
    assert prefixes(FastKVzip(gates, tokenizer=tokenizer)) == [len(beginning), len(beginning), 4]
    assert prefixes(FastKVzip(gates)) == [4, 4, 4]
    assert prefixes(FastKVzip(tmp_path, prefix=2, tokenizer=tokenizer)) == [2, 2, 2]
    save_gates(tmp_path, gates, {"opening": [9, 9, 9, 9, 9, 9]})
    assert prefixes(FastKVzip(tmp_path, tokenizer=tokenizer)) == [len(beginning), len(beginning), 4]
    assert FastKVzip(tmp_path, tokenizer=tokenizer).needs.longest_prefix == len(beginning)


@pytest.mark.mesh
@pytest.mark.thorough
def test_a_mesh_keeps_the_same_entries(gates):
    arguments = PROMPT_ARGUMENTS[1]
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        split = tiny_model()
        policy = make_policy(
            {"fast_kvzip": {"short": 0, **arguments}}, model=split, gates=tiny_sink_gates(split)
        )
        cache, _ = read(split, policy, ROWS)
        found = np.asarray(cache.layers.length)
    model = tiny_model()
    for row, tokens in enumerate(ROWS):
        kept, _, _ = masked.read(model, gates, tokens, **arguments)
        np.testing.assert_array_equal(found[:, row], kept.sum(-1))


def test_a_budget_below_the_window_keeps_the_newest_tokens(model, gates):
    """With r · n = 4.1 < 8, exactly the last int(r · n) tokens are kept."""
    policy = make_policy("fast_kvzip:ratio=0.1,chunk=10,window=8,short=0,prefix=0", model=model, gates=gates)
    cache, _ = read(model, policy, ROWS)
    np.testing.assert_array_equal(np.asarray(cache.layers.length)[:, 0], 4)
    kept = np.zeros((3, 4, 41), bool)
    kept[..., -4:] = True
    assert (masked.read(model, gates, ROWS[0], ratio=0.1, chunk=10, window=8, prefix=0)[0] == kept).all()


def test_a_ratio_of_one_is_the_full_cache(model, gates):
    policy = make_policy("fast_kvzip:ratio=1.0,chunk=10,window=4,short=0", model=model, gates=gates)
    cache, logits = read(model, policy, ROWS)
    whole, expected = read(model, make_policy("full", model=model), ROWS, chunk=10)
    np.testing.assert_array_equal(np.asarray(cache.layers.length), np.asarray(whole.layers.length))
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.thorough
def test_hidden_states_wait_only_if_answers_are_compacted(model, gates):
    """Under other triggers no cache reserves memory for hidden states, and a single token has its score at once."""
    policies = [
        make_policy(f"fast_kvzip:entries=200,when={when},{name}", model=model, gates=gates)
        for name in ("adakv", "critical_kv")
        for when in ("chunk", "prompt", "position")
    ]
    waiting = [innermost(policy.compile(model).compact).pending for policy in policies]
    assert waiting == [0, 0, 128] * 2
    policy, (row,) = make_policy("fast_kvzip:ratio=1.0", model=model, gates=gates), ROWS[2:]
    whole = read(model, policy, [row])[0]
    with use_mesh(model):
        compiled = policy.compile(model)
        cache = new_cache(model, compiled, [row], 0, PAGE, None)
        assert not jax.tree.leaves(cache.observations)
        for token in row:
            one, valid = padded([np.array([token])], 1)
            cache, _ = last_logits(model, compiled.read, cache, one, valid)
    used = whole.layers.page_table[..., : -(-len(row) // PAGE)]
    own = cache.layers.page_table[..., : -(-len(row) // PAGE)]
    found, scores = (
        np.asarray(x.pages.metadata["score"])[at].reshape(3, 4, -1)[..., : len(row)]
        for x, at in ((cache, own), (whole, used))
    )
    assert (scores > 0).all()
    np.testing.assert_allclose(found, scores, atol=1e-5)


@pytest.mark.thorough
def test_a_second_prompt_after_an_answer_keeps_every_token_of_both(model, gates):
    """Nothing is compacted after the first prompt was read, so no later token needs a score."""
    arguments, new = PROMPT_ARGUMENTS[4], 6
    policy = make_policy({"fast_kvzip": {"short": 0, **arguments}}, model=model, gates=gates)
    held = inference.prefill(model, ROWS[:1], policy=policy, page_size=PAGE)
    tokens, answers = ROWS[0], {}
    for question in ([3, 1, 4], [1, 5]):
        sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
        blocks = list(inference.stream(model, [question], sampling, policy=policy, cache=held))
        answer, held = np.concatenate([block.tokens[0] for block in blocks]), blocks[-1].cache
        tokens = np.concatenate([tokens, question, answer[:-1]])
        answers[len(tokens)] = answer
    kept = masked.read(model, gates, ROWS[0], **arguments)[0]
    stays = np.pad(kept, ((0, 0), (0, 0), (0, len(tokens) - len(ROWS[0]))), constant_values=True)
    visible = masked.causal(stays.shape[:2], len(tokens))
    visible[:, :, len(ROWS[0]) :] &= stays[:, :, None]
    logits = masked.forward(model, gates, tokens, visible)[2]
    for end, answer in answers.items():
        np.testing.assert_array_equal(logits[end - new : end].argmax(-1), answer)
    np.testing.assert_array_equal(held.layers.length[:, 0], stays.sum(-1))


LONG = {"sampling": SamplingParams(max_new_tokens=30, ignore_eos=True), "page_size": PAGE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("buffer", "last"), [*(pytest.param(*x, marks=pytest.mark.thorough) for x in ((1, 6), (8, 8))), (11, 12)]
)
def test_an_answer_keeps_the_authors_entries(model, gates, buffer, last):
    """Sequences of a batch reach multiples of 8 tokens at different times; scores come late or at once."""
    arguments = {"entries": 14, "every": 8, "protected": {"first": 2, "last": last}}
    policy = make_policy(
        {"fast_kvzip": {"when": "position", "buffer": buffer, **arguments}}, model=model, gates=gates
    )
    rows, answers = ROWS[:2], [[], []]
    for block in inference.stream(model, rows, policy=policy, **LONG, block=4):
        cache = block.cache
        pages_are_whole(cache)
        for answer, tokens in zip(answers, block.tokens, strict=True):
            answer.extend(tokens)
        held = jax.tree.map(np.asarray, cache)
    for row, (prompt, answer) in enumerate(zip(rows, answers, strict=True)):
        tokens = np.concatenate([prompt, answer[:-1]])
        kept, keys, logits = masked.decode(
            model, gates, tokens, len(prompt), entries=14, every=8, first=2, last=last
        )
        np.testing.assert_array_equal(logits[len(prompt) - 1 :].argmax(-1), answer)
        np.testing.assert_array_equal(held.layers.length[:, row], kept.sum(-1))
        assert_holds(cache, row, kept, keys)
        assert kept[..., :2].all(), "the first entries stay"
    assert caches.stats(cache, 2).kv_ratio < 0.4


@pytest.mark.mesh
@pytest.mark.thorough
@pytest.mark.parametrize("inputs", ["hidden", "k"])
def test_late_scores_on_a_mesh_match_immediate_scores_on_one_device(inputs):
    arguments = {"entries": 14, "every": 8, "protected": {"first": 2, "last": 8}, "when": "position"}
    arguments |= {"inputs": inputs}

    def answered(buffer):
        model = tiny_model()
        own = arguments | {"gates": tiny_sink_gates(model, inputs=inputs), "buffer": buffer}
        found = inference.generate(
            model, ROWS[:2], policy=make_policy({"fast_kvzip": own}, model=model), **LONG, block=30
        )
        return [tokens.tolist() for tokens in found.tokens], found.stats.entries.tolist()

    at_once = answered(1)
    with jax.set_mesh(make_mesh(fsdp=2, tensor=4)):
        assert answered(8) == at_once


@pytest.mark.thorough
def test_compactions_within_a_block_do_not_depend_on_its_size(model, gates):
    """A block that passes a multiple of 8 compacts within its own program, at exactly that token."""
    arguments = {"entries": 14, "every": 8, "protected": {"first": 2, "last": 8}, "buffer": 8}
    policy = make_policy({"fast_kvzip": {"when": "position", **arguments}}, model=model, gates=gates)
    sizes = []
    for block in (4, 30):
        found = inference.generate(model, ROWS[:2], policy=policy, **LONG, block=block)
        sizes.append(([tokens.tolist() for tokens in found.tokens], found.stats.entries.tolist()))
    assert sizes[0] == sizes[1]


def position_total(total, seen, read, decoded):
    """Return the entries per kv head, on average, after a prompt or question of `read` tokens and `decoded` decoded
    ones."""
    total = min(total + read, 14)
    for after in range(seen + read + 1, seen + read + decoded + 1):
        total = min(total + 1, 14) if after % 8 == 0 else total + 1
    return total


SCHEDULES = {
    "position": (
        "fast_kvzip",
        {"entries": 14, "every": 8, "protected": {"first": 2, "last": 8}, "buffer": 8},
    ),
    "chunk": ("fast_kvzip", PROMPT_ARGUMENTS[0] | {"short": 0}),
    "overflow": ("snapkv", {"entries": 24, "observed": 6}),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "when", [pytest.param(x, marks=() if x == "position" else pytest.mark.thorough) for x in SCHEDULES]
)
def test_no_page_is_lost_or_shared_in_random_conversations(model, gates, when):
    """Prompts, questions and answers have random lengths, and answers are broken off after any block. Every page is
    free or belongs to one head, and heads hold as many entries as their rule says."""
    name, arguments = SCHEDULES[when]
    own = {"gates": gates} if name == "fast_kvzip" else {}
    policy = make_policy({name: {"when": when} | arguments | own}, model=model)
    random = np.random.default_rng(0)
    for _ in range(3):
        cache, seen, total = None, np.zeros(2, int), np.zeros(2)
        for longest in (41, 7, 7):
            read = random.permutation([longest, random.integers(1, longest + 1)])
            rows, blocks = [random.integers(0, 61, count) for count in read], random.integers(1, 5)
            turn = inference.stream(model, rows, policy=policy, cache=cache, **LONG, block=4)
            decoded = -1  # the last token of an answer is not stored
            for block in itertools.islice(turn, blocks):
                now = block.cache
                decoded += len(block.tokens[0])
                pages_are_whole(now)
                np.testing.assert_array_equal(now.seen, seen + read + decoded)
                held = np.asarray(now.layers.length).mean((0, 2))
                if when == "position":
                    expected = [position_total(*row, decoded) for row in zip(total, seen, read, strict=True)]
                    # repeated tokens tie in the first layer, and all those at the threshold stay
                    assert (held - expected > -1e-6).all()
                    assert (held - expected < 6 / 12).all()
                elif when == "overflow":
                    assert held.max() <= 24
                elif cache is not None:
                    np.testing.assert_allclose(held, total + read + decoded, rtol=1e-6)
            cache, seen, total = now, seen + read + decoded, held


REFUSED = [
    ({"ratio": 0.0}, "ratio must be .*above 0"),
    ({"ratio": 1.5}, "ratio must be .*at most 1"),
    ({"ratio": 0.5, "window": -1}, "fast_kvzip: window must be a whole number of at least 0, got -1"),
    ({"ratio": 0.5, "share": 2}, "fast_kvzip: share must be"),
    ({"ratio": 0.5, "opening": "x"}, "fast_kvzip: opening must be a list of token ids, got 'x'"),
    ({"ratio": 0.5, "buffer": 0}, "fast_kvzip: buffer must be a whole number of at least 1, got 0"),
    ({"ratio": 0.5, "inputs": "value"}, "fast_kvzip: inputs is one of hidden, k, k_pre, got 'value'"),
    ({"ratio": 0.5, "when": "position"}, "when='position' needs a budget in entries or size"),
    (
        {"entries": 99, "when": "position", "protected": {"last": 64}},
        "must stay: last must be at least 128, got 64",
    ),
    ({"entries": 999, "when": "position", "every": 200}, "after every 128 or fewer"),
    ({"entries": 999, "when": "overflow"}, "drops a share of every head's own entries"),
    (
        {"ratio": 0.5, "protected": {"first": 0}},
        "fast_kvzip:protected takes first only while decoding, got when='chunk': for prompts the argument is prefix",
    ),
    (
        {"ratio": 0.5, "protected": {"last": 9}, "when": "prompt"},
        "takes last only .* got when='prompt': for prompts the argument is window",
    ),
    (
        {"entries": 999, "when": "position", "prefix": 9},
        "takes prefix only .* while decoding the argument is protected.first",
    ),
    (
        {"entries": 999, "when": "every", "every": 9, "window": 9},
        "takes window only .*'every': while decoding the argument is protected.last",
    ),
    ({"ratio": 0.5, "observers": [1, 2]}, "observers=.* is for methods that look back"),
    ({"ratio": 0.5, "pyramid": 3}, "has no argument 'pyramid'"),
    (
        {"gates": 3, "ratio": 0.5},
        "fast_kvzip: gates must be a folder or a file of gates or a SinkGate, got 3",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_invalid_arguments_give_one_line_errors(model, gates, arguments, message):
    with pytest.raises(UserError, match=message):
        make_policy({"fast_kvzip": {"gates": gates} | arguments}, model=model)


@pytest.mark.thorough
def test_a_pool_that_runs_out_within_a_block_raises_capacity_error(model, gates):
    """A compaction in the decoding loop must not hide the error."""
    arguments = {"entries": 40, "buffer": 16, "every": 16, "protected": {"last": 16, "first": 4}}
    policy = make_policy({"fast_kvzip": {"when": "position", **arguments}}, model=model, gates=gates)
    with pytest.raises(CapacityError):
        inference.generate(
            model,
            [ROWS[0][:20]],
            SamplingParams(max_new_tokens=100, ignore_eos=True),
            policy=policy,
            page_size=PAGE,
            capacity=54,
        )


def test_pinned_entries_may_fill_all_places(model, gates):
    arguments = {"ratio": 0.5, "chunk": 64, "window": 4, "short": 0, "prefix": 0}
    arguments |= {"adakv": {"over": "model", "pinned": 1.0}}
    policy = make_policy({"fast_kvzip": arguments}, model=model, gates=gates)
    cache, _ = read(model, policy, ROWS)
    assert np.asarray(cache.layers.length)[:, 0].mean() == pytest.approx(20.5, abs=1.5)


def test_a_budget_below_the_protected_entries_is_refused_before_prefill(model, gates):
    policy = make_policy("fast_kvzip:entries=100,when=position", model=model, gates=gates)
    with pytest.raises(UserError, match="the budget of 100 entries per kv head is below the 132 that always"):
        inference.generate(model, ROWS[:1], policy=policy)


def test_a_pyramid_is_refused(gates):
    with pytest.raises(UserError, match="a pyramid divides budgets of whole prompts"):
        make_policy("fast_kvzip:ratio=0.5,pyramidkv", gates=gates)


def test_an_admission_is_refused(model, gates):
    with pytest.raises(UserError, match="fast_kvzip divides a budget among ranges of a prompt"):
        make_policy("streaming_llm+fast_kvzip:ratio=0.5", model=model, gates=gates)
