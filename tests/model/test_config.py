"""Configurations from config.json: published traps are read right, unsupported and contradictory fields refused."""

import dataclasses
import functools
import json
import math
import operator
import re
from pathlib import Path

import pytest

from dsa_jax.config import (
    ConfigError,
    HyperConnectionsConfig,
    KdaConfig,
    ModelConfig,
    QuantizationConfig,
    RopeConfig,
    YarnConfig,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"
SUPPORTED = ("dsv32", "dsv32_tp8", "glm5", "glm52", "glm52_tp8", "glm5_fp8", "glm5_tp8", "glm5_wide")
FLASH = ("glm53_flash", "flash_tp8")
FOLDERS = sorted(f.parent for f in FIXTURES.glob("oracle/*/*/config.json"))
DROP = object()


def published(name):
    return json.loads((FIXTURES / "configs" / f"{name}.json").read_text())


def changed(name="glm-5.2", **changes):
    """A published config.json with fields replaced or dropped; `rope_scaling__factor` changes a nested field."""
    raw = published(name)
    for key, value in changes.items():
        *outer, last = key.split("__")
        place = functools.reduce(operator.getitem, outer, raw)
        if value is DROP:
            del place[last]
        else:
            place[last] = value
    return raw


def refused(raw, *words):
    with pytest.raises(ConfigError) as info:
        ModelConfig.from_dict(raw)
    for word in words:
        assert word in str(info.value), f"{word!r} not in {info.value}"


def oracle_names(folders):
    return [f"{f.parent.name}-{f.name}" for f in folders]


# ---------------------------------------------------------------------------------------------- published checkpoints


def test_glm5():
    config = ModelConfig.from_dict(published("glm-5"))
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("glm_moe_dsa", 154880, 6144)
    assert (config.num_layers, config.num_heads) == (78, 64)
    assert (config.q_lora_rank, config.kv_lora_rank) == (2048, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (192, 64, 256)
    assert config.qk_head_dim == 256 and config.softmax_scale == 0.0625
    assert config.rope == RopeConfig(theta=1e6, yarn=None)
    assert dataclasses.astuple(config.indexer) == (32, 128, 2048, True)
    assert config.moe is not None and dataclasses.astuple(config.moe) == (256, 8, 1, 2048, 1, 1, 2.5, True)
    assert config.indexer_types == ("full",) * 78
    assert config.mlp_types == ("dense",) * 3 + ("sparse",) * 75
    assert config.intermediate_size == 12288 and config.max_position_embeddings == 202752
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert config.rms_norm_eps == 1e-5 and config.latent_norm_eps == 1e-6
    assert config.quantization is None and not config.tie_word_embeddings and config.num_mtp_layers == 1


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.2-fp8"])
def test_glm52_shares_indexers(name):
    config = ModelConfig.from_dict(published(name))
    full = [layer for layer, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, *range(2, 78, 4)] and len(full) == 21 and full[-1] == 74
    assert set(config.indexer_types) == {"full", "shared"}
    assert config.rope.theta == 8e6
    # Its head_dim is 192, which is neither the width of a head nor of its rotated part.
    assert (config.qk_head_dim, config.qk_rope_head_dim) == (256, 64)
    quantization = QuantizationConfig("fp8", (128, 128)) if name.endswith("fp8") else None
    assert config.quantization == quantization


def test_deepseek_v32():
    config = ModelConfig.from_dict(published("deepseek-v3.2"))
    assert config.rope == RopeConfig(1e4, YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0))
    assert config.rope.yarn is not None and config.rope.yarn.cos_sin_scale == 1.0
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2, rel=1e-12)
    assert dataclasses.astuple(config.indexer) == (64, 128, 2048, False)
    assert config.moe is not None and (config.moe.n_group, config.moe.topk_group) == (8, 4)
    assert config.mlp_types == ("dense",) * 3 + ("sparse",) * 58
    assert config.eos_token_ids == (1,)
    assert config.quantization == QuantizationConfig("fp8", (128, 128), power_of_two=True)
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-6


