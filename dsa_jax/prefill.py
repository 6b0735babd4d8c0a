"""Prefill of ragged prompts in chunks."""

import dataclasses
import warnings
from collections.abc import Sequence

import jax
import numpy as np

from dsa_jax.batch import Request, build_step, check_prompts, check_requests
from dsa_jax.cache import CacheGeometry, PagedCache, init_cache
from dsa_jax.model import Model
from dsa_jax.multihost import to_host
from dsa_jax.step import StepRunner
from sharding.mesh import DATA

DEFAULT_CHUNK_SIZE = 2048


class NonFiniteWarning(RuntimeWarning):
    """Logits that are NaN or infinite."""


@dataclasses.dataclass
class Batch:
    """Requests that share a cache made for them.

    Attributes:
      requests: The requests, in the order of their prompts.
      geometry: Of the cache.
      groups: Number of data groups.
      pages: Pages that the cache of one data group needs.
      slots: Requests of one data group that the cache keeps a state of, where the model has one.
    """

    requests: list[Request]
    geometry: CacheGeometry
    groups: int
    pages: int
    slots: int = 1

    @classmethod
    def from_prompts(
        cls,
        prompts: Sequence[Sequence[int]],
        model: Model,
        *,
        max_new_tokens: int = 0,
        geometry: CacheGeometry | None = None,
    ) -> "Batch":
        """Requests for `prompts`, spread over the data groups by length.

        Args:
          prompts: Token ids of each prompt.
          model: The model that will run them.
          max_new_tokens: Room to leave for each request's new tokens.
          geometry: Of the cache; None takes the model's dtype and the default page size.

        Raises:
          ValueError: A prompt is empty, too long, or holds an id outside the vocabulary.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens=}")
        config, groups = model.config, model.mesh.shape[DATA]
        geometry = geometry or CacheGeometry.for_model(config, model.mesh, model.dtype)
        arrays = check_prompts(prompts, config.vocab_size, config.max_position_embeddings)
        used, slots = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
        requests: dict[int, Request] = {}
        for i in sorted(range(len(arrays)), key=lambda i: -len(arrays[i])):
            length = min(len(arrays[i]) + max_new_tokens, config.max_position_embeddings)
            count = -(-length // geometry.tokens_per_page)
            group = int(np.argmin(used))
            pages = used[group] + np.arange(count, dtype=np.int64)
            requests[i] = Request(arrays[i], pages, group, slot=int(slots[group]))
            used[group] += count
            slots[group] += 1
        ordered = [requests[i] for i in range(len(arrays))]
        return cls(ordered, geometry, groups, max(1, int(used.max())), int(slots.max()))

    def init_cache(self, model: Model) -> PagedCache:
        """An empty cache with room for the batch."""
        return init_cache(model.config, self.geometry, self.pages, model.mesh, requests=self.slots)


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """What prefill returns.

    Attributes:
      cache: The cache, holding every token of the batch.
      logits: Of each request float32 [new tokens, vocabulary], [1, vocabulary], or [0, vocabulary] as asked for.
      selected: Of each request int32 [sparse layers, new tokens, selected_width], positions in the request, -1 for
        none; None unless asked for.
    """

    cache: PagedCache
    logits: list[np.ndarray]
    selected: list[np.ndarray] | None


def nonfinite(logits: Sequence[np.ndarray]) -> list[int]:
    """Numbers of the requests whose logits are not all finite."""
    return [i for i, rows in enumerate(logits) if not np.isfinite(rows).all()]


def prefill(
    runner: StepRunner,
    batch: Batch,
    cache: PagedCache,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    logits: str = "last",
    return_selected: bool = False,
) -> PrefillResult:
    """Process every pending token of the batch.

    Logits that are NaN or infinite are returned as they are, with a `NonFiniteWarning` that names the requests.

    Args:
      runner: Runs the steps of the model.
      batch: The requests; marked as cached as the steps go.
      cache: The cache that holds what the requests have cached; donated.
      chunk_size: Most rows of a step for each data group. Longer prompts take several steps.
      logits: Rows whose logits to return: "all", "last" or "none".
      return_selected: Whether to return the selected positions of every layer.

    Returns:
      The cache, logits and selections.

    Raises:
      ValueError: An option is out of range, the cache is too small for the batch, or a request has too few pages for
        its pending tokens; nothing has been written, and the cache is still the caller's.
    """
    groups = runner.model.mesh.shape[DATA]
    if batch.groups != groups:
        raise ValueError(f"batch.groups={batch.groups} must equal the mesh's data size {groups}")
    if cache.pages < batch.pages * groups or cache.geometry != batch.geometry:
        raise ValueError(
            f"the cache has {cache.pages // groups} pages a data group and geometry {cache.geometry},"
            f" the batch needs {batch.pages} of {batch.geometry}"
        )
    if cache.slots is not None and cache.slots < batch.slots * groups:
        raise ValueError(
            f"the cache keeps the state of {cache.slots // groups} requests a data group, the batch has {batch.slots}"
        )
    # Here and not step by step: a request that runs out half-way would take the donated cache with it.
    check_requests(batch.requests, batch.geometry, groups=groups, pages=cache.pages // groups)
    config = runner.model.config
    vocab = config.vocab_size
    # Again, because tokens were appended since.
    check_prompts([request.tokens for request in batch.requests], vocab, config.max_position_embeddings)
    pieces_logits: list[list[np.ndarray]] = [[] for _ in batch.requests]
    pieces_selected: list[list[np.ndarray]] = [[] for _ in batch.requests]
    while True:
        step = build_step(batch.requests, batch.geometry, groups=groups, chunk_size=chunk_size, logits=logits)
        if step is None:
            break
        outputs = runner(step, cache, return_selected=return_selected)
        cache = outputs.cache
        values = None if logits == "none" else to_host(outputs.logits)
        selected = None if outputs.selected is None else to_host(outputs.selected)
        for piece in step.pieces:
            request = batch.requests[piece.request]
            request.cached += piece.count
            rows = slice(piece.first_row, piece.first_row + piece.count)
            if selected is not None:
                pieces_selected[piece.request].append(selected[:, rows])
            if values is not None and (logits == "all" or request.pending == 0):
                wanted = rows if logits == "all" else slice(piece.logits_row, piece.logits_row + 1)
                pieces_logits[piece.request].append(values[wanted, :vocab])
    results = [np.concatenate(p) if p else np.zeros((0, vocab), np.float32) for p in pieces_logits]
    if bad := nonfinite(results):
        warnings.warn(
            f"the logits of prompts {bad} are NaN or infinite; `dsa-jax inspect` names the weights that are",
            NonFiniteWarning,
            stacklevel=2,
        )
    return PrefillResult(
        cache=jax.block_until_ready(cache),
        logits=results,
        selected=[np.concatenate(p, axis=1) for p in pieces_selected] if return_selected else None,
    )
