"""DeepSeek Sparse Attention prefill in JAX.

The model: `from_pretrained`, `Batch`, `generate`, `stream`. The operations for research models: `lightning_indexer`,
`topk`, `index_topk`, `sparse_mla`, `merge_partials`, pure functions on arrays.
"""

from dsa_jax.api import convert, from_pretrained
from dsa_jax.cache import CacheGeometry, PagedCache
from dsa_jax.config import ConfigError, ModelConfig
from dsa_jax.engine import Engine, EngineOptions, TokenEvent
from dsa_jax.generate import GenerateOptions, Generation, NonFiniteError, generate, stream
from dsa_jax.model import Model
from dsa_jax.page_allocator import OutOfPagesError
from dsa_jax.prefill import Batch, NonFiniteWarning, PrefillResult, prefill
from dsa_jax.safetensors_headers import CheckpointError
from dsa_jax.sampling import SamplingConfig
from dsa_jax.step import Execution, StepRunner
from pallas_kernels.index_topk import index_topk
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.sparse_mla import merge_partials, sparse_mla
from pallas_kernels.topk import topk
from sharding.mesh import make_mesh
from sharding.policy import PrefillPolicy

__all__ = [
    "Batch",
    "CacheGeometry",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineOptions",
    "Execution",
    "GenerateOptions",
    "Generation",
    "Model",
    "ModelConfig",
    "NonFiniteError",
    "NonFiniteWarning",
    "OutOfPagesError",
    "PagedCache",
    "PrefillPolicy",
    "PrefillResult",
    "SamplingConfig",
    "StepRunner",
    "TokenEvent",
    "convert",
    "from_pretrained",
    "generate",
    "index_topk",
    "lightning_indexer",
    "make_mesh",
    "merge_partials",
    "prefill",
    "sparse_mla",
    "stream",
    "topk",
]
