"""Row tiling: the same result as without, and no copy of the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiling import map_row_tiles, rows_per_tile


@pytest.mark.parametrize(
    ("rows", "bytes_per_row", "workspace", "tile"),
    [(10, 4, 100, 10), (10, 4, 12, 3), (10, 4, 15, 3), (10, 4, 3, 1), (10, 0, 5, 5), (0, 4, 100, 1)],
)
def test_rows_per_tile(rows, bytes_per_row, workspace, tile):
    assert rows_per_tile(rows, bytes_per_row, workspace) == tile


@pytest.mark.parametrize("total", [1, 2, 12, 13, 30])
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 7, 11, 12, 13, 40])
def test_tiles_cover_every_row_once(total, tile):
    rows = {"a": np.arange(total, dtype=np.int32), "b": np.arange(3 * total, dtype=np.float32).reshape(total, 3)}
    sizes = []

    def fn(x):
        sizes.append(x["a"].shape[0])
        return x["a"] * 10, {"sum": x["a"][:, None].astype(np.float32) + x["b"]}

    ids, rest = map_row_tiles(fn, rows, tile)
    np.testing.assert_array_equal(ids, rows["a"] * 10)
    np.testing.assert_array_equal(rest["sum"], rows["a"][:, None] + rows["b"])
    assert len(sizes) == 1, "one program for all tiles"
    assert sizes[0] <= max(tile, 1)


def test_no_rows():
    assert map_row_tiles(lambda x: x + 1, jnp.zeros((0, 3)), 4).shape == (0, 3)


def test_neither_rows_nor_results_are_copied_where_the_tile_can_divide():
    rows, width, tile = 4096, 256, 100

    def total(x):
        return map_row_tiles(lambda t: jnp.sin(t) + 1, x, tile)

    compiled = jax.jit(total).lower(jax.ShapeDtypeStruct((rows, width), np.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * tile * width * 4
