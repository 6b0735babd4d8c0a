"""Predicted times of a prompt, from the cost model that also chooses the path.

The cost model counts what differs between the paths; here the dense layers and their collectives are added. A model to
compare settings by: it knows no launch overheads, no imbalance of experts and no overlap.
"""

import dataclasses

from dsa_jax.config import KdaConfig, ModelConfig
from sharding.cost_model import AttentionFacts, Hardware
from sharding.policy import Decision, PrefillPolicy, decide

# Times that linear attention reads or writes a float32 of each row and channel, counted in a compiled program.
LINEAR_PASSES = 110


@dataclasses.dataclass(frozen=True)
class PredictedTime:
    """Of one prompt that has the devices for itself.

    Attributes:
      ttft_s: From the first chunk's start to the last chunk's logits.
      layers_s: Of the last chunk, by kind of layer and part: "indexer" (full layers only), "attention", "projections",
        "linear_attention" (its layers only, projections included), "dense_mlp", "experts", "collectives".
    """

    ttft_s: float
    layers_s: dict[str, float]


def predict_time(
    config: ModelConfig,
    facts: AttentionFacts,
    policy: PrefillPolicy,
    *,
    qsplit: int,
    dcp: int,
    context: int,
    chunk_size: int,
    hardware: Hardware | None = None,
) -> PredictedTime:
    """Predict the prefill of one prompt in chunks.

    Args:
      config: The model.
      facts: Sizes of its attention.
      policy: Which paths may be taken.
      qsplit: Size of the mesh's "qsplit" axis.
      dcp: Size of the mesh's "dcp" axis.
      context: Tokens of the prompt.
      chunk_size: Most rows of a step.
      hardware: Rates; None means an H200.
    """
    hardware = Hardware() if hardware is None else hardware
    ttft, parts = 0.0, {}
    for start in range(0, context, chunk_size):
        rows = min(chunk_size, context - start)
        decision = decide(policy, [start + rows], [rows], facts, qsplit=qsplit, dcp=dcp, hardware=hardware)
        parts = layer_seconds(config, decision, rows, tp=qsplit * dcp, hardware=hardware)
        ttft += model_seconds(config, parts)
    return PredictedTime(ttft, parts)


def layer_seconds(
    config: ModelConfig, decision: Decision, rows: int, *, tp: int, hardware: Hardware
) -> dict[str, float]:
    """Time of each part of a layer in a step of `rows` rows."""
    costs = {c.name.partition(":")[0]: c.cost.seconds for c in decision.candidates if c.cost and decision.chose(c)}
    hidden, value = config.hidden_size, 2
    nope, latent = config.qk_nope_head_dim, config.kv_lora_rank
    # Every rank computes the latents; heads are split.
    shared = hidden * (config.q_lora_rank + latent + config.qk_rope_head_dim)
    per_head = (
        config.q_lora_rank * config.qk_head_dim + latent * (nope + config.v_head_dim) + hidden * config.v_head_dim
    )
    index = config.indexer.num_heads * config.indexer.head_dim * config.q_lora_rank + hidden * config.indexer.head_dim
    reduced = 2 * (tp - 1) / tp * rows * hidden * value / hardware.gather_bytes_per_s
    parts = {
        "indexer": (0.0 if decision.select_all else costs["indexer"]) + 2 * rows * index / hardware.matmul_flops,
        "attention": costs["attention"],
        "projections": 2 * rows * (shared + config.num_heads / tp * per_head) / hardware.matmul_flops,
        "dense_mlp": 2 * rows * 3 * hidden * config.intermediate_size / tp / hardware.matmul_flops,
        "collectives": 2 * (reduced + hardware.latency_s) if tp > 1 else 0.0,
    }
    if config.kda is not None:
        parts["linear_attention"] = _linear_seconds(config, config.kda, rows, tp, hardware)
    if config.moe is not None:
        moe = config.moe
        active = moe.intermediate_size * (moe.num_experts_per_tok + moe.num_shared_experts)
        parts["experts"] = 2 * rows * 3 * hidden * active / tp / hardware.matmul_flops
        # A chunk of thousands of rows reaches every expert: their weights are read whole.
        weights = 3 * hidden * moe.intermediate_size * moe.num_experts / tp
        parts["experts"] = max(parts["experts"], weights / hardware.memory_bytes_per_s)
    return parts


def _linear_seconds(config: ModelConfig, kda: KdaConfig, rows: int, tp: int, hardware: Hardware) -> float:
    """Time of a layer's linear attention."""
    per_channel = 4 * config.hidden_size + 2 * kda.head_dim
    weights = kda.width / tp * per_channel + 2 * config.hidden_size * kda.head_dim
    core = rows * kda.width / tp * 4 * LINEAR_PASSES
    return 2 * rows * weights / hardware.matmul_flops + core / hardware.memory_bytes_per_s


def model_seconds(config: ModelConfig, parts: dict[str, float]) -> float:
    """Time of all layers; the embedding and the logits of one row are left out."""
    full, dense = config.indexer_types.count("full"), config.mlp_types.count("dense")
    sparse = len(config.sparse_layers) * (parts["attention"] + parts["projections"])
    linear = (config.num_layers - len(config.sparse_layers)) * parts.get("linear_attention", 0.0)
    mlps = dense * parts["dense_mlp"] + (config.num_layers - dense) * parts.get("experts", 0.0)
    return sparse + linear + config.num_layers * parts["collectives"] + full * parts["indexer"] + mlps
