"""Eviction methods, one file each: which stored entries are dropped.

wrapper: evictions that hold another one, which are those of adaptive (AdaKV, PyramidKV), critical_kv and protected.
queries: the last queries, for methods that score by their attention. random: chance, as a control.
"""
