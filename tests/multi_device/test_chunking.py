"""How far the cut into chunks moves the answers when the cache is quantised, and why.

On the stock path a step of many rows projects values before the ranks' outputs are merged, a step of few rows behind
it: the order that moves fewer bytes. Both are right to rounding, but the last bit of a hidden state decides how a
record is rounded to e4m3, and from there the difference grows to the size of that rounding in some rows. Measured on
the checkpoint with released widths, 224 rows, logits up to 8.9, chunks of 40 rows against one step; 0.1 to 0.2% of the
cache's bytes differed, and a selection moved in one layer:

| ranks (qsplit, dcp) | median row | all rows | worst logit |
|---|---|---|---|
| (1, 4) | 0.0002 | 0.0007 | 0.05 |
| (2, 2) | 0.0001 | 0.005 | 0.45 |

The format itself costs 0.04 in the median row and 0.13 over all (`tests/model/test_paged_formats.py`). The test runs
fewer rows on (1, 2), where no selection moved.
"""

import numpy as np
import pytest
from jax.sharding import AxisType

from dsa_jax.prefill import Batch, PrefillResult, prefill
from dsa_jax.step import Execution, StepRunner
from dsa_jax.testing import selected_sets, users_mesh
from sharding import policy
from sharding.policy import PrefillPolicy
from tests.multi_device.scenario import placed_model
from tests.support import geometry, prompt

VARIANT, NAME, LENGTH = "glm5_wide", "s300", 160
ONE_STEP, CHUNKS = 256, 56
FORMATS = {"kv_format": "fp8_ds_mla", "index_format": "fp8"}


@pytest.fixture(autouse=True)
def one_shape(monkeypatch):
    """Every step has the shapes of the longest: only the order of projection and merge tells programs apart."""
    for name, size in {"ROWS": 256, "KEYS": 256, "PAGES": 16}.items():
        monkeypatch.setattr(f"dsa_jax.batch.MIN_{name}", size)


def run(chunk_size: int) -> tuple[PrefillResult, bool]:
    """Logits and selections of all rows on the stock path, and whether its last step projected first."""
    model = placed_model(VARIANT, users_mesh(1, 1, 2, AxisType.Auto))
    batch = Batch.from_prompts([prompt(VARIANT, NAME)[:LENGTH]], model, geometry=geometry(model, **FORMATS))
    batch.pages = 16
    runner = StepRunner(model, Execution(PrefillPolicy.stock()))
    result = prefill(runner, batch, batch.init_cache(model), chunk_size=chunk_size, logits="all", return_selected=True)
    assert runner.decision is not None
    return result, runner.decision.project_first


def test_fp8_records_depend_on_the_chunks_of_the_stock_path_within_a_bound(monkeypatch):
    """A fiftieth of what the format costs in the median row, a tenth over all; nothing once the order is held."""
    whole, first = run(ONE_STEP)
    chunked, last = run(CHUNKS)
    assert first and not last, "the steps take different orders"
    want, wrong = whole.logits[0], chunked.logits[0] - whole.logits[0]
    rows = np.linalg.norm(wrong, axis=1) / np.linalg.norm(want, axis=1)
    assert 0 < np.median(rows) < 8e-4, "the format's own error is 0.04"
    assert np.linalg.norm(wrong) / np.linalg.norm(want) < 0.013
    pairs = zip(whole.selected[0], chunked.selected[0], strict=True)
    selected = [(selected_sets(a), selected_sets(b)) for a, b in pairs]
    others = np.array([[x != y for x, y in zip(a, b, strict=True)] for a, b in selected])
    assert not others[0].any() and others.mean() < 0.2

    monkeypatch.setattr(policy, "projection_pays", lambda *_, **__: False)
    same, late = run(ONE_STEP)
    assert not late
    np.testing.assert_array_equal(same.logits[0], chunked.logits[0])
    np.testing.assert_array_equal(same.selected[0], chunked.selected[0])
