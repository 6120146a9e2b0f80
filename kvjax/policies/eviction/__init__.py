"""Eviction methods, one file each: which stored entries are dropped.

wrapper: evictions that wrap another one, in adaptive (AdaKV, PyramidKV), critical_kv, protected and refit. queries: the
last queries, for methods that score by their attention. texts: checked arguments of methods that read texts.
"""
