"""docs/ops.md against the signatures and docstrings."""

import inspect
import re

import jax.numpy as jnp
import pytest

import dsa_jax
from pallas_kernels import ckv_records
from tests.docs.pages import ROOT

TEXT = (ROOT / "docs" / "ops.md").read_text()
SECTIONS = dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
EXPORTED = ("lightning_indexer", "topk", "index_topk", "sparse_mla", "merge_partials")
RECORDS = ("pack", "unpack", "append", "gather", "read", "split_index_keys")
ROW = re.compile(r"^\| `(\w+)(?:=([^`]*))?` \|([^|]*)\|", re.MULTILINE)  # argument, default, shape


def operation(name: str):
    """The function of a section."""
    module, _, function = name.rpartition(".")
    return getattr(ckv_records if module else dsa_jax, function)


def default_text(default) -> str:
    """A default as the page writes it."""
    if default is inspect.Parameter.empty:
        return ""
    return default.__name__ if isinstance(default, type(jnp.float32)) else repr(default)


def documented_shapes(function) -> dict[str, str]:
    """First shape of each argument in a docstring, or ""."""
    text = inspect.getdoc(function) or ""
    arguments = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    assert arguments is not None
    entries = re.findall(r"^  (\w+): (.*?)(?=^  \w+: |\Z)", arguments[1], re.DOTALL | re.MULTILINE)
    shapes = {name: re.search(r"\[[^\]]*\]", entry) for name, entry in entries}
    return {name: shape[0] if shape else "" for name, shape in shapes.items()}


def test_every_operation_has_a_section():
    """And nothing else has."""
    assert list(SECTIONS) == [*EXPORTED, *(f"ckv_records.{name}" for name in RECORDS)]
    assert all(callable(getattr(dsa_jax, name)) and name in dsa_jax.__all__ for name in EXPORTED)


@pytest.mark.parametrize("name", SECTIONS)
def test_arguments(name):
    """Names, order, defaults and shapes."""
    function, rows = operation(name), ROW.findall(SECTIONS[name])
    parameters = inspect.signature(function).parameters.values()
    assert [(n, d) for n, d, _ in rows] == [(p.name, default_text(p.default)) for p in parameters]
    shapes = documented_shapes(function)
    for argument, _, shape in rows:
        if shape.strip():
            assert shape.strip() == shapes[argument], f"{name}: {argument}"


@pytest.mark.parametrize("name", SECTIONS)
def test_implementations(name):
    """Those that the operation says it has."""
    function = operation(name)
    if "implementation" not in inspect.signature(function).parameters:
        assert "Implementations:" not in SECTIONS[name]
        return
    index = (
        jnp.zeros((2, 2, 8)),
        jnp.zeros((4, 8)),
        jnp.zeros((2, 2)),
        jnp.zeros(2, jnp.int32),
        jnp.ones(2, jnp.int32),
    )
    fmt = ckv_records.ckv_format("float32", kv_lora_rank=8, qk_rope_head_dim=4)
    slots = jnp.zeros(2, jnp.int32)
    pages = jnp.zeros((3, *fmt.page_shape(4)))
    calls = {
        "lightning_indexer": (index, {}),
        "topk": ((jnp.zeros((2, 8)), 2), {}),
        "index_topk": ((*index, 2), {}),
        "sparse_mla": (
            (jnp.zeros((2, 2, 12)), jnp.zeros((4, 12)), jnp.zeros((2, 2), jnp.int32)),
            {"softmax_scale": 1.0, "kv_lora_rank": 8},
        ),
        "ckv_records.pack": ((fmt, jnp.zeros((2, 12))), {}),
        "ckv_records.unpack": ((fmt, jnp.zeros((2, 12))), {}),
        "ckv_records.append": ((fmt, pages, jnp.zeros((2, 12)), slots), {}),
        "ckv_records.gather": ((fmt, pages, jnp.zeros((2, 2), jnp.int32), slots), {"num_rows": 4}),
        "ckv_records.read": ((fmt, pages, slots), {}),
    }
    arguments, options = calls[name]
    function(*arguments, **options)  # the call itself is right
    with pytest.raises(ValueError, match="is not one of") as error:
        function(*arguments, **options, implementation="no such")
    known = re.findall(r"'(\w+)'", str(error.value).rpartition("one of")[2])
    text = re.search(r"Implementations: (.*?)\.", SECTIONS[name], re.DOTALL)
    assert text is not None and re.findall(r"`(\w+)`", text[1]) == known
