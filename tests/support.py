"""What several test modules share: the oracle's checkpoints, their answers, and comparisons."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dsa_jax.api import from_pretrained
from dsa_jax.cache import CacheGeometry
from dsa_jax.engine import EngineOptions
from dsa_jax.model import Model
from dsa_jax.prefill import Batch, PrefillResult, prefill
from dsa_jax.step import Execution, StepRunner
from dsa_jax.testing import assert_same_selections
from sharding.mesh import make_mesh

FIXTURES = Path(__file__).parent / "fixtures"
ORACLE = FIXTURES / "oracle"
PAGE_SIZE = 16
SMALL_PAGES = EngineOptions(page_size=PAGE_SIZE)


@functools.lru_cache(maxsize=32)
def load_model(variant: str, layout: str = "single", tp: int = 1, dcp: int = 1, data: int = 1) -> Model:
    """A checkpoint of the oracle in float32."""
    return from_pretrained(ORACLE / variant / layout, make_mesh(tp=tp, dcp=dcp, data=data), jnp.float32)


def geometry(model: Model, **options) -> CacheGeometry:
    """Small pages, unless `options` say otherwise."""
    return CacheGeometry.for_model(model.config, model.mesh, model.dtype, **{"page_size": PAGE_SIZE, **options})


@functools.lru_cache(maxsize=16)
def answers(variant: str) -> dict[str, np.ndarray]:
    """The oracle's answers of one variant."""
    with np.load(ORACLE / variant / "oracle.npz") as file:
        return dict(file)


def prompt_names(variant: str) -> list[str]:
    """Names of the single prompts, shortest first."""
    names = [key.removesuffix("_input_ids") for key in answers(variant) if key.endswith("_input_ids")]
    return sorted((name for name in names if name[0] == "s"), key=lambda name: int(name[1:]))


def prompt(variant: str, name: str) -> list[int]:
    """Token ids of a single prompt."""
    return answers(variant)[f"{name}_input_ids"][0].tolist()


def run_prefill(
    model: Model,
    prompts: list[list[int]],
    *,
    chunk_size: int = 2048,
    logits: str = "all",
    selected: bool = True,
    execution: Execution | None = None,
    **cache_options,
) -> PrefillResult:
    """Prefill `prompts` from an empty cache."""
    batch = Batch.from_prompts(prompts, model, geometry=geometry(model, **cache_options))
    runner = StepRunner(model, execution)
    cache = batch.init_cache(model)
    return prefill(runner, batch, cache, chunk_size=chunk_size, logits=logits, return_selected=selected)


def selecting_layers(variant: str, name: str) -> list[int]:
    """Numbers of the layers with sparse attention."""
    prefix = f"{name}_sel_L"
    return sorted(int(key.removeprefix(prefix)) for key in answers(variant) if key.startswith(prefix))


def selected_count(width: int, visible: int, variant: str) -> int:
    """How many of `width` columns a row that sees `visible` tokens has; GLM-5.3-Flash takes pools of 4 and a tail."""
    if "flash" not in variant:
        return min(width, visible)
    return min(width - 3, visible // 4 * 4) + visible % 4


def assert_selected(got: np.ndarray, variant: str, name: str, row: int = 0, first: int = 0) -> None:
    """Every layer's selection equals the oracle's exactly.

    Args:
      got: [layers, T, k], positions in the prompt.
      variant: Variant of the oracle.
      name: Name of the prompt or of the padded batch.
      row: Row of the batch.
      first: Where the prompt starts in the padded row.
    """
    layers = selecting_layers(variant, name)
    assert len(layers) == got.shape[0]
    for number, layer in enumerate(layers):
        want = answers(variant)[f"{name}_sel_L{layer}"][row].astype(np.int64)
        want = np.where(want >= 0, want - first, -1)[first : first + got.shape[1]]
        # A position behind the row's own is no selection.
        want = np.where(want <= np.arange(len(want))[:, None], want, -1)
        assert_same_selections(got[number], want, f"{variant} {name} layer {layer}")
        for t, line in enumerate(got[number]):
            assert (line >= 0).sum() == selected_count(got.shape[2], t + 1, variant)
