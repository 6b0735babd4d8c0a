"""Index keys pooled over several tokens (GLM-5.3-Flash): complete pools are scored, the open one is always attended.

Pool j of a request is its tokens P*j .. P*j + P - 1. A row sees the pools whose last token it sees, its own among them
when it completes it; the tokens behind them, at most P - 1, are its tail.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dsa_jax.config import ModelConfig
from dsa_jax.layers.context import StepContext
from dsa_jax.layers.indexer import Indexer
from dsa_jax.layers.linear import contract
from dsa_jax.params import declare
from pallas_kernels.ckv_records import RecordFormat


def pool_keys(k: jax.Array, gate: jax.Array, slot_bias: jax.Array) -> jax.Array:
    """Key of each pool: per channel, a softmax over its tokens of gate plus bias weighs their keys.

    Args:
      k: [..., P, D].
      gate: [..., P, D].
      slot_bias: [P, D].

    Returns:
      [..., D] of k's dtype, computed in float32.
    """
    weights = jax.nn.softmax(gate.astype(jnp.float32) + slot_bias.astype(jnp.float32), axis=-2)
    return jnp.sum(weights * k.astype(jnp.float32), axis=-2).astype(k.dtype)


def expand_pools(pools: jax.Array, visible: jax.Array, kpool: int) -> jax.Array:
    """Tokens of the selected pools, in the order of the selection, and right behind them the row's tail.

    Args:
      pools: Selected pools [T, n] int32, valid ones first, then -1.
      visible: Tokens that each row sees [T] int32, itself included.
      kpool: Tokens P of a pool.

    Returns:
      [T, n * P + P - 1] int32, -1 behind the last one.
    """
    slot = jnp.arange(kpool, dtype=jnp.int32)
    tokens = jnp.where(pools[:, :, None] >= 0, pools[:, :, None] * kpool + slot, -1).reshape(pools.shape[0], -1)
    tokens = jnp.pad(tokens, ((0, 0), (0, kpool - 1)), constant_values=-1)
    used = jnp.sum(pools >= 0, axis=1, dtype=jnp.int32) * kpool
    # Where the pools end and not at a fixed column: a reader of the first `count` columns then misses nothing.
    behind = jnp.arange(tokens.shape[1], dtype=jnp.int32) - used[:, None]
    tail = visible // kpool * kpool
    in_tail = (behind >= 0) & (behind < (visible - tail)[:, None])
    return jnp.where(in_tail, tail[:, None] + behind, tokens)


def hadamard(x: jax.Array) -> jax.Array:
    """Rotate the last axis, a power of two wide, by the normed Hadamard matrix of Sylvester's order.

    Products of two rotated vectors stay the same and outliers spread over all channels, before they are quantised.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"a Hadamard rotation needs a width that is a power of two, got {width}")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return contract("...i,io->...o", x.astype(jnp.float32), jnp.asarray(matrix * width**-0.5)).astype(x.dtype)


class PooledIndexer(Indexer):
    """An indexer whose keys are pools."""

    def __init__(self, config: ModelConfig, *, stack=None):
        """Declare the parameters."""
        super().__init__(config, stack=stack)
        width = config.indexer.head_dim
        self.index_kpool_compress_ape = declare(config.index_kpool, width, stack=stack)
        self.index_kpool_compress_gate = declare(width, config.hidden_size, stack=stack)

    def own_keys(
        self, hidden: jax.Array, k: jax.Array, context: StepContext, ring: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Keys of the pools that the step completes, and what stays of the open ones.

        Args:
          hidden: Normed hidden states [T, hidden].
          k: Keys of the step's tokens [T, D].
          context: What the layers of the step share.
          ring: Key and gate of the tokens of each request's open pool before the step [R, 2, P - 1, D].

        Returns:
          Pooled keys [N, D], and the new ring.
        """
        rows = context.pools
        assert rows is not None and ring is not None
        gate = contract("ti,oi->to", hidden, self.index_kpool_compress_gate[...])
        kept = jnp.moveaxis(ring, 2, 1).reshape(-1, 2, k.shape[1]).astype(k.dtype)  # [R * (P - 1), 2, D]
        tokens = jnp.concatenate([jnp.stack([k, gate], axis=1), kept])
        members = tokens[rows.members]  # [N, P, 2, D]
        pooled = pool_keys(members[:, :, 0], members[:, :, 1], self.index_kpool_compress_ape[...])
        return pooled, jnp.moveaxis(tokens[rows.open], 1, 2).astype(ring.dtype)

    def rotated(self, x: jax.Array, fmt: RecordFormat) -> jax.Array:
        """Queries or keys as the format keeps them: rotated where it quantises (vLLM's `glm5next`)."""
        return x if fmt.encoding == "plain" else hadamard(x)

    def expand(self, selected: jax.Array, context: StepContext) -> jax.Array:
        """Positions of the selected tokens, the tail among them [T, index_topk + P - 1]."""
        return expand_pools(selected, context.visible, self.config.index_kpool)
