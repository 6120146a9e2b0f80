"""Tests of reading `config.json`: both spellings of keys, defaults, and one-line errors."""

import dataclasses
import json
import math
from contextlib import nullcontext

import pytest

from kvjax.errors import UserError
from kvjax.models import ModelConfig
from kvjax.models.config import config_json, warn_of_turn_ends
from kvjax.models.rope import RopeConfig
from tests.models.cases import CASES, GEMMA3, LLAMA, LONGROPE, PHI4_MINI, QWEN3

PHI4 = PHI4_MINI | {"original_max_position_embeddings": 128}


@pytest.fixture
def refused(read):
    def refused(config) -> str:
        with pytest.raises(UserError) as caught:
            read(config)
        message = str(caught.value)
        assert "config.json: " in message
        return message.split("config.json: ", 1)[1]

    return refused


def test_flags_of_each_family(read):
    def flags(case):
        config = read(case)
        return (config.qk_norm, config.attention_bias, config.attention_out_bias, config.mlp_bias)

    assert flags(CASES["llama3"]) == (False, False, False, False)
    assert flags(CASES["biases"]) == (False, True, True, True)
    assert flags(CASES["mistral"] | {"attention_bias": True}) == (False, False, False, False)
    assert flags(CASES["qwen2"] | {"mlp_bias": True}) == (False, True, False, False)
    assert flags(CASES["qwen3_biases"]) == (True, True, True, False)
    assert flags(CASES["smollm3"] | {"mlp_bias": True}) == (False, False, False, True)


def test_defaults_differ_by_family(read):
    """transformers has the same defaults where `config.json` lacks the key."""
    bare = {key: x for key, x in LLAMA.items() if key not in ("tie_word_embeddings", "rms_norm_eps")}
    found = [read(bare | {"model_type": kind}) for kind in ("llama", "phi3", "smollm3")]
    assert [config.tied for config in found] == [False, False, True]
    assert [config.norm_eps for config in found] == [1e-6, 1e-5, 1e-6]
    assert [config.rope.theta for config in found] == [1e4, 1e4, 2e6]


def test_layers_without_rope(read):
    case = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 9}
    assert read(case).no_rope == (3, 7)
    assert read(case | {"no_rope_layer_interval": 3}).no_rope == (2, 5, 8)
    assert read(case | {"no_rope_layers": [1, 0, 1, 1, 0, 1, 1, 1, 1, 0]}).no_rope == (1, 4)
    config = read(case | {"no_rope_layers": [0] * 9, "rope_scaling": CASES["yarn"]["rope_scaling"]})
    frequencies, scale = config.rotation()
    assert not frequencies.any()
    assert (scale == 1).all()


def test_dual_chunk_attention_limits_the_context_to_one_chunk(read, refused):
    declared = CASES["qwen2"] | {"max_position_embeddings": 1_010_000}
    assert read(declared).longest == 1_010_000
    chunks = {"chunk_size": 262_144, "local_size": 8192, "original_max_position_embeddings": 262_144}
    assert read(declared | {"dual_chunk_attention_config": chunks}).longest == 262_144
    wrong = declared | {"dual_chunk_attention_config": {"original_max_position_embeddings": "all"}}
    assert refused(wrong) == (
        "dual_chunk_attention_config: original_max_position_embeddings must be int, got 'all'"
    )


