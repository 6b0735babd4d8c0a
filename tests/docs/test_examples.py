"""The example scripts do what they say."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOKENS, K = 96, 12


def load_example(name: str):
    """A script of scripts/examples as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "scripts" / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


research = load_example("research_model")


@pytest.fixture(scope="module")
def model():
    """Hidden states, layers and indexer of the research example, smaller than in its main."""
    return research.make_model(TOKENS)


def scores(x, index) -> np.ndarray:
    """The lightning indexer's scores [T, T] in float64."""
    q, keys, weights = (np.asarray(v, np.float64) for v in index(x))
    return np.einsum("ths,th->ts", np.maximum(np.einsum("thd,sd->ths", q, keys), 0), weights)


def best(row: np.ndarray, k: int) -> set[int]:
    """Ids of the k highest scores."""
    return set(np.argsort(-row, kind="stable")[:k].tolist())


def chosen(ids) -> list[set[int]]:
    """Ids of each row, which must not repeat."""
    rows = [row[row >= 0].tolist() for row in np.asarray(ids)]
    assert all(len(set(row)) == len(row) for row in rows)
    return [set(row) for row in rows]


def test_selections(model):
    """Each selection is what a loop over the rows picks, on scores in float64."""
    x, _, index = model
    every = scores(x, index)
    q, keys, _ = (np.asarray(v, np.float64) for v in index(x))
    q, keys = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (q, keys))
    cosines = np.einsum("thd,sd->ths", q, keys).max(axis=1)
    found = {name: chosen(select(x, index, K)) for name, select in research.SELECTIONS.items()}
    means = np.asarray(index(x)[1], np.float64).reshape(-1, 4, research.INDEX_DIM).mean(axis=1)
    dots = np.einsum("thd,sd->ths", np.asarray(index(x)[0], np.float64), means)
    pools = np.einsum("ths,th->ts", np.maximum(dots, 0), np.asarray(index(x)[2], np.float64))
    for t in range(TOKENS):
        assert found["lightning indexer"][t] == best(every[t, : t + 1], K)
        assert found["own indexer"][t] == best(cosines[t, : t + 1], K)
        forced = every[t, : t + 1].copy()
        forced[:2] = forced[max(0, t - 3) :] = np.inf
        assert found["own top-k"][t] == best(forced, K)
        full = (t + 1) // 4
        members = {4 * p + i for p in best(pools[t, :full], K // 4) for i in range(4)}
        assert found["pools of 4"][t] == members | set(range(full * 4, t + 1))


def test_attention_over_ids(model):
    """The differentiable attention is the operation's; the kept share is 1 where every visible key is selected."""
    x, layers, index = model
    ids = research.lightning(x, index, K)
    out, weights = research.gathered_attention(layers[1], ids)
    np.testing.assert_allclose(out, research.attend(layers[1], ids), rtol=0, atol=2e-6)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-6)
    assert float(research.kept(layers[0], research.lightning(x, index, TOKENS))) == pytest.approx(1, abs=1e-5)
    assert 0 < float(research.kept(layers[0], ids)) < 0.9


def test_gradients_reach_the_indexer_alone(model):
    """None to the model behind it; along a direction, that of finite differences with the selection held."""
    x, layers, index = model
    to_model = jax.grad(research.index_loss, argnums=(1, 2))(index, x, layers, K)
    assert all(not leaf.any() for leaf in jax.tree.leaves(to_model))
    gradient = jax.grad(research.index_loss)(index, x, layers, K)
    direction = jax.tree.map(lambda g: g / jnp.linalg.norm(g), gradient)
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))

    def moved(size: float) -> float:
        return float(research.index_loss(jax.tree.map(lambda w, d: w + size * d, index, direction), x, layers, TOKENS))

    # All keys selected: a selection that changes on the way would be a jump.
    everything = jax.grad(research.index_loss)(index, x, layers, TOKENS)
    along = zip(*map(jax.tree.leaves, (everything, direction)), strict=True)
    assert (moved(1e-2) - moved(-1e-2)) / 2e-2 == pytest.approx(sum(float(jnp.vdot(g, d)) for g, d in along), rel=0.02)
    assert slope > 0


def test_training_keeps_more(model):
    """The loss falls, and the trained indexer keeps more of the attention."""
    x, layers, index = model
    trained, losses = research.train(index, x, layers, k=32, steps=40)
    assert float(losses[-1]) < 0.5 * float(losses[0])
    before, after = (float(research.kept(layers[0], research.lightning(x, w, K))) for w in (index, trained))
    assert after > before + 0.2


def test_prefill_example(capsys):
    """It runs on the virtual devices that are there and finds its result equal to one device."""
    load_example("prefill_on_devices").main(["--virtual", "8", "--tp", "2", "--dcp", "2", "--tokens", "20", "3"])
    printed = capsys.readouterr().out
    assert "23 tokens on 2 devices" in printed and printed.endswith("equal to one device\n")
