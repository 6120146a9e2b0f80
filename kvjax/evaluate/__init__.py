"""Comparisons of policies: `python -m kvjax.evaluate`.

config: the options; dry_run: checking them. sized_tasks: tasks at their lengths. compared: policy strings; gates: their
gates; sizing: policies at a budget; calibrated, teacher_forcing: policies fitted on calibration contexts. run: all
measurements. measuring: one policy on one set of contexts; answering: its answers; joint_eviction: one reading for
several evictions; footprint: entries held; interval: confidence intervals. long_answers: contests; recovery: their
scores relative to the dense model. results, merge, report, pictures: the output. lm_eval: an adapter for
lm-evaluation-harness.
"""
