"""Tiny checkpoints have the layout of published ones, and a seed writes the same bytes again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from dsa_jax.config import ModelConfig
from dsa_jax.tiny import FAMILIES, write_tiny

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"


def headers(folder):
    """Name -> (file, dtype, shape) of every tensor in a folder's weight files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                view = content.get_slice(name)
                assert name not in found
                found[name] = (file.name, view.get_dtype(), tuple(view.get_shape()))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "made" / "here"
    return request.param, folder, write_tiny(folder, request.param, seed=3)


def test_config(tiny):
    family, folder, config = tiny
    assert ModelConfig.from_folder(folder) == config
    model_types = {"dsv32": "deepseek_v32", "glm53_flash": "glm5_next"}
    assert config.model_type == model_types.get(family, "glm_moe_dsa")
    assert (config.kda is not None) == ("none" in config.indexer_types) == (family == "glm53_flash")
    assert config.num_heads == config.indexer.num_heads == 8
    assert ("shared" in config.indexer_types) == (family == "glm52")
    assert (config.rope is not None and config.rope.yarn is not None) == (family == "dsv32")
    assert config.moe is not None and (config.moe.n_group > 1) == (family == "dsv32")
    assert {"dense", "sparse"} == set(config.mlp_types)


def test_names_and_dtypes_are_the_published_ones(tiny):
    family, folder, config = tiny
    mtp = f"{config.tensor_prefix}layers.{config.num_layers}."
    ours = {name: (dtype, len(shape)) for name, (_, dtype, shape) in headers(folder).items()}
    variant = "flash_tp8" if family == "glm53_flash" else f"{family}_tp8"
    theirs = {n: (d, len(s)) for n, (_, d, s) in headers(ORACLE / variant / "single").items()}
    layers = {name: what for name, what in ours.items() if not name.startswith(mtp)}
    if family == "glm53_flash":
        # Other layers are linear, and there is no vision tower: the names are the same but for the layers' numbers.
        layers, theirs = ({re.sub(r"layers\.\d+", "layers.N", n): w for n, w in x.items()} for x in (layers, theirs))
        theirs = {name: what for name, what in theirs.items() if "visual" not in name}
    assert layers == theirs
    # The multi-token-prediction layer of the other fixture has another number and fewer experts.
    theirs = headers(ORACLE / "glm52" / "sharded")
    kinds = {re.sub(r"experts\.\d+", "experts.N", n[len("model.layers.6.") :]) for n in theirs if ".layers.6." in n}
    if family == "glm53_flash":
        kinds |= {f"self_attn.indexer.index_kpool_compress_{name}" for name in ("ape", "gate")}
    assert {re.sub(r"experts\.\d+", "experts.N", n[len(mtp) :]) for n in ours if n.startswith(mtp)} == kinds


def test_shapes(tiny):
    _, folder, c = tiny
    shapes = {name: shape for name, (_, _, shape) in headers(folder).items()}
    assert c.moe is not None
    model = c.tensor_prefix
    layer, attention = f"{model}layers.1.", f"{model}layers.1.self_attn."
    expected = {
        model + "embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
        attention + "q_a_proj.weight": (c.q_lora_rank, c.hidden_size),
        attention + "q_b_proj.weight": (c.num_heads * c.qk_head_dim, c.q_lora_rank),
        attention + "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        attention + "kv_b_proj.weight": (c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        attention + "o_proj.weight": (c.hidden_size, c.num_heads * c.v_head_dim),
        attention + "indexer.wq_b.weight": (c.indexer.num_heads * c.indexer.head_dim, c.q_lora_rank),
        attention + "indexer.wk.weight": (c.indexer.head_dim, c.hidden_size),
        attention + "indexer.weights_proj.weight": (c.indexer.num_heads, c.hidden_size),
        model + "layers.0.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        layer + "mlp.gate.weight": (c.moe.num_experts, c.hidden_size),
        layer + "mlp.experts.7.up_proj.weight": (c.moe.intermediate_size, c.hidden_size),
        layer + "mlp.shared_experts.down_proj.weight": (c.hidden_size, c.moe.intermediate_size),
        f"{model}layers.{c.num_layers}.eh_proj.weight": (c.hidden_size, 2 * c.hidden_size),
    }
    assert {name: shapes[name] for name in expected} == expected


def test_index(tiny):
    _, folder, _ = tiny
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = headers(folder)
    assert index["weight_map"] == {name: file for name, (file, _, _) in found.items()}
    assert len(set(index["weight_map"].values())) == 2
    sizes = [np.prod(shape) * {"BF16": 2, "F32": 4}[dtype] for _, dtype, shape in found.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert min(files) > 0.4 * sum(files)


def test_tokenizer_knows_every_byte(tiny):
    _, folder, config = tiny
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    text = "".join(map(chr, range(0x250))) + " \t\n\r\0 Grüße, 漢字 \U0001f680\u200d!"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode()) and len(set(ids)) > 128 and max(ids) < 256
    assert tokenizer.decode(ids) == text
    for eos in config.eos_token_ids:
        token = tokenizer.id_to_token(eos)
        assert token is not None and tokenizer.encode(f"a{token}b").ids[1:2] == [eos]


def test_weights_are_random_and_bounded(tiny):
    _, folder, _ = tiny
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                value = content.get_tensor(name).astype(np.float32)
                assert np.isfinite(value).all() and 0 < value.std() < 2.5, name


def test_seed_decides_the_files(tiny, tmp_path):
    family, folder, _ = tiny
    write_tiny(tmp_path / "same", family, seed=3)
    write_tiny(tmp_path / "other", family, seed=4)
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in (tmp_path / "same").iterdir())
    for name in names:
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes(), name
        differs = (tmp_path / "other" / name).read_bytes() != (folder / name).read_bytes()
        assert differs == name.endswith(".safetensors"), name


@pytest.mark.parametrize("family", ["glm53", "", None])
def test_unknown_family(family, tmp_path):
    with pytest.raises(ValueError, match=rf"family={family!r} is unknown.*glm52"):
        write_tiny(tmp_path, family)


@pytest.mark.parametrize("seed", [-1, 1.0, True])
def test_bad_seed(seed, tmp_path):
    with pytest.raises(ValueError, match=f"seed must be .* got {seed}"):
        write_tiny(tmp_path, "glm5", seed=seed)
    assert not list(tmp_path.iterdir())