def test_missing_sizes_are_derived(read):
    config = read(CASES["llama2"])
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 12, 10000.0)
    assert read(QWEN3).head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma"},
            "model_type 'gemma' is not supported, only gemma3_text, gpt_oss, llama, ministral",
        ),
        ({"hidden_act": "swish2"}, "activation 'swish2' is not supported, only silu, relu, gelu,"),
        (
            {"rope_scaling": {"type": "ntk"}},
            "rope_scaling: rope type 'ntk' is not supported, only default",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters: rope type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling: factor must be float, got '4'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope_scaling: rope factor must be above 0 and at most 1000000, got 0",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is given as 10000 and as 1e+06",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters: rotary embeddings that differ by layer are not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "a partial_rotary_factor other than 1 is not supported"),
        (
            PHI4 | {"partial_rotary_factor": 0.7},
            "rotary embeddings turn 11 of 16 dimensions of a head, expected",
        ),
        (PHI4 | {"partial_rotary_factor": 0.5}, "rope short_factor has 6 numbers, expected 4"),
        (
            PHI4 | {"partial_rotary_factor": 1.5},
            "rope_scaling: partial_rotary_factor must be above 0 and at most 1",
        ),
        (PHI4_MINI, "rope_scaling: original_max_position_embeddings is missing"),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1, "2"]}, "original_max_position_embeddings": 64},
            "rope_scaling: long_factor must be a list of numbers",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1, 0]}, "original_max_position_embeddings": 64},
            "rope_scaling: rope long_factor must be above 0 and at most 1000000, got 0",
        ),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "rope_scaling: rope original length must be at least 2, got 1",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be int, got 'three'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool, got 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int, got True"),
        ({"num_attention_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"max_position_embeddings": 0}, "max_position must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, "3 kv heads do not divide 4 query heads"),
        ({"head_dim": 7}, "head_dim is 7, but rotary embeddings need an even one"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, got ['</s>']"),
        ({"quantization_config": {"bits": 4}}, "quantized weights (quantization_config) are not supported"),
        ({"model_type": "mistral", "sliding_window": 1}, "sliding_window must be at least 2 and at most"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"] * 2},
            "layer_types has chunked_attention; only full_attention is supported",
        ),
        (
            {"model_type": "ministral", "layer_types": ["full_attention"], "sliding_window": 64},
            "layer_types names 1 layers, expected 3",
        ),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported, only null"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1, got 0"),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": LONGROPE | {"rope_type": "longrope"}}},
            "rope_parameters: ",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": 1e-9}, "the queries' factor must be at least 0.001"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be at least 2 and at most"),
        (
            QWEN3
            | {
                "model_type": "qwen3_moe",
                "moe_intermediate_size": 8,
                "num_experts_per_tok": 1,
                "num_experts": 0,
            },
            "num_experts must be at least 1, got 0",
        ),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0, got 0"),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0]},
            "no_rope_layers must have a 0 or 1 for each of 3 layers",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0, "x"]},
            "no_rope_layers must have a 0 or 1 for each of 3",
        ),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            "no_rope_layer_interval must be at least 1, got 0",
        ),
        ({"model_type": "smollm3", "num_hidden_layers": 10**10}, "num_layers"),
        (
            {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window is true, but sliding-window attention is not supported",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention; only"),
    ],
)
def test_unsupported_keys_are_refused(change, message, refused):
    assert refused(LLAMA | change).startswith(message)


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_layers must be at least 1 and at most 10,000, got 1000000000"),
        ({"num_hidden_layers": -1}, "num_layers must be at least 1, got -1"),
        ({"num_hidden_layers": HUGE}, "num_hidden_layers must be a whole number of 64 bits, got 10000"),
        ({"vocab_size": 10**18}, "vocab_size must be at least 1 and at most 16,777,216, got 10000"),
        ({"hidden_size": 2**31}, "width must be at least 1 and at most"),
        ({"head_dim": 2**20}, "head_dim must be at least 1 and at most 65,536"),
        ({"num_attention_heads": 2**20}, "num_heads must be at least 1 and at most 65,536"),
        ({"num_attention_heads": 2**12, "head_dim": 2**14}, "4,096 heads of 16,384, expected at most"),
        ({"max_position_embeddings": 2**31}, "max_position must be at least 1 and at most"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a finite number, got nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a finite number, got inf"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps must be a finite number, got 1000"),
        ({"rms_norm_eps": -1}, "norm_eps must be at least 0 and below 1, got -1"),
        ({"rms_norm_eps": 1}, "norm_eps must be at least 0 and below 1, got 1"),
        ({"rope_theta": math.nan}, "rope_theta must be a finite number, got nan"),
        ({"rope_theta": 1e39}, "rope_theta must be a finite number, got 1e+39"),
        ({"rope_theta": -1}, "rope theta must be finite and above 1, got -1"),
        ({"eos_token_id": 2**31}, "eos_token_id must be a token id or a list of them, got [2147483648]"),
        ({"eos_token_id": [-1]}, "eos_token_id must be a token id or a list of them, got [-1]"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token id or a list of them, got [True]"),
        ({"eos_token_id": list(range(2000))}, "eos_token_id must be a token id or a list of them, got [0, 1"),
        ({"bos_token_id": -5}, "a token id must be at least 0 and at most 2147483647, got -5"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message, refused):
    assert refused(LLAMA | change).startswith(message)


@pytest.mark.parametrize(
    ("rope_type", "change", "message"),
    [
        ("linear", {"factor": 1e30}, "rope factor must be above 0 and at most 1000000, got 1e+30"),
        (
            "yarn",
            {"factor": 1e6, "original_max_position_embeddings": 2**30},
            "rope factor and original length",
        ),
        ("yarn", {"original_max_position_embeddings": -4}, "rope original_length must be at least 0 and"),
        ("yarn", {"beta_fast": math.nan}, "beta_fast must be a finite number, got nan"),
        ("yarn", {"beta_slow": -1}, "rope beta_slow must be above 0 and at most 1000000, got -1"),
        ("yarn", {"attention_factor": 0}, "rope attention_factor must be above 0 and at most"),
        ("yarn", {"mscale": -1, "mscale_all_dim": 1}, "rope mscale must be at least 0 and at most"),
        ("llama3", {"low_freq_factor": 4, "high_freq_factor": 4}, "rope low_freq_factor must be below"),
        (
            "dynamic",
            {"factor": 1e-3, "head_dim": 2},
            "rope type 'dynamic' with these numbers has angles that",
        ),
    ],
)
def test_rope_numbers_out_of_range_are_refused(rope_type, change, message, refused):
    head = {"head_dim": change.pop("head_dim", 8)}
    rope = {"rope_scaling": {"rope_type": rope_type, "factor": 2.0} | change}
    assert refused(LLAMA | head | rope).removeprefix("rope_scaling: ").startswith(message)


def test_sliding_window_without_sliding_layers_is_accepted(read):
    qwen = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}
    read(qwen | {"max_window_layers": 3})
    read(qwen)  # 28 layers have none by default
    read(qwen | {"max_window_layers": 0, "layer_types": ["full_attention"] * 3})
    read(qwen | {"max_window_layers": 0, "sliding_window": None})
    # a window as long as the context hides nothing
    read(qwen | {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 1024})
    # Llama's code has no sliding windows
    read(qwen | {"model_type": "llama", "num_hidden_layers": 32})


