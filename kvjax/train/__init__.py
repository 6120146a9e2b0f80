"""Training: `python -m kvjax.train --method NAME`.

recipe: the base class of training methods; recipes: one file each. config: the options of a run. data: its sequences,
made by readers from documents; batches: the rows of one process. packing: documents one after another; packs: separate
documents from mixed sources; passkeys: words hidden in them; labelled: the base class of recipes that use these.
objective: losses that recipes share. update: one update. loop: the run. validation: figures of held-out sequences.
checkpoints, metrics: files that a run keeps. memory: the memory that it needs on a device. reporting: checks that a run
can end with a report; report: the report of the built-in model; held_out_report: that of other models, with
distillation and thresholds for its rows.
"""
