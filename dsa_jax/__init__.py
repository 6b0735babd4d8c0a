"""DeepSeek Sparse Attention prefill in JAX."""
