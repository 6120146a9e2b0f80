"""Training: `python -m kvjax.train --method NAME`.

A run:
    config: the options of a run. run: a run from its options to its export. loop: the training loop. update: one
    update. validation: figures of held-out sequences. checkpoints, metrics: files that a run keeps. memory: the memory
    that a run needs on a device. dry_run: the check without weights. preemption: SIGTERM.

Methods:
    recipe: the base class of training methods. recipes: one file per method. objective: losses that recipes share.
    labelled: the base class of recipes that need document borders and labelled tokens.

Data:
    data: sequences that are one document each. packing: a stream of documents, cut into sequences. packs: sequences of
    separate documents from mixed sources. passkeys: words hidden in text. documents, readers, conversation: where
    documents come from. batches: the rows of one process. contexts, targets, features, reconstruction: what gates learn
    from. teacher: stored predictions of a teacher. precomputed: folders that runs share.

Reports:
    reporting: the check that a run can have a report. report: the report for the built-in model. held_out_report: the
    report for other models. distillation, thresholds: its numbers.
"""
