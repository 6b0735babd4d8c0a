"""Sparse attention of your own on this library's operations, in one file.

    python scripts/examples/research_model.py

A small random model, and on it: another indexer, another selection, other k, other pools, one selection for several
layers, and the training of an indexer with gradients stopped. It prints how much of the full attention's weight each
selection keeps. docs/research.md walks through it. Runs on a CPU in seconds, on a GPU with its kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dsa_jax import index_topk, sparse_mla, topk

HEADS, LATENT, ROPE = 4, 32, 16
INDEX_HEADS, INDEX_DIM = 4, 32
SCALE = (LATENT + ROPE) ** -0.5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Index:
    """Weights of an indexer.

    Attributes:
      q: Queries [D, INDEX_HEADS * INDEX_DIM].
      k: Keys [D, INDEX_DIM].
      w: Head weights [D, INDEX_HEADS].
    """

    q: jax.Array
    k: jax.Array
    w: jax.Array

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Index queries [T, Hi, D], keys [T, D] and head weights [T, Hi] of hidden states x [T, D]."""
        scale = INDEX_HEADS**-0.5 * INDEX_DIM**-0.5
        return (x @ self.q).reshape(len(x), INDEX_HEADS, INDEX_DIM), x @ self.k, x @ self.w * scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's queries [T, HEADS, LATENT + ROPE] and compressed keys and values [T, LATENT + ROPE]."""

    q: jax.Array
    kv: jax.Array


def make_model(tokens: int, width: int = 64, seed: int = 0) -> tuple[jax.Array, list[Layer], Index]:
    """Hidden states [tokens, width] on 16 topics, two layers, and an indexer that knows nothing of the layers."""
    keys = jax.random.split(jax.random.key(seed), 10)
    topics = jax.random.normal(keys[8], (16, width))[jax.random.randint(keys[9], (tokens,), 0, 16)]
    x = 0.8 * topics + 0.6 * jax.random.normal(keys[0], (tokens, width))

    def project(key: jax.Array, columns: int) -> jax.Array:
        return jax.random.normal(key, (width, columns)) * width**-0.5

    layers = []
    for i in (1, 3):
        # Queries look like keys: tokens attend to those of their topic.
        w = project(keys[i], LATENT + ROPE)
        noise = 0.3 * jax.random.normal(keys[i + 1], (HEADS, tokens, LATENT + ROPE))
        layers.append(Layer(((x @ w) + noise).swapaxes(0, 1), x @ w))
    index = Index(
        project(keys[5], INDEX_HEADS * INDEX_DIM), project(keys[6], INDEX_DIM), jnp.abs(project(keys[7], INDEX_HEADS))
    )
    return x, layers, index


def causal(tokens: int) -> tuple[jax.Array, jax.Array]:
    """`key_start` and `key_end`: row t sees the keys 0..t."""
    return jnp.zeros((tokens,), jnp.int32), jnp.arange(1, tokens + 1, dtype=jnp.int32)


def attend(layer: Layer, ids: jax.Array) -> jax.Array:
    """Outputs [T, HEADS, LATENT] of attention to the selected ids [T, K]; any ids will do, -1 is skipped."""
    return sparse_mla(layer.q, layer.kv, ids, softmax_scale=SCALE, kv_lora_rank=LATENT)[0]


# --- Selections. Each returns ids [T, K] int32, -1 for none.


def lightning(x: jax.Array, index: Index, k: int) -> jax.Array:
    """DeepSeek's indexer as it is: scores and exact top-k in one operation, which never holds [T, S] scores at once."""
    q, keys, weights = index(x)
    return jnp.asarray(index_topk(q, keys, weights, *causal(len(x)), k))


def own_indexer(x: jax.Array, index: Index, k: int) -> jax.Array:
    """Another score with the exact top-k: the best cosine over the heads. Scores are yours, [T, S] float32."""
    q, keys, _ = index(x)
    q, keys = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (q, keys))
    scores = jnp.einsum("thd,sd->ths", q, keys, precision=jax.lax.Precision.HIGHEST).max(axis=1)
    return jnp.asarray(topk(scores, k, *causal(len(x))))


