"""Test evictions against NVIDIA kvpress 0.5.5 on the same small random torch models: the kept entries of each head, and
the next token's logits. Where kvpress's own logits do not follow from its masks, the reference is torch over exactly
these entries.

kvpress's compression ratio is the share of entries that are dropped, ours is the share that stays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.inference import prefill
from kvjax.inference.forward import forward
from kvjax.mesh import use_mesh
from kvjax.models import load_model
from kvjax.policies import make_policy
from kvjax.policies.budget import Ratio, whole_entries
from tests.models.cases import LLAMA, QWEN3, write_folder
from tests.policies.captured import entries
from tests.tasks.model_tokenizers import byte_tokenizer

SKIPPED = "the parity extra is not installed (kvpress needs Python below 3.13)"
torch = pytest.importorskip("torch", reason=SKIPPED)
presses = pytest.importorskip("kvpress", reason=SKIPPED, exc_type=ImportError)
twins = pytest.importorskip("tests.policies.kvpress_twin")
kvzap = pytest.importorskip("kvpress.presses.kvzap_press")

SIZES = {"vocab_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES = {"llama": LLAMA | {"rope_theta": 1e4} | SIZES, "qwen3": QWEN3 | SIZES}
OBSERVED = 16
# no token occurs twice: repeated ones have equal scores in the first layer
TOKENS = np.random.default_rng(7).permutation(SIZES["vocab_size"])
CONTEXT, QUESTION = TOKENS[:256], TOKENS[256:280]


def snapkv(ratio):
    return presses.SnapKVPress(1 - ratio, window_size=OBSERVED)


def expected_attention(ratio, **options):
    return presses.ExpectedAttentionPress(1 - ratio, **options)


METHODS = {
    "snapkv": (snapkv, {"observed": OBSERVED}),
    "pyramidkv": (
        lambda ratio: presses.PyramidKVPress(1 - ratio, window_size=OBSERVED),
        {"observed": OBSERVED, "pyramidkv": {}},
    ),
    # at a ratio of a quarter, the default β leaves the last layers less than the window, and all layers get the same
    "pyramidkv, β 4": (
        lambda ratio: presses.PyramidKVPress(1 - ratio, window_size=OBSERVED, beta=4),
        {"observed": OBSERVED, "pyramidkv": {"beta": 4.0}},
    ),
    "tova": (lambda ratio: presses.TOVAPress(1 - ratio), {}),
    "knorm": (lambda ratio: presses.KnormPress(1 - ratio), {}),
    "keydiff": (lambda ratio: presses.KeyDiffPress(1 - ratio), {}),
    "expected_attention": (expected_attention, {}),
    "adakv": (lambda ratio: presses.AdaKVPress(snapkv(ratio)), {"observed": OBSERVED, "adakv": {}}),
    # with the settings of kvpress's published figures
    "expected_attention, adakv": (
        lambda ratio: presses.AdaKVPress(expected_attention(ratio, epsilon=1e-2)),
        {"epsilon": 1e-2, "adakv": {}},
    ),
    "critical_kv": (
        lambda ratio: presses.CriticalKVPress(snapkv(ratio)),
        {"observed": OBSERVED, "critical_kv": {}},
    ),
    "expected_attention, critical_kv": (
        lambda ratio: presses.CriticalKVPress(expected_attention(ratio, use_vnorm=False)),
        {"critical_kv": {}},
    ),
    "adakv, critical_kv": (
        lambda ratio: presses.AdaKVPress(presses.CriticalKVPress(snapkv(ratio))),
        {"observed": OBSERVED, "critical_kv": {}, "adakv": {}},
    ),
}
CASES = [("llama", name) for name in METHODS] + [("qwen3", "snapkv"), ("qwen3", "expected_attention")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return by family the torch model and ours, from the same folder."""
    folders = {name: write_folder(tmp_path_factory.mktemp(name), config) for name, config in FAMILIES.items()}
    loaded = {name: (twins.load(folder), load_model(folder)) for name, folder in folders.items()}
    # saved later: the end of a turn in this template differs from the models'
    for folder in folders.values():
        byte_tokenizer().save_pretrained(folder)
    return loaded


def policy_for(name, model, ratio):
    options = METHODS[name][1]
    base = "snapkv" if "observed" in options else name.split(",")[0]
    return make_policy({base: {"ratio": ratio} | options}, model=model)


def kept(cache, keys, row=0):
    """Return the positions of our entries, found by their keys."""
    layers, _, heads = cache.layers.length.shape
    return [
        [twins.places(entries(cache, layer, row, head), keys[layer][head]) for head in range(heads)]
        for layer in range(layers)
    ]


run = jax.jit(forward, static_argnames="write")


