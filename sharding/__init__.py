"""Meshes, token ownership and the sharded paths of DSA prefill, as pure functions on arrays.

Planned on the host: `mesh`, `row_partition`, `policy` with `cost_model`. Formulas for both sides: `ownership`, `rows`,
`local_keys`. Inside `shard_map`, called alike on every rank: `indexer_sharding` with `topk_merge`, `dcp_attention`,
`ckv_gather`, `token_split`.
"""
