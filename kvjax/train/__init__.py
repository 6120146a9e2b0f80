"""Training: `python -m kvjax.train --method NAME`.

recipe: what a way of training is; recipes: one file each. config: what a run is told. data: its sequences, of readers
and documents; batches: rows of one process. packing: documents one after another; packs: separate ones, mixed;
passkeys: hidden in them; labelled: the recipes of these. objective: what recipes minimise. update: one of them. loop:
the run. validation: figures of held-out sequences. checkpoints, metrics: what a run keeps. memory: what it takes of a
device. reporting: whether it ends with a table; report: of the built-in model; held_out_report: of others, with
distillation and thresholds for its rows.
"""
