"""Code that the commands share.

launch: the command line, and starting JAX on a mesh. options: YAML files of the same options. stopwatch: time without
compilation. compile_cache: compiled programs on disk. progress: a bar, or lines. lock: one process in a folder. shards:
shares of work that machines do without knowing of each other.
"""
