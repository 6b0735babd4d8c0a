"""Batches over pages drawn at random, in caches full of foreign bytes."""

import jax
import numpy as np

from dsa_jax.batch import Request
from dsa_jax.cache import CacheGeometry, PagedCache, init_cache
from dsa_jax.model import Model
from dsa_jax.prefill import Batch, PrefillResult, prefill
from dsa_jax.step import StepRunner

ROOM = 128  # tokens that each request has pages for
SPARE = 3  # pages that no request has, page 0 one of them


def bytes_of(array: jax.Array) -> np.ndarray:
    """The bytes of each page [layers, pages, ...] uint8."""
    array = np.asarray(array)
    return array.reshape(*array.shape[:2], -1).view(np.uint8)


def poisoned(cache: PagedCache) -> PagedCache:
    """The cache with nothing but 0xFF bytes: NaN in float32, bfloat16 and e4m3, in values and in scales."""

    def fill(x: jax.Array) -> jax.Array:
        raw = np.full((*x.shape[:-1], x.shape[-1] * x.dtype.itemsize), 0xFF, np.uint8)
        return jax.device_put(raw.view(x.dtype), x.sharding)

    return jax.tree.map(fill, cache)


def foreign_cache(model: Model, geometry: CacheGeometry, pages: int, requests: int = 1) -> PagedCache:
    """A new cache, poisoned, states included."""
    return poisoned(init_cache(model.config, geometry, pages, model.mesh, requests=requests))


def paged_batch(model: Model, prompts: list[list[int]], geometry: CacheGeometry, seed: int, room: int = ROOM) -> Batch:
    """Requests whose pages are drawn at random from all but page 0."""
    each = room // geometry.page_size
    total = 3 * each + SPARE
    pages = 1 + np.random.default_rng(seed).permutation(total - 1)
    requests = [
        Request(np.array(tokens, np.int64), pages[i * each : (i + 1) * each]) for i, tokens in enumerate(prompts)
    ]
    return Batch(requests, geometry, 1, total)


def run(model: Model, batch: Batch, cache: PagedCache, **options) -> PrefillResult:
    """Prefill with logits and selections of all rows."""
    return prefill(StepRunner(model), batch, cache, logits="all", return_selected=True, **options)