@pytest.mark.parametrize("folder", FOLDERS, ids=oracle_names(FOLDERS))
def test_every_fixture_folder(folder):
    name = folder.parent.name
    if name in FLASH:
        return
    assert name in SUPPORTED
    config = ModelConfig.from_folder(folder)
    raw = json.loads((folder / "config.json").read_text())
    meta = json.loads((folder.parent / "meta.json").read_text())
    # DeepSeek-V3.2 has no such list: each of its layers owns an indexer.
    assert list(config.indexer_types) == (meta["indexer_types"] or ["full"] * config.num_layers)
    assert list(config.mlp_types) == meta["mlp_layer_types"]
    assert config.num_layers == raw["num_hidden_layers"] == len(config.indexer_types)
    assert config.indexer.rope_interleave == (not name.startswith("dsv32"))
    assert (config.rope.yarn is not None) == name.startswith("dsv32")
    assert (config.quantization is not None) == (name == "glm5_fp8")


@pytest.mark.parametrize("name", [name for name in (*SUPPORTED, "glm53_flash") if name != "glm5_fp8"])
def test_as_transformers_saved_it(name):
    """The library writes other spellings (rope_parameters, layer_types, both rope types), never another model."""
    folder = FIXTURES / "oracle" / name
    saved = ModelConfig.from_dict(json.loads((folder / "config_hf_saved.json").read_text()))
    assert saved == ModelConfig.from_folder(folder / "single")


# ------------------------------------------------------------------------------------------------------- index sharing


def schedule(**changes):
    changes.setdefault("indexer_types", DROP)
    return "".join(kind[0].upper() for kind in ModelConfig.from_dict(changed(**changes)).indexer_types)


def test_schedule_of_freq_and_offset():
    listed = "".join(kind[0].upper() for kind in published("glm-5.2")["indexer_types"])
    assert schedule() == listed
    # The default offset 2 of frequency 4, and frequency 1, which is the default.
    assert schedule(index_skip_topk_offset=DROP).startswith("FFSSSFSSSFSSS")
    assert schedule(index_topk_freq=DROP) == "F" * 78
    assert schedule(index_topk_freq=None) == "F" * 78


def test_schedule_of_deepseek():
    config = ModelConfig.from_dict(changed("deepseek-v3.2", index_topk_freq=4))
    assert [i for i, kind in enumerate(config.indexer_types) if kind == "full"][:4] == [0, 1, 5, 9]


def test_pattern_overrides_freq():
    pattern = "FS" * 39
    assert schedule(index_topk_pattern=pattern) == pattern
    words = ["full" if letter == "F" else "shared" for letter in pattern]
    assert schedule(index_topk_pattern=words) == pattern


def test_indexer_types_alone():
    types = ["full", *["shared"] * 77]
    config = ModelConfig.from_dict(changed(index_topk_freq=DROP, indexer_types=types))
    assert list(config.indexer_types) == types


def test_schedules_that_disagree_are_refused():
    types = published("glm-5.2")["indexer_types"]
    other = ["full" if i == 3 else kind for i, kind in enumerate(types)]
    refused(changed(indexer_types=other), "indexer_types[3]='full'", "index_topk_freq=4", "'shared'")
    refused(changed(index_topk_freq=1), "indexer_types[3]='shared'", "index_topk_freq=1", "'full'")
    refused(changed(index_topk_pattern="F" * 78), "indexer_types[3]='shared'", "index_topk_pattern", "'full'")


