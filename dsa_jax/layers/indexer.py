"""The lightning indexer's projections (DeepSeek-V3.2)."""

import jax
import jax.numpy as jnp
from flax import nnx

from dsa_jax.config import ModelConfig
from dsa_jax.layers.context import StepContext
from dsa_jax.layers.linear import LayerNorm, Linear
from dsa_jax.layers.rope import rotate
from pallas_kernels.ckv_records import RecordFormat

K_NORM_EPS = 1e-6  # a LayerNorm with bias in every published implementation, unlike the model's RMS norms


class Indexer(nnx.Module):
    """Index queries, keys and head weights of one full layer; replicated over TP."""

    def __init__(self, config: ModelConfig, *, stack=None):
        """Declare the parameters."""
        index = config.indexer
        self.wq_b = Linear(index.num_heads * index.head_dim, config.q_lora_rank, stack=stack)
        self.wk = Linear(index.head_dim, config.hidden_size, stack=stack)
        self.k_norm = LayerNorm(index.head_dim, K_NORM_EPS, stack=stack)
        self.weights_proj = Linear(index.num_heads, config.hidden_size, stack=stack)
        self.config = config

    def _rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Rotate the first dimensions of x [..., D]; the main attention rotates the last ones."""
        rope = self.config.qk_rope_head_dim
        rotated = rotate(x[..., :rope], cos, sin, interleave=self.config.indexer.rope_interleave)
        return jnp.concatenate([rotated, x[..., rope:]], axis=-1)

    def __call__(
        self, hidden: jax.Array, q_latent: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Project one chunk.

        Args:
          hidden: Normed hidden states [T, hidden].
          q_latent: Normed query latent [T, q_lora_rank].
          cos: [T, rope / 2] float32.
          sin: [T, rope / 2] float32.

        Returns:
          Index queries [T, Hi, D], index keys [T, D], and head weights [T, Hi] float32 that carry `Hi**-0.5 * D**-0.5`.
        """
        index = self.config.indexer
        q = self.wq_b(q_latent).reshape(-1, index.num_heads, index.head_dim)
        k = self.k_norm(self.wk(hidden))
        # bf16 or TF32 here flips near ties of the selection: both operands in float32, full precision.
        weights = jnp.einsum(
            "ti,hi->th",
            hidden.astype(jnp.float32),
            self.weights_proj.values(jnp.dtype(jnp.float32)).astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        weights = weights * (index.num_heads**-0.5 * index.head_dim**-0.5)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin), weights

    def own_keys(
        self, hidden: jax.Array, k: jax.Array, context: StepContext, ring: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The step's own index keys, and what the cache keeps of tokens that have none yet: here, nothing."""
        return k, None

    def rotated(self, x: jax.Array, fmt: RecordFormat) -> jax.Array:
        """Queries or keys in the basis that they are stored and compared in."""
        return x

    def expand(self, selected: jax.Array, context: StepContext) -> jax.Array:
        """Positions of the tokens of the selected index keys."""
        return selected
