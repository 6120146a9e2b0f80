"""Code that the commands share.

launch: parsing the command line, starting JAX on a mesh, and errors. options: YAML files of options. cluster: joining
the processes of a run. stopwatch: times without compilation. compile_cache: compiled programs on disk. progress:
progress bars. lock: exclusive use of a folder. shards: shares of work for independent machines.
"""