def test_shared_layer_without_a_selection_is_refused():
    # Offset 0 of frequency 4: layer 0 would be the second of its group.
    refused(changed(indexer_types=DROP, index_skip_topk_offset=0), "index_skip_topk_offset=0", "layer 0 'shared'")
    refused(changed(indexer_types=DROP, index_topk_pattern="S" + "F" * 77), "index_topk_pattern", "layer 0 'shared'")
    refused(
        changed(index_topk_freq=DROP, indexer_types=["shared"] + ["full"] * 77), "indexer_types", "layer 0 'shared'"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["full"] * 77}, ("indexer_types", "num_hidden_layers=78", "77 entries")),
        ({"indexer_types": ["full"] * 79}, ("indexer_types", "num_hidden_layers=78", "79 entries")),
        ({"indexer_types": ["half"] + ["full"] * 77}, ("indexer_types[0]='half'", "'full'")),
        ({"indexer_types": "full"}, ("indexer_types", "'full'")),
        ({"indexer_types": DROP, "index_topk_pattern": "FSF"}, ("index_topk_pattern='FSF'", "num_hidden_layers=78")),
        ({"indexer_types": DROP, "index_topk_pattern": "X" * 78}, ("index_topk_pattern", "F or S")),
        ({"indexer_types": DROP, "index_topk_pattern": ["full"]}, ("index_topk_pattern", "num_hidden_layers=78")),
        ({"indexer_types": DROP, "index_topk_freq": 0}, ("index_topk_freq=0",)),
        ({"indexer_types": DROP, "index_skip_topk_offset": -1}, ("index_skip_topk_offset=-1",)),
    ],
)
def test_bad_schedule(changes, words):
    refused(changed(**changes), *words)


# ------------------------------------------------------------------------------------------- layout of the index RoPE


@pytest.mark.parametrize(("name", "default"), [("glm-5.2", True), ("glm-5", True), ("deepseek-v3.2", False)])
def test_index_rope_layout(name, default):
    raw = published(name)
    raw.pop("indexer_rope_interleave", None)
    assert ModelConfig.from_dict(raw).indexer.rope_interleave is default
    for flag in (True, False):
        assert ModelConfig.from_dict({**raw, "indexer_rope_interleave": flag}).indexer.rope_interleave is flag
    refused({**raw, "indexer_rope_interleave": 1}, "indexer_rope_interleave=1")


# ---------------------------------------------------------------------------------------------------------------- rope

YARN = {
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 10000, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_theta": 10000, "type": "yarn", "rope_type": "yarn", **YARN}},
        {"rope_theta": 10000, "rope_parameters": {"rope_type": "yarn", **YARN}},
        {
            "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", **YARN},
            "rope_parameters": {"rope_theta": 10000, "rope_type": "yarn", **YARN},
        },
    ],
)
def test_both_spellings_of_rope(spelling):
    raw = changed("deepseek-v3.2", rope_theta=DROP, rope_scaling=DROP)
    assert ModelConfig.from_dict({**raw, **spelling}).rope == ModelConfig.from_dict(published("deepseek-v3.2")).rope


def test_rope_without_scaling():
    raw = changed("deepseek-v3.2", rope_scaling=None)
    config = ModelConfig.from_dict(raw)
    assert config.rope == RopeConfig(1e4, None) and config.softmax_scale == 192**-0.5
    assert ModelConfig.from_dict({**raw, "rope_scaling": {"type": "default"}}).rope == config.rope


def test_yarn_without_mscale():
    config = ModelConfig.from_dict(
        changed("deepseek-v3.2", rope_scaling__mscale=DROP, rope_scaling__mscale_all_dim=DROP)
    )
    assert config.softmax_scale == 192**-0.5
    assert config.rope.yarn is not None
    assert config.rope.yarn.cos_sin_scale == pytest.approx(0.1 * math.log(40) + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling__type": "linear"}, ("rope_scaling.rope_type='linear'", "'yarn'")),
        ({"rope_scaling__rope_type": "default"}, ("rope_scaling.rope_type='default'", "type='yarn'")),
        ({"rope_scaling__factor": DROP}, ("rope_scaling.factor is missing",)),
        ({"rope_scaling__factor": 0.5}, ("rope_scaling.factor=0.5",)),
        ({"rope_scaling__factor": 4}, ("max_position_embeddings=163840", "rope_scaling.factor=4.0", "4096")),
        ({"rope_scaling__original_max_position_embeddings": DROP}, ("original_max_position_embeddings is missing",)),
        ({"rope_scaling__mscale": DROP}, ("mscale=None", "mscale_all_dim=1.0")),
        ({"rope_scaling__mscale_all_dim": DROP}, ("mscale=1.0", "mscale_all_dim=None")),
        ({"rope_scaling__attention_factor": 1.5}, ("rope_scaling.attention_factor=1.5", "'yarn'")),
        ({"rope_scaling__truncate": False}, ("rope_scaling.truncate=False",)),
        ({"rope_scaling__rope_theta": 5}, ("rope_scaling.rope_theta=5", "rope_theta=10000.0")),
        ({"rope_scaling__type": ["yarn"]}, ("rope_scaling.rope_type=['yarn']", "'yarn'")),
        ({"rope_scaling": "yarn"}, ("rope_scaling='yarn'", "object")),
        ({"rope_theta": DROP}, ("rope_theta is missing",)),
        ({"rope_theta": 0}, ("rope_theta=0",)),
        (
            {"rope_parameters": {"rope_theta": 20000, "rope_type": "default"}},
            ("rope_theta=10000", "rope_parameters.rope_theta=20000.0"),
        ),
        (
            {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
            ("rope_scaling", "factor=40.0", "rope_parameters", "yarn=None"),
        ),
    ],
)
def test_bad_rope(changes, words):
    refused(changed("deepseek-v3.2", **changes), *words)


