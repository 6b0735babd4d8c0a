"""Choosing the next token from logits: greedy, temperature, top-k, top-p."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checks import check_array

OP = "sample"
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the tokens of one request are chosen.

    Attributes:
      temperature: What the logits are divided by, at most float32's largest number; 0 takes the best token.
      top_k: Sample among the best `top_k` tokens only; 0 means all.
      top_p: Sample among the smallest set of best tokens with at least this probability; 1 means all.
      seed: Seed of the request's own random numbers, in [0, 2**32).

    Raises:
      ValueError: A value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature <= _LARGEST:
            raise ValueError(f"temperature must be in [0, {_LARGEST:.7g}], got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        for name, value, limit in (("top_k", self.top_k, 2**31), ("seed", self.seed, 2**32)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
                raise ValueError(f"{name} must be an int in [0, {limit}), got {value!r}")


@jax.jit
def request_keys(seeds: jax.Array, steps: jax.Array) -> jax.Array:
    """Random keys that depend on a request's seed and step, and on nothing else in the batch.

    Args:
      seeds: Seed of each row's request [R] uint32.
      steps: How many tokens the request has generated before [R] int32.

    Returns:
      Typed keys [R].

    Raises:
      ValueError: An argument has the wrong shape or dtype.
    """
    check_array("request_keys", "seeds", seeds, ("R",), (jnp.uint32,))
    check_array("request_keys", "steps", steps, (seeds.shape[0],), (jnp.int32,))
    # The generator is named, so that a program's default does not change what a seed means.
    return jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))(
        seeds, steps
    )


@jax.jit
def sample(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.typing.ArrayLike,
    top_k: jax.typing.ArrayLike = 0,
    top_p: jax.typing.ArrayLike = 1.0,
) -> jax.Array:
    """Next token of each row.

    Top-k is applied first and top-p to what it leaves, renormalised, as in transformers and vLLM. Of equal logits the
    lower id ranks higher. A row's token depends on its own logits, key and parameters only. A batch that is greedy
    draws nothing, and one without top-k and top-p sorts nothing.

    Args:
      logits: [R, V] float32; -inf excludes a token.
      keys: A typed key for each row [R], see `request_keys`.
      temperature: Scalar or [R], >= 0; 0 is greedy.
      top_k: Scalar or [R], >= 0; 0 means V.
      top_p: Scalar or [R], in (0, 1].

    Returns:
      Token ids [R] int32.

    Raises:
      ValueError: An argument has the wrong shape or dtype. Values are not checked; `SamplingConfig` does that.
    """
    check_array(OP, "logits", logits, ("R", "V"), (jnp.float32,))
    rows, vocab = logits.shape
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError(f"{OP}: keys must be typed keys of jax.random.key, got dtype {keys.dtype}")
    check_array(OP, "keys", keys, (rows,))
    temperature = _per_row("temperature", temperature, rows, jnp.float32)
    top_k = _per_row("top_k", top_k, rows, jnp.int32)
    top_p = _per_row("top_p", top_p, rows, jnp.float32)
    top_k = jnp.where(top_k == 0, vocab, top_k)

    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = temperature > 0
    filtered = sampled & ((top_k < vocab) | (top_p < 1))

    def draw() -> jax.Array:
        # Relative to the best logit, so that a tiny temperature cannot overflow.
        best = jnp.max(logits, axis=-1, keepdims=True)
        scaled = (logits - best) / jnp.where(sampled, temperature, 1.0)[:, None]
        keep = lax.cond(
            jnp.any(filtered), lambda: _kept(scaled, top_k, top_p), lambda: jnp.ones(scaled.shape, jnp.bool_)
        )
        # The noise belongs to token ids, whether or not other rows cause a sort.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)
        return jnp.argmax(jnp.where(keep, scaled + noise, -jnp.inf), axis=-1).astype(jnp.int32)

    return jnp.where(sampled, lax.cond(jnp.any(sampled), draw, lambda: greedy), greedy)


def _per_row(name: str, value: jax.typing.ArrayLike, rows: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    value = jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer) and jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{OP}: {name} must be of an integer dtype, got {value.dtype.name}")
    if value.shape not in ((), (rows,)):
        raise ValueError(f"{OP}: {name} must be a scalar or have shape [{rows}], got {list(value.shape)}")
    return jnp.broadcast_to(value.astype(dtype), (rows,))


def _kept(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Tokens that top-k, then top-p, leave of each row [R, V] bool; at least one."""
    rows, vocab = scaled.shape
    ids = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32), scaled.shape)
    descending, order = lax.sort((-scaled, ids), dimension=-1, is_stable=True, num_keys=1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    ranked = jnp.where(rank < top_k[:, None], -descending, -jnp.inf)
    mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1)
    # One more than the prefixes that fall short. Rounding may keep the whole mass below or at 1, so 1 means all.
    nucleus = jnp.where(top_p < 1, 1 + jnp.sum(mass < top_p[:, None], axis=-1, dtype=jnp.int32), vocab)
    keep = rank < jnp.minimum(nucleus, top_k)[:, None]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.zeros(scaled.shape, jnp.bool_).at[row, order].set(keep, unique_indices=True)
