"""Which stored entries are worth least: a file a method.

wrapper: evictions that hold another one, which are those of adaptive (AdaKV, PyramidKV), critical_kv and protected.
queries: the last queries, for methods that look at what was looked at. random: by chance, to compare with.
"""