def test_rope_parameters_per_kind_of_layer_are_refused():
    refused(
        changed(rope_parameters={"rope_theta": 1e6, "full_attention": {"rope_type": "default"}}),
        "rope_parameters.full_attention",
    )
    refused(changed(rope_parameters=DROP), "rope_theta is missing")


# ---------------------------------------------------------------------------------------------------- kinds of layers


@pytest.mark.parametrize("kind", ["deepseek_sparse_attention", "indexed_attention"])
def test_layer_types(kind):
    assert ModelConfig.from_dict(changed(layer_types=[kind] * 78)) == ModelConfig.from_dict(published("glm-5.2"))


@pytest.mark.parametrize("kind", ["full_attention", "linear_attention", "sliding_attention"])
def test_other_layer_types_are_refused(kind):
    refused(changed(layer_types=["indexed_attention"] * 77 + [kind]), f"layer_types[77]={kind!r}", "indexed_attention")
    refused(changed(layer_types=["indexed_attention"]), "layer_types", "num_hidden_layers=78", "1 entries")


def test_mlp_types():
    raw = changed(mlp_layer_types=DROP)
    assert ModelConfig.from_dict(raw).mlp_types == ("dense",) * 3 + ("sparse",) * 75
    raw["moe_layer_freq"] = 2
    assert ModelConfig.from_dict(raw).mlp_types[:7] == ("dense",) * 4 + ("sparse", "dense", "sparse")
    listed = ["sparse", *["dense"] * 77]
    del raw["first_k_dense_replace"]
    assert list(ModelConfig.from_dict({**raw, "mlp_layer_types": listed}).mlp_types) == listed
    refused(raw, "mlp_layer_types is missing", "first_k_dense_replace")


def test_mlp_types_that_disagree_are_refused():
    refused(changed(first_k_dense_replace=4), "mlp_layer_types[3]='sparse'", "first_k_dense_replace=4", "'dense'")
    refused(changed(moe_layer_freq=2), "mlp_layer_types[3]='sparse'", "moe_layer_freq=2", "'dense'")
    refused(changed(mlp_layer_types=["dense"] * 3), "mlp_layer_types", "num_hidden_layers=78", "3 entries")
    refused(changed(mlp_layer_types=["moe"] * 78), "mlp_layer_types[0]='moe'", "sparse")


def test_dense_model_needs_no_experts():
    raw = changed("glm-5", first_k_dense_replace=78, n_routed_experts=DROP, moe_intermediate_size=DROP)
    assert ModelConfig.from_dict(raw).moe is None


# ------------------------------------------------------------------------------------------------------ GLM-5.3-Flash


def flash(**changes):
    return changed("glm-5.3-flash", **{f"text_config__{name}": value for name, value in changes.items()})


