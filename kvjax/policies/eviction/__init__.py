"""Which stored entries are worth least: a file a method.

wrapped: evictions that hold another one, which are shared (AdaKV, PyramidKV), critical_kv and protected. queries: the
last queries, for methods that look at what was looked at.
"""
