"""Generation from a list of prompts."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dsa_jax.batch import check_prompts
from dsa_jax.cache import CacheGeometry
from dsa_jax.config import ModelConfig
from dsa_jax.engine import Engine, EngineOptions, TokenEvent
from dsa_jax.model import Model
from dsa_jax.page_allocator import OutOfPagesError
from dsa_jax.sampling import SamplingConfig
from pallas_kernels.checks import check_positive


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """How to generate.

    Attributes:
      max_new_tokens: Most new tokens for each prompt.
      sampling: How tokens are drawn; greedy by default. Prompt i draws with the seed plus i.
      ignore_eos: Whether to go on past end-of-sequence tokens.
      max_pages: Pages of the cache of each data group, or None for as many as all prompts need together. With fewer,
        prompts wait until others have ended.
      engine: How requests are kept and run.
    """

    max_new_tokens: int = 128
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    ignore_eos: bool = False
    max_pages: int | None = None
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)

    def __post_init__(self):
        """Check the sizes."""
        for name in ("max_new_tokens", "max_pages"):
            if getattr(self, name) is not None:
                check_positive("GenerateOptions", name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Generation:
    """Everything that was generated.

    Attributes:
      tokens: New tokens of each prompt, an end-of-sequence token included when it was generated.
      finished: "eos" or "length" for each prompt.
      ttft_s: Seconds from the start to the first new token, compilation not counted.
      tokens_per_s: New tokens of all prompts over the seconds from start to end, compilation not counted.
      compile_s: Seconds spent compiling steps; 0 when every shape was met before.
    """

    tokens: list[list[int]]
    finished: list[str]
    ttft_s: float
    tokens_per_s: float
    compile_s: float


class NonFiniteError(FloatingPointError):
    """Logits that are NaN or infinite, from which no token can be drawn."""


def check_request(
    config: ModelConfig, geometry: CacheGeometry, prompts: Sequence[Sequence[int]], options: GenerateOptions
) -> tuple[list[np.ndarray], int]:
    """Everything that can be wrong with prompts; needs no weights.

    Args:
      config: The model's sizes.
      geometry: Of the cache.
      prompts: Token ids of each prompt.
      options: How to generate.

    Returns:
      The prompts as arrays, and the pages of each data group's cache.

    Raises:
      ValueError: A prompt is out of range.
      OutOfPagesError: A prompt needs more than `max_pages` pages.
    """
    arrays = check_prompts(prompts, config.vocab_size, config.max_position_embeddings)
    lengths = [min(len(a) + options.max_new_tokens - 1, config.max_position_embeddings) for a in arrays]
    needed = [-(-length // geometry.tokens_per_page) for length in lengths]
    pages = sum(needed) if options.max_pages is None else options.max_pages
    for i, count in enumerate(needed):
        if count > pages:
            raise OutOfPagesError(count, pages, pages, f"prompt {i}: ")
    return arrays, pages


def make_engine(model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions) -> Engine:
    """An engine with the prompts queued.

    Raises:
      ValueError: A prompt or an option is out of range.
      OutOfPagesError: A prompt needs more than `max_pages` pages.
    """
    arrays, pages = check_request(model.config, options.engine.geometry(model), prompts, options)
    engine = Engine(model, pages, options.engine)
    for i, array in enumerate(arrays):
        # Equal prompts of one call must not draw equal tokens.
        sampling = dataclasses.replace(options.sampling, seed=(options.sampling.seed + i) % 2**32)
        engine.add(
            array,  # type: ignore[arg-type]
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            ignore_eos=options.ignore_eos,
        )
    return engine


def run(engine: Engine) -> Iterator[TokenEvent]:
    """Every token of an engine's requests, as they come.

    Raises:
      NonFiniteError: The logits of a request are NaN or infinite; the engine can still run the others.
    """
    drawn: collections.Counter[int] = collections.Counter()
    while not engine.idle:
        for event in engine.step():
            if event.finished == "nonfinite":
                raise NonFiniteError(
                    f"prompt {event.request}: the logits for new token {drawn[event.request]} are NaN or infinite;"
                    " `dsa-jax inspect` names the weights that are"
                )
            drawn[event.request] += 1
            yield event


def stream(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerateOptions | None = None, **overrides
) -> Iterator[TokenEvent]:
    """Generate token by token.

    Args:
      model: The model.
      prompts: Token ids of each prompt.
      options: How to generate; None takes the defaults.
      **overrides: Fields of `GenerateOptions` to replace.

    Returns:
      An iterator over the new tokens, those of one step in the order of the prompts.

    Raises:
      ValueError: A prompt or an option is out of range.
      OutOfPagesError: A prompt needs more than `max_pages` pages.
      NonFiniteError: The logits of a prompt are NaN or infinite.
    """
    options = dataclasses.replace(GenerateOptions() if options is None else options, **overrides)
    return run(make_engine(model, prompts, options))


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
      OutOfPagesError: A prompt needs more than `max_pages` pages.
      NonFiniteError: The logits of a prompt are NaN or infinite.
    """
    options = dataclasses.replace(GenerateOptions() if options is None else options, **overrides)
    engine = make_engine(model, prompts, options)
    tokens: list[list[int]] = [[] for _ in prompts]
    finished = [""] * len(tokens)
    started, first = time.perf_counter(), None
    for event in run(engine):
        if first is None:
            first = time.perf_counter() - started - engine.runner.compile_seconds
        tokens[event.request].append(event.token)
        finished[event.request] = event.finished or ""
    elapsed = max(time.perf_counter() - started - engine.runner.compile_seconds, 1e-9)
    count = sum(map(len, tokens))
    return Generation(tokens, finished, first or 0.0, count / elapsed, engine.runner.compile_seconds)