def test_flash():
    config = ModelConfig.from_dict(flash())
    assert (config.model_type, config.num_layers, config.hidden_size, config.num_heads) == ("glm5_next", 45, 4096, 64)
    assert config.sparse_layers == tuple(range(3, 45, 4)) and len(config.sparse_layers) == 11
    assert {kind: config.indexer_types.count(kind) for kind in ("full", "none")} == {"full": 11, "none": 34}
    assert config.kda == KdaConfig(64, 128, 4, -5.0) and config.kda.width == 8192
    assert config.hyper_connections == HyperConnectionsConfig(4, 20, 1e-6)
    assert (config.index_kpool, config.selected_width, config.swiglu_limit) == (4, 2051, 10.0)
    assert config.rope is None and config.qk_rope_head_dim == 0 and config.softmax_scale == 0.0625
    assert config.moe is not None and config.moe.num_experts == 288
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-5
    assert config.tensor_prefix == "model.language_model." and config.eos_token_ids == (154820, 154827, 154829)
    plain = ModelConfig.from_dict(published("glm-5.2"))
    assert (plain.index_kpool, plain.selected_width, plain.kda, plain.swiglu_limit) == (1, 2048, None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mhc": False}, ("text_config.mhc=False", "True")),
        ({"mla_use_nope": False}, ("mla_use_nope=False",)),
        ({"index_kpool_compress": False}, ("index_kpool_compress=False",)),
        ({"index_kpool_always_select_tail": False}, ("index_kpool_always_select_tail=False",)),
        ({"qk_rope_head_dim": 64, "qk_head_dim": 320}, ("qk_rope_head_dim=64", "0")),
        ({"index_kpool": DROP}, ("index_kpool is missing",)),
        ({"index_kpool": 3}, ("index_topk=2048", "index_kpool=3")),
        ({"index_kpool": 1}, ("index_kpool=1",)),
        ({"layer_types": ["linear_attention"] * 45, "linear_attn_config__kda_layers": DROP}, ("full_attn_layers",)),
        ({"layer_types": DROP}, ("layer_types is missing",)),
        ({"linear_attn_config": DROP}, ("linear_attn_config is missing",)),
        ({"linear_attn_config__kda_layers": [0, 1]}, ("kda_layers=[0, 1]", "layer_types")),
        ({"linear_attn_config__gate_lower_bound": 1.0}, ("gate_lower_bound=1.0", "[-80, 0)")),
        ({"linear_num_heads": 8}, ("linear_num_heads=8", "num_heads=64")),
        ({"indexer_types": ["shared"] * 45}, ("indexer_types[0]='shared'", "full")),
        ({"index_topk_freq": 4}, ("index_topk_freq=4",)),
        ({"swiglu_limit": DROP}, ("swiglu_limit is missing",)),
        ({"model_type": "other"}, ("text_config.model_type='other'",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_flash_refused(changes, words):
    refused(flash(**changes), *words)


def test_flash_needs_its_text_config():
    refused(changed("glm-5.3-flash", text_config=DROP), "text_config=None")


# ------------------------------------------------------------------------------------------------- unsupported fields


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": DROP}, ("model_type is missing", "glm_moe_dsa", "deepseek_v32")),
        ({"model_type": "glm5_next"}, ("model_type='glm5_next'", "Glm5NextForConditionalGeneration")),
        ({"model_type": "glm5_next_text"}, ("model_type='glm5_next_text'", "not supported")),
        ({"model_type": "deepseek_v4"}, ("model_type='deepseek_v4'", "not supported", "glm_moe_dsa")),
        ({"model_type": ["glm_moe_dsa"]}, ("model_type=['glm_moe_dsa']",)),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, ("DeepseekV32ForCausalLM", "glm_moe_dsa")),
        ({"attention_bias": True}, ("attention_bias=True", "False")),
        ({"mlp_bias": True}, ("mlp_bias=True", "False")),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
        ({"scoring_func": "softmax"}, ("scoring_func='softmax'", "'sigmoid'")),
        ({"topk_method": "greedy"}, ("topk_method='greedy'", "'noaux_tc'")),
        ({"moe_router_dtype": "bfloat16"}, ("moe_router_dtype='bfloat16'", "'float32'")),
        ({"rope_interleave": False}, ("rope_interleave=False", "True")),
        ({"index_kpool": 4}, ("index_kpool=4", "1")),
        ({"swiglu_limit": 10.0}, ("swiglu_limit=10.0",)),
        ({"q_lora_rank": None}, ("q_lora_rank",)),
        ({"q_lora_rank": DROP}, ("q_lora_rank",)),
        ({"num_key_value_heads": 8}, ("num_key_value_heads=8", "num_attention_heads=64")),
        ({"qk_head_dim": 192}, ("qk_head_dim=192", "qk_nope_head_dim=192 + qk_rope_head_dim=64=256")),
        ({"qk_nope_head_dim": 193, "qk_head_dim": DROP, "qk_rope_head_dim": 63}, ("qk_rope_head_dim=63", "even")),
        ({"index_head_dim": 32}, ("qk_rope_head_dim=64", "index_head_dim=32")),
        ({"n_group": 3}, ("n_routed_experts=256", "n_group=3")),
        ({"topk_group": 2}, ("topk_group=2", "n_group=1")),
        ({"num_experts_per_tok": 257}, ("num_experts_per_tok=257", "256")),
        ({"n_group": 256, "topk_group": 8}, ("n_group=256", "n_routed_experts=256")),
        ({"n_group": 64, "topk_group": 1}, ("num_experts_per_tok=8", "topk_group=1", "n_group=64")),
        ({"num_experts": 128}, ("num_experts=128", "n_routed_experts=256")),
        ({"num_local_experts": 128}, ("num_local_experts=128", "n_routed_experts=256")),
        ({"eos_token_id": 154880}, ("eos_token_id=154880", "vocab_size=154880")),
        ({"eos_token_id": [1, "</s>"]}, ("eos_token_id=[1, '</s>']",)),
        ({"eos_token_id": [-1]}, ("eos_token_id=[-1]",)),
        ({"num_nextn_predict_layers": -1}, ("num_nextn_predict_layers=-1",)),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings='no'",)),
        ({"norm_topk_prob": 1}, ("norm_topk_prob=1",)),
        ({"index_topk": 0}, ("index_topk=0",)),
        ({"hidden_size": 6144.0}, ("hidden_size=6144.0", "int")),
        ({"hidden_size": True}, ("hidden_size=True", "int")),
        ({"num_hidden_layers": -1}, ("num_hidden_layers=-1",)),
        ({"rms_norm_eps": "1e-5"}, ("rms_norm_eps='1e-5'",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps=nan",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused(changes, words):
    refused(changed(**changes), *words)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rms_norm_eps",
        "intermediate_size",
        "max_position_embeddings",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "norm_topk_prob",
    ],
)
def test_missing_field_is_named(name):
    with pytest.raises(ConfigError, match=rf"\b{name} is missing"):
        ModelConfig.from_dict(changed(**{name: DROP}))


def test_fields_that_do_not_matter():
    raw = changed(head_dim=7, attention_dropout=0.5, ep_size=8, pretraining_tp=4, use_cache=False, num_experts=256)
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(published("glm-5.2"))


# ------------------------------------------------------------------------------------------------------- quantization


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("unknown quantization", "'modelopt'", "quant_algo='FP8'")),
        ({"quant_method": "modelopt"}, ("unknown quantization", "'modelopt'", "'NVFP4'")),
        ({**NVFP4, "group_size": 32}, ("group_size=32", "16")),
        (
            {**NVFP4, "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
            ("config_groups.group_0.weights.num_bits=8", "4"),
        ),
        ({**NVFP4, "ignore": "lm_head"}, ("'lm_head'", "list")),
        ({"quant_method": "nvfp4"}, ("unknown quantization", "quant_method='nvfp4'", "'fp8'")),
        ({"quant_method": "compressed-tensors"}, ("unknown quantization", "'compressed-tensors'")),
        ({}, ("unknown quantization", "quant_method=None")),
        ({"quant_method": "fp8"}, ("unknown quantization", "weight_block_size=None")),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ("weight_block_size=[128]",)),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, ("weight_block_size=[128, 0]",)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, ("fmt='e5m2'", "'e4m3'")),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            ("activation_scheme='static'", "'dynamic'"),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e8"},
            ("scale_fmt='e8'", "'ue8m0'"),
        ),
    ],
)
def test_other_quantization_is_refused(quantization, words):
    refused(changed(quantization_config=quantization), *words)


