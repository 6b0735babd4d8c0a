"""Shapes of sparse MLA in real models, for tests, benchmarks and tuning."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class SparseMlaSpec:
    """One call: `rows` queries of `heads` local heads against `k` of `keys` rows of the cache."""

    name: str
    rows: int
    heads: int
    keys: int = 131072
    k: int = 2048
    width: int = 576
    kv_lora_rank: int = 512
    softmax_scale: float = 256**-0.5


PREFILL_ROWS = 4096
SPECS = (
    SparseMlaSpec("deepseek_v32", PREFILL_ROWS, 128, softmax_scale=192**-0.5),
    SparseMlaSpec("deepseek_v32_tp8", PREFILL_ROWS, 16, softmax_scale=192**-0.5),
    SparseMlaSpec("glm5", PREFILL_ROWS, 64),
    SparseMlaSpec("glm5_tp2", PREFILL_ROWS, 32),
    SparseMlaSpec("glm5_tp4", PREFILL_ROWS, 16),
    SparseMlaSpec("glm5_tp8", PREFILL_ROWS, 8),
    SparseMlaSpec("glm5_decode_1", 1, 64),
    SparseMlaSpec("glm5_decode_64", 64, 64),
    SparseMlaSpec("glm5_tp8_decode_64", 64, 8),
    SparseMlaSpec("glm53_flash", PREFILL_ROWS, 64, k=2051, width=512),
    SparseMlaSpec("glm53_flash_tp8", PREFILL_ROWS, 8, k=2051, width=512),
    SparseMlaSpec("glm53_flash_decode_1", 1, 64, k=2051, width=512),
    SparseMlaSpec("glm53_flash_tp8_decode_9", 9, 8, k=2051, width=512),
)
BY_NAME = {spec.name: spec for spec in SPECS}
