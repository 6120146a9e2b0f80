"""Comparisons of policies: `python -m kvjax.evaluate`.

config: the options. sized_tasks: tasks at their lengths. compared: policy strings; gates: their gates; sizing: policies
at a budget; calibrated, teacher_forcing: policies that are fitted. run: all measurements. measuring: one policy on one
set of contexts; answering: its answers; joint_eviction: one reading for several evictions; footprint: entries held.
long_answers: contests, answered while the policy evicts; recovery: their scores relative to the dense model. results,
report, pictures: the output. lm_eval: an adapter for lm-evaluation-harness.
"""