def test_block_of_fp8_is_read():
    raw = changed(quantization_config={"quant_method": "fp8", "weight_block_size": [64, 256]})
    assert ModelConfig.from_dict(raw).quantization == QuantizationConfig("fp8", (64, 256))


@pytest.mark.parametrize(
    "section",
    [
        {**NVFP4, "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]},
        {
            **NVFP4,
            "ignore": ["lm_head", "model.layers.0.self_attn*"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        },
    ],
)
def test_nvfp4_is_read(section, tmp_path):
    """In config.json, or in the file that ModelOpt writes beside it."""
    quantization = ModelConfig.from_dict(changed(quantization_config=section)).quantization
    assert quantization == QuantizationConfig("nvfp4", (128, 128), ("lm_head", "model.layers.0.self_attn*"))
    assert quantization.excludes("model.layers.0.self_attn.o_proj.weight")
    assert not quantization.excludes("model.layers.1.self_attn.o_proj.weight")
    write(tmp_path, "config.json", published("glm-5.2"))
    write(tmp_path, "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": section})
    assert ModelConfig.from_folder(tmp_path).quantization == quantization


# --------------------------------------------------------------------------------------------------------- eps and eos


def test_latent_norm_eps():
    raw = published("glm-5.2")
    assert ModelConfig.from_dict(raw).latent_norm_eps == 1e-6
    config = ModelConfig.from_dict(raw, latent_norm_eps=1e-5)
    assert config.latent_norm_eps == 1e-5 and config.rms_norm_eps == 1e-5
    for bad in (0.0, -1e-6, float("inf")):
        with pytest.raises(ConfigError, match=f"latent_norm_eps={bad}"):
            ModelConfig.from_dict(raw, latent_norm_eps=bad)


def test_eos_of_the_config():
    assert ModelConfig.from_dict(changed(eos_token_id=7)).eos_token_ids == (7,)
    assert ModelConfig.from_dict(changed(eos_token_id=[7, 9])).eos_token_ids == (7, 9)
    assert ModelConfig.from_dict(changed(eos_token_id=None)).eos_token_ids == ()


# -------------------------------------------------------------------------------------------------------------- folders


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_eos_of_the_generation_config(tmp_path):
    write(tmp_path, "config.json", changed(eos_token_id=DROP))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == ()
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 6]})
    assert ModelConfig.from_folder(str(tmp_path)).eos_token_ids == (5, 6)
    write(tmp_path, "config.json", changed(eos_token_id=7))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 6)
    write(tmp_path, "generation_config.json", {"temperature": 1.0})
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7,)
    write(tmp_path, "generation_config.json", "{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not a JSON file"):
        ModelConfig.from_folder(tmp_path)


