"""Attention kernels for KV caches that keep different tokens in different heads.

One folder an op, each with a dense reference that says what it means. Imports jax and jaxtyping only.
"""
