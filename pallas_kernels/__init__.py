"""Attention kernels for KV caches that keep different tokens in different heads.

Each op has a folder with a dense reference that defines it. The package imports jax and jaxtyping only.
"""
