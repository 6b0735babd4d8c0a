"""Meshes, token ownership and the sharded paths of DSA prefill, as pure functions on arrays."""