def test_folder_options_reach_the_config(tmp_path):
    write(tmp_path, "config.json", published("glm-5.2"))
    assert ModelConfig.from_folder(tmp_path, latent_norm_eps=1e-5).latent_norm_eps == 1e-5


def test_errors_of_a_folder_name_it(tmp_path):
    path = re.escape(str(tmp_path))
    with pytest.raises(ConfigError, match=f"{path}: the folder has no config.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=f"{path}/none: no such folder"):
        ModelConfig.from_folder(tmp_path / "none")
    write(tmp_path, "config.json", '{"model_type": ')
    with pytest.raises(ConfigError, match=rf"{path}/config\.json: not a JSON file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=rf"{path}/config\.json: not a JSON file"):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, "config.json", [1])
    with pytest.raises(ConfigError, match=rf"{path}/config\.json: must hold a JSON object, got list"):
        ModelConfig.from_folder(tmp_path)
    write(tmp_path, "config.json", changed(hidden_act="gelu"))
    with pytest.raises(ConfigError, match=f"{path}: hidden_act='gelu'"):
        ModelConfig.from_folder(tmp_path)


def test_other_quantization_described_beside_the_config_is_refused(tmp_path):
    write(tmp_path, "config.json", published("glm-5.2"))
    write(tmp_path, "hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}})
    with pytest.raises(ConfigError, match=r"unknown quantization.*modelopt.*W4A8_AWQ"):
        ModelConfig.from_folder(tmp_path)


def test_config_is_frozen_and_hashable():
    config = ModelConfig.from_dict(published("glm-5.2"))
    assert hash(config) == hash(ModelConfig.from_dict(published("glm-5.2")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 1  # type: ignore[misc]
