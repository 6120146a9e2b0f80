"""Training write gates: `python -m kvjax.train`.

config: what a run is told. data, documents: its sequences. objective, step: the loss and one update. loop: the run.
validation: what gates are worth on held-out sequences. checkpoints, metrics: what a run keeps. exported: what it leaves
for use. report: the table at its end.
"""