def test_sliding_layers_are_those_of_transformers(read):
    mistral = LLAMA | {"model_type": "mistral"}
    assert read(mistral | {"sliding_window": None}).sliding_layers == ()
    assert read(mistral | {"sliding_window": 1024}).sliding_layers == ()
    assert read(mistral | {"sliding_window": 512}).sliding_layers == (0, 1, 2)
    # a missing key means 4096
    long = read(mistral | {"max_position_embeddings": 8192})
    assert (long.sliding_window, long.sliding_layers) == (4096, (0, 1, 2))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read(mistral | {"sliding_window": 1024, "rope_scaling": yarn}).sliding_layers == (0, 1, 2)
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 512, "max_window_layers": 2}
    assert read(qwen | {"use_sliding_window": True}).sliding_layers == (2,)
    # Qwen files name a window that is switched off
    assert read(qwen | {"use_sliding_window": False}).sliding_layers == ()
    listed = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert read(qwen | {"use_sliding_window": True} | listed).sliding_layers == (0, 2)
    ministral = LLAMA | {"model_type": "ministral", "sliding_window": 64}
    assert read(ministral).sliding_layers == (0, 1, 2)
    assert read(ministral | listed).sliding_layers == (0, 2)


def test_all_layers_of_qwen3_moe_slide(read):
    moe = QWEN3 | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    assert read(moe | {"use_sliding_window": True, "sliding_window": 16}).sliding_layers == (0, 1, 2)
    assert read(moe | {"sliding_window": 16}).sliding_layers == ()


