"""Checkpoints whose configuration ties the output head to the embeddings, and that store a head all the same."""

from pathlib import Path

import numpy as np

from dsa_jax.safetensors_headers import CheckpointError, TensorHeader, read_headers

HEAD = "lm_head.weight"
_CHUNK_BYTES = 64 * 1024**2


def check_tied_head(folder: Path | str, embeddings: str) -> None:
    """Refuse a stored head that is not, byte for byte, the embeddings it is tied to.

    transformers 5 leaves the two untied then and computes with the stored head, after a warning; older releases drop
    it. Both cannot be right, so the checkpoint's owner has to say which is meant.

    Args:
      folder: Folder of safetensors files.
      embeddings: Name of the embeddings' tensor.

    Raises:
      CheckpointError: The head is another one, or the folder is damaged.
    """
    headers = read_headers(folder)
    head, table = headers.get(HEAD), headers.get(embeddings)
    # Where the embeddings are missing, the loader says so.
    if head is None or table is None or _equal(head, table):
        return
    raise CheckpointError(
        f"checkpoint {folder}: config.json ties the embeddings (tie_word_embeddings), but tensor {HEAD!r} in"
        f" {head.file.name}, {head.dtype} {head.shape}, differs from {embeddings!r} in {table.file.name},"
        f" {table.dtype} {table.shape}; set tie_word_embeddings to false to use it, or remove the tensor"
    )


def _equal(a: TensorHeader, b: TensorHeader) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        for begin in range(0, a.nbytes, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, a.nbytes - begin)
            if not np.array_equal(np.fromfile(left, np.uint8, size), np.fromfile(right, np.uint8, size)):
                return False
    return True
