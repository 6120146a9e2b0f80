"""Training: `python -m kvjax.train --method NAME`.

recipe: what a way of training is; recipes: one file each. config: what a run is told. data, documents: its sequences.
objective: what recipes minimise. step: one update. loop: the run. validation: figures of held-out sequences.
checkpoints, metrics: what a run keeps. report: the table at its end.
"""
