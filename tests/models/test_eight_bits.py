"""Tests of 8-bit weights, quantised on loading or read from FP8 folders."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.checkpoints.fingerprint import agreement, fingerprint
from kvjax.errors import UserError
from kvjax.inference import generate, logits
from kvjax.mesh import make_mesh, use_mesh
from kvjax.models import load_model, save_model
from kvjax.models.decoder import Decoder
from kvjax.models.loading import model_shapes
from kvjax.models.names import MATRICES, TABLES
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.models.cases import CASES, PHI3, QWEN3, VOCABULARY, weights, write_folder
from tests.models.files import WIDE, assert_equal
from tests.models.refusals import error

pytestmark = pytest.mark.slow

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WHOLE_BLOCKS = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
IN_BLOCKS = {
    # keys and values have half a block's outputs
    "qwen3": QWEN3 | WHOLE_BLOCKS | {"intermediate_size": 256},
    "qwen3_moe": CASES["qwen3_moe"] | WHOLE_BLOCKS | {"moe_intermediate_size": 128},
    # queries, keys and values are one tensor
    "phi3": PHI3 | WHOLE_BLOCKS | {"intermediate_size": 128},
}
EVEN = WIDE | {"num_hidden_layers": 2, "rope_theta": 1e4}
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24))


def in_floats(model: Decoder) -> Decoder:
    """Return the model with its 8-bit matrices dequantised."""
    arrays = {name: x.value for name, x in model.unfused_arrays().items()}
    for part in MATRICES:
        values, scale = (
            np.asarray(arrays[f"layers.{name}.value"], np.float32) for name in (part, f"{part}_scale")
        )
        blocks, outputs = scale.shape[1], int(np.prod(scale.shape[2:]))
        flat = values.reshape(len(values), blocks, -1, outputs) * scale.reshape(
            len(values), blocks, 1, outputs
        )
        arrays[f"layers.{part}.value"] = jnp.asarray(flat.reshape(values.shape))
    for name in TABLES:
        if f"{name}_scale.value" in arrays:
            arrays[f"{name}.value"] = arrays[f"{name}.value"] * arrays[f"{name}_scale.value"][:, None]
    config = dataclasses.replace(model.config, weights=None, weight_block=0)
    with use_mesh():
        return model_shapes(config).with_unfused(arrays)


def in_blocks(case: dict) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return weights with the layers' matrices in FP8, and the same weights dequantised."""
    packed, plain, rng = {}, {}, np.random.default_rng(0)
    for name, x in weights(case).items():
        packed[name] = plain[name] = x
        if x.ndim == 1 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
            continue
        scale = rng.uniform(1e-4, 2e-3, [-(-size // 128) for size in x.shape]).astype(np.float32)
        values = rng.normal(0, 100, x.shape).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        by_number = scale.repeat(128, 0)[: len(x)].repeat(128, 1)[:, : x.shape[1]]
        packed |= {name: values, f"{name}_scale_inv": scale}
        plain[name] = values.astype(np.float32) * by_number
    return packed, plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("even"), EVEN)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["even", "qwen3_moe"])
def test_weights_are_rounded_to_nearest(case, kind, tmp_path):
    """The largest weight of each scale is exact. The others are off by half a step at most, which is 1/127 of the
    largest for integers, and for floats 1/8 of the number itself, or 2⁻⁹/448 of the largest."""
    given = EVEN if case == "even" else CASES[case]
    folder = write_folder(tmp_path, given)
    exact = {name: np.asarray(x.value) for name, x in load_model(folder).unfused_arrays().items()}
    model = load_model(folder, weights=kind)
    assert {model.layers.qkv.dtype.name, model.layers.down.dtype.name} <= {"int8", "float8_e4m3fn"}
    scales = {name: x for name, x in model.unfused_arrays().items() if name.endswith("_scale.value")}
    assert len(scales) == len(MATRICES) + (2 if kind == "int8" else 0)
    for name, x in in_floats(model).unfused_arrays().items():
        found, wanted = np.asarray(x.value), exact[name]
        scale = scales.get(name.replace(".value", "_scale.value"))
        if scale is None:
            np.testing.assert_array_equal(found, wanted)
            continue
        if len(scale.shape) == 1:
            found, wanted = found.T[None, None], wanted.T[None, None]
        else:
            outputs = int(np.prod(scale.shape[2:]))
            found, wanted = (y.reshape(len(y), scale.shape[1], -1, outputs) for y in (found, wanted))
        largest = np.abs(wanted).max(2, keepdims=True)
        step = largest / 127 if kind == "int8" else np.maximum(np.abs(wanted) / 8, largest / 448 * 2.0**-9)
        assert (np.abs(found - wanted) <= 0.5001 * step).all()
        np.testing.assert_allclose(np.abs(found).max(2, keepdims=True), largest, rtol=1e-6)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_fp8_folders_match_their_dequantised_weights(name, tmp_path):
    packed, plain = in_blocks(case := IN_BLOCKS[name])
    found = load_model(write_folder(tmp_path / "packed", case | {"quantization_config": FP8}, packed))
    assert found.layers.qkv.dtype == jnp.float8_e4m3fn
    wanted = load_model(write_folder(tmp_path / "plain", case, plain))
    assert_equal(in_floats(found), wanted)
    np.testing.assert_allclose(logits(found, TOKENS), logits(wanted, TOKENS), rtol=1e-4, atol=1e-4)


def test_fp8_logits_match_transformers(tmp_path):
    torch, transformers, _ = map(pytest.importorskip, ("torch", "transformers", "accelerate"))
    packed, _ = in_blocks(case := IN_BLOCKS["qwen3"])
    folder = write_folder(tmp_path, case | {"quantization_config": FP8}, packed)
    own = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    twin = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=own
    )
    with torch.no_grad():
        wanted = twin(torch.tensor(TOKENS)).logits.numpy()
    found = logits(load_model(folder, "float32"), TOKENS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def loaded(name: str, folder, tmp_path) -> Decoder:
    """Return a model that is quantised on loading (int8), or the model of an FP8 folder."""
    if name == "int8":
        return load_model(folder, weights=name)
    packed, _ = in_blocks(IN_BLOCKS[name])
    return load_model(write_folder(tmp_path, IN_BLOCKS[name] | {"quantization_config": FP8}, packed))


@pytest.mark.parametrize("name", ["qwen3", pytest.param("int8", marks=pytest.mark.thorough)])
def test_evictions_that_read_weights_see_dequantised_values(name, folder, tmp_path):
    model = loaded(name, folder, tmp_path)
    policy = make_policy("snapkv:ratio=0.5,observed=4,critical_kv")
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    found, wanted = (
        generate(x, [*TOKENS], sampling, policy=policy, chunk=16) for x in (model, in_floats(model))
    )
    assert [list(x) for x in found.tokens] == [list(x) for x in wanted.tokens]


@pytest.mark.parametrize("name", ["int8", "qwen3", "qwen3_moe"])
def test_generation_over_the_cache_matches_whole_sequences(name, folder, tmp_path):
    """A prompt's products use weights in floats, and those of a single token use 8-bit weights."""
    model, sampling = loaded(name, folder, tmp_path), SamplingParams(max_new_tokens=8, ignore_eos=True)
    answer = generate(model, [TOKENS[0]], sampling, chunk=16).tokens[0]
    after = logits(model, np.append(TOKENS[0], answer)[None])[0, TOKENS.shape[1] - 1 : -1]
    np.testing.assert_array_equal(answer, after.argmax(-1))


@pytest.mark.mesh
@pytest.mark.parametrize(
    "shape", [{"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"data": 2, "sequence": 2}], ids=str
)
@pytest.mark.parametrize("name", ["int8", "qwen3", "qwen3_moe"])
def test_weights_and_logits_do_not_depend_on_the_mesh(name, shape, folder, tmp_path):
    whole = loaded(name, folder, tmp_path)
    with jax.set_mesh(make_mesh(**shape)):
        split = loaded(name, folder, tmp_path)
        found = logits(split, TOKENS)
    assert_equal(split, whole)
    np.testing.assert_allclose(found, logits(whole, TOKENS), rtol=1e-4, atol=1e-4)


def test_fingerprint_barely_changes_in_eight_bits(folder):
    plain = fingerprint(load_model(folder))
    assert all(agreement(plain, fingerprint(load_model(folder, weights=x))) > 0.98 for x in ("int8", "fp8"))


def test_eight_bit_model_is_not_written(folder, tmp_path):
    with pytest.raises(UserError, match="int8 weights are read, but not written"):
        save_model(load_model(folder, weights="int8"), tmp_path / "new")


def test_unknown_weights_dtype_is_refused(folder):
    assert error(folder, weights="int4") == "weights must be int8 or fp8, got 'int4'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, "must be e4m3 in blocks of 128 × 128"),
        ({"weight_block_size": None}, "must be e4m3 in blocks of 128 × 128"),
        ({"fmt": "e5m2"}, "must be e4m3 in blocks of 128 × 128, got 'e5m2'"),
        ({"weights": "int8"}, "weights must be fp8, as in the model's files, or left out, got int8"),
        ({"scale": (1, 2)}, "k_proj.weight_scale_inv is (1, 2), expected (1, 1)"),
        ({"scale": None}, "missing: model.layers.0.self_attn.k_proj.weight_scale_inv"),
        ({"hidden_size": 192}, "hidden_size must be a multiple of 128"),
        ({"matrix": np.float32}, "of an unsupported dtype: model.layers.0.self_attn.k_proj.weight is F32"),
        ({"nan": True}, "NaN or infinite numbers in model.layers.0.self_attn.k_proj.weight"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_unsupported_fp8_folders_are_refused(change, message, tmp_path):
    case = QWEN3 | {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "intermediate_size": 128}
    case |= {key: change[key] for key in ("hidden_size",) if key in change}
    packed, _ = in_blocks(case)
    name = "model.layers.0.self_attn.k_proj.weight"
    if "scale" in change:
        del packed[f"{name}_scale_inv"]
        if change["scale"] is not None:
            packed[f"{name}_scale_inv"] = np.ones(change["scale"], np.float32)
    if "matrix" in change:
        packed[name] = packed[name].astype(change["matrix"])
    if "nan" in change:
        packed[name][3, 3] = np.nan
    quantised = FP8 | {key: change[key] for key in ("weight_block_size", "fmt") if key in change}
    folder = write_folder(tmp_path, case | {"quantization_config": quantised}, packed)
    assert message in error(folder, **{key: change[key] for key in ("weights",) if key in change})
