"""GPU kernels of DeepSeek Sparse Attention and their plain-JAX definitions.

One folder an operation; each exports its public function:

    from pallas_kernels.lightning_indexer import lightning_indexer
    from pallas_kernels.topk import topk
    from pallas_kernels.index_topk import index_topk
    from pallas_kernels.sparse_mla import merge_partials, sparse_mla
    from pallas_kernels.ckv_records import append, gather, pack, unpack
"""