def test_gemma3_rope_by_kind_falls_back_to_top_level_keys(read):
    """transformers does the same."""
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_type": "default"},
    }
    config = read(GEMMA3 | {"rope_parameters": nested, "rope_theta": 5e5, "rope_local_base_freq": 2e4})
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("linear", 8.0, 5e5)
    assert (config.sliding_rope.type, config.sliding_rope.theta) == ("default", 2e4)
    nested["full_attention"] = {"rope_theta": 3e5}
    config = read(
        GEMMA3 | {"rope_parameters": nested, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    )
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("linear", 4.0, 3e5)


def test_multimodal_model_is_read_as_its_text_model(read):
    """The keys are those of google/gemma-3-4b-it, whose text_config leaves out most of them."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = read({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.eos_ids, config.bos_id, config.tied, config.max_position) == ((1, 106), 2, True, 131072)
    assert config.full_layers == (5, 11, 17, 23, 29)
    assert (config.rope.type, config.rope.theta, config.rope.factor) == ("linear", 1e6, 8.0)
    assert (config.sliding_rope.type, config.sliding_rope.theta) == ("default", 1e4)


def test_eos_ids_of_generation_config_take_precedence(read):
    assert read(LLAMA | {"eos_token_id": 2}).eos_ids == (2,)
    assert read(LLAMA | {"eos_token_id": [5, 2]}).eos_ids == (2, 5)
    assert read(LLAMA | {"eos_token_id": 2}, eos_token_id=[7, 9]).eos_ids == (7, 9)
    assert read(LLAMA, eos_token_id=None).eos_ids == ()
    # a generation config without the key leaves it to config.json
    assert read(LLAMA | {"eos_token_id": 2}, do_sample=True).eos_ids == (2,)


ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|done|>\n{% endfor %}"
TOKENS = {"</s>": 2, "<end_of_turn>": 6, "<|im_end|>": 7, "<|done|>": 8, "<|user|>": 9}


@pytest.mark.parametrize(
    ("template", "eos", "expected"),
    [
        ("<|im_start|>{{ messages }}<|im_end|>", None, (7,)),
        ("<|im_start|>{{ messages }}<|im_end|>", [1], (1, 7)),
        ([{"name": "default", "template": ENDS}, {"name": "rag", "template": "<|im_end|>"}], 2, (2, 8)),
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", None, (2,)),
        # the user's turn begins where the model's ends
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", None, (9,)),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 2, (2,)),
        ("{{ 1 / 0 }}", 2, (2,)),
        ("no <|pad|> nor <|eom_id|>", 2, (2,)),
        ("{{ raise_exception('no system') }}<end_of_turn>", 2, (2, 6)),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
def test_turn_ends_of_the_chat_template_are_eos_ids(template, eos, expected, file, read, tmp_path):
    """The tokens are listed in one file or another."""
    listed = [{"id": id_, "content": token, "special": False} for token, id_ in TOKENS.items()]
    (tmp_path / file).write_text(
        json.dumps(TOKENS if file == "added_tokens.json" else {"added_tokens": listed})
    )
    decoder = {str(token["id"]): token for token in listed} if file == "tokenizer_config.json" else None
    config = {"chat_template": template, "eos_token": {"content": "</s>"}, "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    added = sorted(set(expected) - set(eos if isinstance(eos, list) else [eos]))
    found = read(LLAMA | {"eos_token_id": eos})
    assert (found.eos_ids, [id_ for _, id_ in found.turn_ends]) == (expected, added)
    with (
        pytest.warns(UserWarning, match=rf"answers also end at '.*' \({added[0]}\)")
        if added
        else nullcontext()
    ):
        warn_of_turn_ends(found)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{# <|im_end|> #}{% for m in messages %}{{ m.content }}{{ '[END]' }}{% endfor %}", (2, 7, 9)),
        (
            "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if m.role == 'user' else '[END]' }}{% endfor %}",
            (2, 7, 9),
        ),
        (
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
            "{% for m in messages[1:] %}{{ m.content }}[END]{% endfor %}",
            (2, 9),
        ),
        (
            "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
            "{% for m in messages %}{{ m.content }}[END]{% endfor %}",
            (2, 9),
        ),
    ],
    ids=["a known end in a comment", "another end of the user's turn", "a system message", "one turn"],
)
def test_turn_end_is_the_token_after_the_models_turn(template, expected, read, tmp_path):
    """The ids are those of the decoder's keys, whatever its values say."""
    decoder = {"7": {"content": "<|im_end|>", "id": 3}, "9": {"content": "[END]"}}
    config = {"chat_template": template, "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read(LLAMA | {"eos_token_id": 2}).eos_ids == expected


def test_weights_of_another_name_are_refused(read):
    with pytest.raises(UserError, match=r"transformers_weights names 'other\.safetensors'"):
        read(LLAMA | {"transformers_weights": "other.safetensors"})


def test_dangling_link_is_refused(read, tmp_path):
    (tmp_path / "generation_config.json").symlink_to("nowhere")
    with pytest.raises(UserError, match="is a link to nothing"):
        read(LLAMA)


def test_template_file_takes_precedence(read, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    decoder = {
        "7": {"content": "<|im_end|>", "special": True},
        "8": {"content": "<|eot_id|>", "special": True},
    }
    config = {"chat_template": "<|im_end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("<|eot_id|>")
    found = read(LLAMA)
    assert found.eos_ids == (8,)
    with pytest.warns(UserWarning, match="the model's files name no token$"):
        warn_of_turn_ends(found)


@pytest.mark.parametrize(
    "keys",
    [
        {"chat_template": "<|im_end|>", "added_tokens_decoder": {"9" * 5000: {"content": "<|im_end|>"}}},
        {"chat_template": [{"name": [], "template": "<|im_end|>"}]},
    ],
    ids=["an id of 5000 digits", "a template whose name is a list"],
)
def test_config_is_read_despite_odd_tokenizer_keys(keys, read, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(keys))
    assert read(LLAMA | {"eos_token_id": 2}).eos_ids == (2,)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja", "tokenizer.json"])
def test_config_is_read_despite_a_broken_tokenizer(name, read, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|im_end|>"}))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).write_bytes(b"\xff{")
    assert read(LLAMA | {"eos_token_id": 2}).eos_ids == (2,)


def test_model_without_a_matching_family_is_not_written(read):
    config = read(CASES["llama3"])
    for change, message in (
        ({"qk_norm": True}, "a llama model cannot have qk_norm=True"),
        ({"attention_bias": True}, "a llama model cannot have attention_out_bias=False"),
        ({"model_type": "qwen2"}, "a qwen2 model cannot have attention_bias=False"),
        ({"rope": RopeConfig(share=0.5)}, "a llama model cannot have partial_rotary_factor=0.5"),
        ({"no_rope": (1,)}, r"a llama model cannot have no_rope=\(1,\)"),
        ({"model_type": "other"}, "model_type 'other' has no Hugging Face class"),
    ):
        with pytest.raises(UserError, match=message):
            config_json(dataclasses.replace(config, **change), "float32")


def test_sizes_are_checked_without_a_file(read):
    config = read(LLAMA)
    assert isinstance(config, ModelConfig)
    with pytest.raises(UserError, match="num_kv_heads must be at least 1, got 0"):
        dataclasses.replace(config, num_kv_heads=0)