def own_topk(x: jax.Array, index: Index, k: int, *, sinks: int = 2, window: int = 4) -> jax.Array:
    """Another selection: the first and the last visible keys always, the rest by score.

    +inf is an ordinary score to `topk`, so what must be in gets it.
    """
    q, keys, weights = index(x)
    scores = jnp.einsum("thd,sd->ths", q, keys, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.einsum("ths,th->ts", jnp.maximum(scores, 0), weights, precision=jax.lax.Precision.HIGHEST)
    row, column = jnp.arange(len(x))[:, None], jnp.arange(len(x))[None]
    always = (column < sinks) | (column > row - window)
    return jnp.asarray(topk(jnp.where(always, jnp.inf, scores), k, *causal(len(x))))


def pooled(x: jax.Array, index: Index, k: int, *, pool: int = 4) -> jax.Array:
    """Whole pools of `pool` tokens by the mean of their keys, and the tail that fills no pool yet.

    `k // pool` pools: ids are of pools until they are expanded, so a row scores `pool` times fewer keys.
    """
    tokens = len(x)
    q, keys, weights = index(x)
    means = keys[: tokens // pool * pool].reshape(-1, pool, INDEX_DIM).mean(axis=1)
    start, end = causal(tokens)
    pools = jnp.asarray(index_topk(q, means, weights, start, end // pool, k // pool))
    inside = jnp.arange(pool, dtype=jnp.int32)
    members = jnp.where(pools[:, :, None] < 0, -1, pools[:, :, None] * pool + inside).reshape(tokens, -1)
    tail = (end // pool * pool)[:, None] + inside[: pool - 1]
    return jnp.concatenate([members, jnp.where(tail < end[:, None], tail, -1)], axis=1)


# --- Training. The operations have no gradients: ids are integers, and the kernels define none.


def gathered_attention(layer: Layer, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `attend` computes, in jnp and differentiable, with the attention weights: O(T * K) memory.

    Returns:
      Outputs [T, HEADS, LATENT] and weights [T, HEADS, K], 0 where the id is -1.
    """
    valid = ids >= 0
    kv = layer.kv[jnp.where(valid, ids, 0)]  # [T, K, LATENT + ROPE]
    scores = jnp.einsum("thd,tkd->thk", layer.q, kv, precision=jax.lax.Precision.HIGHEST) * SCALE
    weights = jax.nn.softmax(jnp.where(valid[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("thk,tkd->thd", weights, kv[..., :LATENT], precision=jax.lax.Precision.HIGHEST), weights


def index_loss(index: Index, x: jax.Array, layers: list[Layer], k: int) -> jax.Array:
    """DeepSeek-V3.2's loss of the indexer: KL of its scores from the attention over what it selected.

    The model is a constant to the indexer: its hidden states, the selection and the attention are behind
    `stop_gradient`, and the scores of the selected keys are computed again where jax can differentiate them.
    """
    x, layers = jax.lax.stop_gradient((x, layers))
    ids = lightning(x, jax.lax.stop_gradient(index), k)
    target = sum(gathered_attention(layer, ids)[1].mean(axis=1) for layer in layers) / len(layers)  # [T, K]
    q, keys, weights = index(x)
    dots = jnp.einsum("thd,tkd->thk", q, keys[jnp.maximum(ids, 0)], precision=jax.lax.Precision.HIGHEST)
    scores = jnp.einsum("thk,th->tk", jnp.maximum(dots, 0), weights, precision=jax.lax.Precision.HIGHEST)
    log_index = jax.nn.log_softmax(jnp.where(ids >= 0, scores, -jnp.inf), axis=-1)
    ratio = jnp.where(target > 0, jnp.log(jnp.where(target > 0, target, 1.0)) - log_index, 0.0)
    return jnp.sum(jnp.where(ids >= 0, target * ratio, 0.0), axis=-1).mean()


@functools.partial(jax.jit, static_argnames=("k", "steps", "rate"))
def train(
    index: Index, x: jax.Array, layers: list[Layer], *, k: int, steps: int = 60, rate: float = 0.5
) -> tuple[Index, jax.Array]:
    """Plain gradient descent; the trained indexer and the loss of each step [steps]."""

    def step(index: Index, _) -> tuple[Index, jax.Array]:
        loss, gradient = jax.value_and_grad(index_loss)(index, x, layers, k)
        return jax.tree.map(lambda w, g: w - rate * g, index, gradient), loss

    return jax.lax.scan(step, index, length=steps)


def kept(layer: Layer, ids: jax.Array) -> jax.Array:
    """Share of the full attention's weight on the selected keys, the mean over rows and heads."""
    tokens = len(layer.kv)
    every = jnp.where(jnp.arange(tokens)[None] <= jnp.arange(tokens)[:, None], jnp.arange(tokens, dtype=jnp.int32), -1)
    full = gathered_attention(layer, every)[1]  # [T, HEADS, T]
    chosen = jnp.take_along_axis(full, jnp.maximum(ids, 0)[:, None], axis=2)
    return jnp.where(ids[:, None] >= 0, chosen, 0.0).sum(axis=-1).mean()


SELECTIONS = {
    "lightning indexer": lightning,
    "own indexer": own_indexer,
    "own top-k": own_topk,
    "pools of 4": pooled,
}


def main() -> None:
    """Compare selections at several k, share one between layers, and train."""
    x, layers, index = make_model(256)
    print("share of the full attention that is kept, layer 0")
    for name, select in SELECTIONS.items():
        shares = {k: float(kept(layers[0], select(x, index, k))) for k in (8, 32)}
        print(f"  {name:<20}" + "".join(f"k={k} {share:6.1%}   " for k, share in shares.items()))
    trained, losses = train(index, x, layers, k=64)
    print(f"trained for {len(losses)} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    ids = lightning(x, trained, 16)  # once, for all layers that share it
    for number, layer in enumerate(layers):
        out = attend(layer, ids)
        print(f"  layer {number}, k=16, one selection for both: {float(kept(layer, ids)):6.1%} of {out.shape}")


if __name__ == "__main__":
    main()
