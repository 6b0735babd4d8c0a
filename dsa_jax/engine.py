"""Continuous batching: requests share a paged cache, new ones prefill while others decode."""

import collections
import dataclasses
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsa_jax.batch import Request, Step, build_step, check_prompts
from dsa_jax.cache import DEFAULT_PAGE_SIZE, CacheGeometry, init_cache
from dsa_jax.config import ModelConfig
from dsa_jax.model import Model
from dsa_jax.page_allocator import OutOfPagesError, PageAllocator, PrefixMatch
from dsa_jax.prefill import DEFAULT_CHUNK_SIZE
from dsa_jax.sampling import SamplingConfig, request_keys, sample
from dsa_jax.step import Execution, StepRunner
from pallas_kernels.checks import check_positive
from sharding.mesh import DATA

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine keeps and runs its requests.

    Attributes:
      chunk_size: Most rows of a step for each data group, and so the most requests of one that run at once: each that
        decodes gets its row in every step.
      page_size: Tokens of a page that each DCP rank holds.
      kv_format: Format of the compressed KV, see `CacheGeometry.for_model`.
      index_format: Format of the index keys.
      interleave: Tokens in a run of one DCP rank.
      index_replicas: How often a DCP group holds the index keys.
      prefix_reuse: Whether prompts reuse the pages of a common beginning. Without effect on models with linear
        attention: pages do not hold the state that such a beginning leaves behind.
      max_states: Most requests of a data group that run at once, for models that keep a state of each.
      execution: How the steps run.
    """

    chunk_size: int = DEFAULT_CHUNK_SIZE
    page_size: int = DEFAULT_PAGE_SIZE
    kv_format: str = "auto"
    index_format: str = "auto"
    interleave: int = 1
    index_replicas: int = 1
    prefix_reuse: bool = True
    max_states: int = 16
    execution: Execution = dataclasses.field(default_factory=Execution)

    def __post_init__(self):
        """Check the sizes that no other object checks."""
        for name in ("chunk_size", "max_states"):
            check_positive("EngineOptions", name, getattr(self, name))

    def geometry(self, model: Model) -> CacheGeometry:
        """Geometry of the cache for a model."""
        return self.geometry_for(model.config, model.mesh, model.dtype)

    def geometry_for(self, config: ModelConfig, mesh: Mesh, dtype: jax.typing.DTypeLike) -> CacheGeometry:
        """Geometry of the cache for a model that need not be loaded yet."""
        return CacheGeometry.for_model(
            config,
            mesh,
            dtype,
            kv_format=self.kv_format,
            index_format=self.index_format,
            page_size=self.page_size,
            interleave=self.interleave,
            index_replicas=self.index_replicas,
        )


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One new token.

    Attributes:
      request: Number of the request, counted from 0 in the order they were added.
      token: The token's id; -1 where there is none to draw, since the logits are NaN or infinite.
      finished: "eos", "length" or "nonfinite" with the last token of a request, else None.
    """

    request: int
    token: int
    finished: str | None


@dataclasses.dataclass
class _Sequence(Request):
    """A request with what ends it and how its tokens are drawn."""

    number: int = 0
    max_new_tokens: int = 1
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    ignore_eos: bool = False
    drawn: int = 0


@jax.jit
def _draw(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.typing.ArrayLike,
    top_k: jax.typing.ArrayLike,
    top_p: jax.typing.ArrayLike,
) -> jax.Array:
    """As `sample`, but -1 for a row whose logits are not all finite: the best of NaN is no token."""
    return jnp.where(jnp.isfinite(logits).all(axis=-1), sample(logits, keys, temperature, top_k, top_p), -1)