def logits_after(model, policy, cache, questions):
    """Return the logits that follow questions of one length."""
    with use_mesh(model):
        tokens = jnp.asarray(np.stack(questions), jnp.int32)
        valid = jnp.full(tokens.shape[0], tokens.shape[1])
        hidden = run(model, policy.compile(model).decode, cache, tokens, valid, write=False)[1]
        return np.asarray(model.logits(hidden))[:, -1]


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda x: x)
def test_entries_and_logits_are_the_same(models, family, name):
    twin, model = models[family]
    for ratio in (0.5, 0.25):
        theirs = twins.press_context(twin, CONTEXT, METHODS[name][0](ratio))
        expected = twins.logits_after(twin, theirs.cache, CONTEXT, QUESTION[:1])
        policy = policy_for(name, model, ratio)
        cache = prefill(model, [CONTEXT], policy=policy, max_new_tokens=1)
        assert kept(cache, theirs.keys) == theirs.kept
        close(logits_after(model, policy, cache, [QUESTION[:1]])[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_oraclekv_guided_by_the_question_matches_snapkv_with_the_question(models, family):
    """SnapKV's budget counts the window, which it keeps; OracleKV neither counts nor keeps the guidance."""
    twin, model = models[family]
    prompt, size = np.concatenate([CONTEXT, QUESTION]), len(QUESTION)
    for count in (128, 64):
        dropped = 1 - (count + size + 0.5) / len(prompt)
        theirs = twins.press_context(twin, prompt, presses.SnapKVPress(dropped, window_size=size))
        policy = make_policy({"oraclekv": {"entries": count, "guidance": QUESTION.tolist()}}, model=model)
        cache = prefill(model, [CONTEXT], policy=policy, max_new_tokens=1)
        context = [[{x for x in head if x < len(CONTEXT)} for head in layer] for layer in theirs.kept]
        assert {len(head) for layer in context for head in layer} == {count}
        assert kept(cache, theirs.keys) == context


@pytest.mark.parametrize(
    ("family", "layerwise", "repeated", "plus"),
    [
        ("llama", False, 512, False),
        ("llama", True, 64, False),
        ("qwen3", False, 64, False),
        ("qwen3", False, 64, True),
    ],
    ids=["one part", "by layer", "four parts", "KVzip+"],
)
def test_kvzip_keeps_the_same_entries(models, family, layerwise, repeated, plus):
    """The form is kvpress's: 4 sinks in place of the prefix, whose other two tokens are dropped first, and no space
    after the asking text."""
    twin, model = models[family]
    tokenizer = byte_tokenizer()
    opening = tokenizer("<|im_start|>user\n")["input_ids"]
    context = np.array([*opening, *(x for x in TOKENS if x not in opening)][: len(CONTEXT)])
    texts = {
        "resumption": tokenizer("\n\nRepeat the part of the previous context exactly, starting with")[
            "input_ids"
        ],
        "adakv": {"over": "layer" if layerwise else "model", "pinned": 0.0},
    }
    for ratio in (0.5, 0.25):
        press = presses.KVzipPress(
            1 - ratio, layerwise=layerwise, chunk_size=repeated, kvzip_plus_normalization=plus
        )
        theirs = twins.press_context(twin, context, press)
        expected = twins.logits_after(twin, theirs.cache, context, QUESTION[:1])
        policy = make_policy(
            {"kvzip": {"ratio": ratio, "sink": 4, "repeated": repeated, "plus": plus, **texts}},
            model=model,
            tokenizer=tokenizer,
        )
        cache = prefill(model, [context], policy=policy, max_new_tokens=1)
        assert kept(cache, theirs.keys) == theirs.kept
        close(logits_after(model, policy, cache, [QUESTION[:1]])[0], expected)
        assert all({0, 1, 2, 3} <= head for layer in theirs.kept for head in layer)
        assert not any({4, 5} & head for layer in theirs.kept for head in layer)


@pytest.mark.parametrize(
    ("name", "error"), [("adakv", "Could not find fake keys"), ("pyramidkv", "must match the size")]
)
def test_questions_of_many_tokens_see_each_heads_entries(models, name, error):
    """kvpress looks for one key that all of a group's queries ignore, and there is none for many queries. Its mask has
    one length for all layers."""
    twin, model = models["llama"]
    theirs = twins.press_context(twin, CONTEXT, METHODS[name][0](0.5))
    with pytest.raises((ValueError, RuntimeError), match=error):
        twins.logits_after(twin, theirs.cache, CONTEXT, QUESTION)
    policy = policy_for(name, model, 0.5)
    cache = prefill(model, [CONTEXT], policy=policy, max_new_tokens=len(QUESTION))
    assert kept(cache, theirs.keys) == theirs.kept
    ours = logits_after(model, policy, cache, [QUESTION])[0]
    close(ours, twins.logits_over(twin, CONTEXT, theirs.kept, QUESTION))


def test_padding_is_not_counted(models):
    """In a padded batch kvpress scores and counts padding; ours keeps the entries that kvpress keeps for each sequence
    alone."""
    twin, model = models["llama"]
    contexts, press = [CONTEXT, CONTEXT[:200]], METHODS["adakv"][0](0.5)
    policy = policy_for("adakv", model, 0.5)
    cache = prefill(model, contexts, policy=policy, max_new_tokens=1)
    ours = logits_after(model, policy, cache, [QUESTION[:1]] * 2)
    for row, context in enumerate(contexts):
        alone = twins.press_context(twin, context, press)
        assert kept(cache, alone.keys, row) == alone.kept
        close(ours[row], twins.logits_after(twin, alone.cache, context, QUESTION[:1]))

    twins.read_padded(twin, contexts, press)
    for layer, masked in enumerate(twins.masked(twin)):
        padding = sum(sequence == 1 and place < 56 for sequence, _, place in masked)
        real = sum(sequence == 1 and place >= 56 for sequence, _, place in masked)
        assert padding < 4 * 56
        assert 4 * 200 - real != sum(len(head) for head in alone.kept[layer])


def test_kept_entries_do_not_depend_on_chunks(models):
    """kvpress compresses only the first chunk; with masks per head the second chunk fails."""
    twin, model = models["llama"]
    for name in ("snapkv", "adakv"):
        theirs = twins.press_context(twin, CONTEXT, METHODS[name][0](0.5))
        cache = prefill(model, [CONTEXT], policy=policy_for(name, model, 0.5), chunk=128)
        assert kept(cache, theirs.keys) == theirs.kept

    first = twins.read(twin, CONTEXT[:128], press := METHODS["snapkv"][0](0.5))
    with press(twin):
        twins.logits_after(twin, first, CONTEXT[:128], CONTEXT[128:])
    assert [keys.shape[1] for keys in twins.keys(first)] == [64 + 128] * 4
    first = twins.read(twin, CONTEXT[:128], press := METHODS["adakv"][0](0.5))
    with press(twin), pytest.raises(ValueError, match="Could not find fake keys"):
        twins.logits_after(twin, first, CONTEXT[:128], CONTEXT[128:])


def test_h2o_counts_the_observed_attention_of_kvpress(models):
    """Observed attention divides each sum by the number of queries that saw the entry. kvpress has no H2O, which does
    not."""
    twin, model = models["llama"]
    twin.set_attn_implementation("eager")
    try:
        left = twins.keys(twins.read(twin, CONTEXT, presses.ObservedAttentionPress(0.5)))
    finally:
        twin.set_attn_implementation("sdpa")
    whole = twins.keys(twins.read(twin, CONTEXT))
    cache = prefill(model, [CONTEXT], policy=make_policy("h2o:ratio=1.0", model=model))
    counted = np.asarray(cache.pages.metadata["attention"])[
        np.asarray(cache.layers.page_table)[:, 0]
    ].reshape(4, 4, -1)
    mean = counted[..., :256] / np.arange(256, 0, -1)
    stays = np.argsort(-mean, axis=-1, kind="stable")[..., :128]
    for ours, left_keys, every in zip(stays, left, whole, strict=True):
        assert [set(head.tolist()) for head in ours] == [*map(twins.places, left_keys, every)]


def test_budgets_are_not_rounded_twice():
    """A tenth of 200 is 20; kvpress computes 1 − 0.9 times 200, which is 19.999… in binary."""
    assert whole_entries(Ratio(0.1).of(200, 1)) == 20
    assert presses.utils.compute_n_kept(200, 0.9) == 19


@pytest.mark.parametrize("form", ["mlp", "linear"])
def test_kvzap_keeps_the_same_entries(models, tmp_path, form):
    """Attention over the prompt is dense. The newest 128 entries stay, and the others whose prediction reaches the
    threshold."""
    twin, model = models["qwen3"]
    sizes = {"input_dim": model.config.width, "output_dim": 4, "n_modules": 4}
    torch.manual_seed(0)
    config = kvzap.KVzapConfig(hidden_dim=16 if form == "mlp" else None, **sizes)
    surrogate = kvzap.KVzapModel(config).eval()
    surrogate.save_pretrained(tmp_path)
    press = presses.KVzapPress(model_type=form)
    press.kvzap_model_name = f"nvidia/KVzap-{form}-{twin.config.name_or_path.split('/')[-1]}"
    press.kvzap_model = surrogate
    theirs = twins.press_context(twin, CONTEXT, presses.DMSPress(press, threshold=0.1))
    policy = make_policy("kvzap_eviction:threshold=0.1", model=model, gates=str(tmp_path))
    cache = prefill(model, [CONTEXT], policy=policy, max_new_tokens=1)
    assert kept(cache, theirs.keys) == theirs.kept
    assert any(128 < len(head) < len(CONTEXT) for layer in theirs.kept for head in layer)
    expected = twins.logits_after(twin, theirs.cache, CONTEXT, QUESTION[:1])
    close(logits_after(model, policy, cache, [QUESTION[:1]])[0], expected)
