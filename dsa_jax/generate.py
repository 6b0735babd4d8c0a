"""Generation: chunked prefill, then one row a request and step, all through the same jitted step."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsa_jax.batch import Step, build_step
from dsa_jax.cache import DEFAULT_PAGE_SIZE, init_cache
from dsa_jax.layers.decoder import Execution
from dsa_jax.model import Model
from dsa_jax.prefill import DEFAULT_CHUNK_SIZE, Batch
from dsa_jax.sampling import SamplingConfig, request_keys, sample
from dsa_jax.step import StepRunner


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """How to generate.

    Attributes:
      max_new_tokens: Most new tokens for each prompt.
      sampling: How tokens are drawn; greedy by default.
      ignore_eos: Whether to go on past end-of-sequence tokens.
      chunk_size: Most rows of a step for each data group.
      page_size: Tokens a cache page.
      execution: How the operations run.
    """

    max_new_tokens: int = 128
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    ignore_eos: bool = False
    chunk_size: int = DEFAULT_CHUNK_SIZE
    page_size: int = DEFAULT_PAGE_SIZE
    execution: Execution = dataclasses.field(default_factory=Execution)

    def __post_init__(self):
        """Check the sizes."""
        for name in ("max_new_tokens", "chunk_size", "page_size"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {name}={getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class TokenEvent:
    """One new token.

    Attributes:
      request: Index of the prompt.
      token: The token's id.
      finished: "eos" or "length" with the last token of a request, else None.
    """

    request: int
    token: int
    finished: str | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """Everything that was generated.

    Attributes:
      tokens: New tokens of each prompt, an end-of-sequence token included when it was generated.
      finished: "eos" or "length" for each prompt.
      ttft_s: Seconds from the start to the first new token, compilation not counted.
      tokens_per_s: New tokens of all prompts over the seconds from start to end, compilation not counted.
      compile_s: Seconds spent compiling; 0 when every shape was met before.
    """

    tokens: list[list[int]]
    finished: list[str]
    ttft_s: float
    tokens_per_s: float
    compile_s: float


class _Sampler:
    """Draws the tokens of a step's rows, each request from random numbers of its own."""

    def __init__(self, model: Model, sampling: SamplingConfig):
        self.vocab = model.config.vocab_size
        self.sampling = sampling
        self.replicated = NamedSharding(model.mesh, PartitionSpec())

    def __call__(self, logits: jax.Array, step: Step, drawn: Sequence[int]) -> np.ndarray:
        """Token of each logits row; `drawn` counts the tokens each request has drawn so far."""
        seeds = np.zeros(logits.shape[0], np.uint32)
        steps = np.zeros(logits.shape[0], np.int32)
        for piece in step.pieces:
            # Equal prompts of one call must not draw equal tokens.
            seeds[piece.logits_row] = (self.sampling.seed + piece.request) % 2**32
            steps[piece.logits_row] = drawn[piece.request]
        logits = jax.device_put(logits, self.replicated)[:, : self.vocab]
        sampling = self.sampling
        keys = request_keys(jnp.asarray(seeds), jnp.asarray(steps))
        return np.asarray(sample(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p))


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    options: GenerateOptions | None = None,
    *,
    runner: StepRunner | None = None,
) -> Iterator[TokenEvent]:
    """Generate token by token.

    Args:
      model: The model.
      prompts: Token ids of each prompt.
      options: How to generate.
      runner: Runs the steps, to share its count of compile time; None makes one.

    Yields:
      Each new token, those of one step in the order of the prompts.

    Raises:
      ValueError: A prompt or an option is out of range; raised when iteration starts.
    """
    options = GenerateOptions() if options is None else options
    runner = StepRunner(model, options.execution) if runner is None else runner
    config, groups = model.config, model.mesh.shape["data"]
    batch = Batch.from_prompts(
        prompts, config, max_new_tokens=options.max_new_tokens, page_size=options.page_size, groups=groups
    )
    cache = init_cache(config, batch.pages, options.page_size, model.dtype, model.mesh)
    sampler = _Sampler(model, options.sampling)
    drawn = [0] * len(batch.requests)
    while True:
        step = build_step(batch.requests, groups=groups, chunk_size=options.chunk_size, page_size=options.page_size)
        if step is None:
            return
        outputs = runner(step, cache)
        cache = outputs.cache
        for piece in step.pieces:
            batch.requests[piece.request].cached += piece.count
        ready = [piece for piece in step.pieces if batch.requests[piece.request].pending == 0]
        if not ready:
            continue
        tokens = sampler(outputs.logits, step, drawn)
        for piece in sorted(ready, key=lambda piece: piece.request):
            i, token = piece.request, int(tokens[piece.logits_row])
            request = batch.requests[i]
            drawn[i] += 1
            finished = None
            if token in config.eos_token_ids and not options.ignore_eos:
                finished = "eos"
            elif drawn[i] == options.max_new_tokens or len(request.tokens) >= config.max_position_embeddings:
                finished = "length"
            else:
                request.append(token)
            yield TokenEvent(i, token, finished)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions | None = None, **overrides
) -> Generation:
    """Generate from all prompts together.

    Args:
      model: The model.
      prompts: Token ids of each prompt.
      options: How to generate; None takes the defaults.
      **overrides: Fields of `GenerateOptions` to replace, such as `max_new_tokens=16`.

    Returns:
      The new tokens and timings.

    Raises:
      ValueError: A prompt or an option is out of range.
    """
    options = dataclasses.replace(GenerateOptions() if options is None else options, **overrides)
    runner = StepRunner(model, options.execution)
    tokens: list[list[int]] = [[] for _ in prompts]
    finished = [""] * len(tokens)
    started, first = time.perf_counter(), None
    for event in stream(model, prompts, options, runner=runner):
        if first is None:
            first = time.perf_counter() - started - runner.compile_seconds
        tokens[event.request].append(event.token)
        finished[event.request] = event.finished or ""
    elapsed = max(time.perf_counter() - started - runner.compile_seconds, 1e-9)
    count = sum(map(len, tokens))
    return Generation(tokens, finished, first or 0.0, count / elapsed, runner.compile_seconds)