class Engine:
    """Serves requests from one paged cache.

    A request is admitted, in the order of arrival, when a data group has the pages for its prompt and all its new
    tokens; so no request runs out of pages once it started. Of several groups that have them it goes to the one that
    holds most of its beginning, then to the one with most free pages. Its pages are free again when it ends. Not
    thread-safe.
    """

    def __init__(self, model: Model, pages: int, options: EngineOptions | None = None):
        """Make the cache.

        Args:
          model: The model.
          pages: Pages of each data group, of `page_size * dcp` tokens.
          options: How to keep and run requests.

        Raises:
          ValueError: A size or a format does not fit the model or the mesh.
        """
        self.options = EngineOptions() if options is None else options
        self.model = model
        self.geometry = self.options.geometry(model)
        # Every request has a page at least, so more slots than pages would never be used.
        slots = min(self.options.max_states, pages)
        self.cache = init_cache(model.config, self.geometry, pages, model.mesh, requests=slots)
        slots = pages if self.cache.slots is None else slots
        self.free_slots = [list(range(slots)) for _ in range(model.mesh.shape[DATA])]
        self.prefix_reuse = self.options.prefix_reuse and model.config.kda is None
        if self.options.prefix_reuse and not self.prefix_reuse:
            _log.info(
                "prompts do not reuse the pages of a common beginning: the model has linear attention,"
                " and pages do not hold the state that the beginning leaves behind"
            )
        self.runner = StepRunner(model, self.options.execution)
        self.allocators = [PageAllocator(pages, self.geometry.tokens_per_page) for _ in range(model.mesh.shape[DATA])]
        self.waiting: collections.deque[_Sequence] = collections.deque()
        self.running: list[_Sequence] = []
        self.added = 0
        self._replicated = NamedSharding(model.mesh, PartitionSpec())

    def pages_needed(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Pages that a request takes: those of every token whose record it writes."""
        # The last new token is returned and never run.
        tokens = min(prompt_tokens + max_new_tokens - 1, self.model.config.max_position_embeddings)
        return self.allocators[0].pages_for(tokens)

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        ignore_eos: bool = False,
    ) -> int:
        """Queue a request.

        Args:
          prompt: Its token ids.
          max_new_tokens: Most new tokens.
          sampling: How tokens are drawn; None is greedy.
          ignore_eos: Whether to go on past end-of-sequence tokens.

        Returns:
          Its number, which its events carry.

        Raises:
          ValueError: The prompt or `max_new_tokens` is out of range.
          OutOfPagesError: It needs more pages than a data group has; nothing has changed.
        """
        max_new_tokens = check_positive("add", "max_new_tokens", max_new_tokens)
        if sampling is not None and not isinstance(sampling, SamplingConfig):
            raise ValueError(f"add: sampling must be a SamplingConfig or None, got {sampling!r}")
        config = self.model.config
        (tokens,) = check_prompts([prompt], config.vocab_size, config.max_position_embeddings)
        needed, total = self.pages_needed(len(tokens), max_new_tokens), self.allocators[0].num_pages
        if needed > total:
            raise OutOfPagesError(needed, total, total)
        self.waiting.append(
            _Sequence(
                tokens,
                np.zeros(0, np.int64),
                number=self.added,
                max_new_tokens=max_new_tokens,
                sampling=sampling or SamplingConfig(),
                ignore_eos=ignore_eos,
            )
        )
        self.added += 1
        return self.added - 1

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self.running

    def step(self) -> list[TokenEvent]:
        """Admit what fits and run one step; returns the tokens that it completed, in the order of arrival."""
        self._admit()
        step = build_step(self.running, self.geometry, groups=len(self.allocators), chunk_size=self.options.chunk_size)
        if step is None:
            return []
        outputs = self.runner(step, self.cache)
        self.cache = outputs.cache
        after = {piece.request: self.running[piece.request].pending - piece.count for piece in step.pieces}
        # Drawn before any request counts the step: if that fails, the step can be run again.
        tokens = self._sample(outputs.logits, step) if 0 in after.values() else np.zeros(0, np.int64)
        ready = []
        for piece in step.pieces:
            sequence = self.running[piece.request]
            sequence.cached += piece.count
            if sequence.pending == 0:
                ready.append((sequence, int(tokens[piece.logits_row])))
        events = [self._take(sequence, token) for sequence, token in sorted(ready, key=lambda r: r[0].number)]
        self.running = [sequence for sequence in self.running if sequence.pending]
        return events

    def _admit(self) -> None:
        """Start those who wait, in the order of arrival, as far as there is room."""
        while self.waiting and self._place(self.waiting[0]):
            self.running.append(self.waiting.popleft())

    def _place(self, sequence: _Sequence) -> bool:
        """Give a request a group, a slot and pages; False, and nothing has changed, where no group has room."""
        count = self.pages_needed(len(sequence.tokens), sequence.max_new_tokens)
        running = collections.Counter(other.group for other in self.running)
        groups = [g for g, slots in enumerate(self.free_slots) if slots and running[g] < self.options.chunk_size]
        free = [allocator.num_free for allocator in self.allocators]
        match = {g: self._beginning(g, sequence) for g in groups}
        placed = False
        for group in sorted(groups, key=lambda g: (-match[g].num_tokens, -free[g])):
            allocator, found = self.allocators[group], match[group]
            if placed or count - len(found.pages) > allocator.num_free:
                allocator.free(found.pages)
                continue
            fresh = allocator.alloc(count - len(found.pages))
            sequence.group, sequence.cached, sequence.slot = group, found.num_tokens, self.free_slots[group].pop()
            sequence.pages = np.array([*found.pages, *fresh], np.int64)
            placed = True
        return placed

    def _beginning(self, group: int, sequence: _Sequence) -> PrefixMatch:
        """Pages of a group that hold the beginning of a request, each with one more reference."""
        if not self.prefix_reuse:
            return PrefixMatch((), 0)
        return self.allocators[group].lookup_prefix(sequence.tokens)

    def _sample(self, logits: jax.Array, step: Step) -> np.ndarray:
        """Token of each row of the logits; -1 where they are NaN or infinite."""
        rows = logits.shape[0]
        seeds, steps, top_k = np.zeros(rows, np.uint32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        temperature, top_p = np.zeros(rows, np.float32), np.ones(rows, np.float32)
        for piece in step.pieces:
            sequence, row = self.running[piece.request], piece.logits_row
            seeds[row], steps[row] = sequence.sampling.seed, sequence.drawn
            temperature[row], top_k[row] = sequence.sampling.temperature, sequence.sampling.top_k
            top_p[row] = sequence.sampling.top_p
        logits = jax.device_put(logits, self._replicated)[:, : self.model.config.vocab_size]
        keys = request_keys(jnp.asarray(seeds), jnp.asarray(steps))
        return np.asarray(_draw(logits, keys, temperature, top_k, top_p))

    def _take(self, sequence: _Sequence, token: int) -> TokenEvent:
        """Give a request its next token, or -1 for none, and its pages back if that ends it."""
        sequence.drawn += 1
        allocator = self.allocators[sequence.group]
        # Hashing the whole request for every token would be quadratic: only once its prompt or another page is full.
        filled = sequence.drawn == 1 or len(sequence.tokens) % allocator.tokens_per_page == 0
        if self.prefix_reuse and filled and token >= 0:
            allocator.publish_prefix(sequence.tokens, sequence.pages.tolist())
        finished = None
        if token < 0:
            finished = "nonfinite"
        elif token in self.model.config.eos_token_ids and not sequence.ignore_eos:
            finished = "eos"
        elif (
            sequence.drawn == sequence.max_new_tokens
            or len(sequence.tokens) >= self.model.config.max_position_embeddings
        ):
            finished = "length"
        if finished is None:
            sequence.append(token)
        else:
            allocator.free(sequence.pages.tolist())
            self.free_slots[sequence.group].append(sequence.slot)
        return TokenEvent(sequence.number, token, finished)
