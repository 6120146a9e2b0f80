"""Measuring what a policy costs: `python -m kvjax.evaluate`.

config: what an evaluation is told. sized_tasks: tasks at their lengths. compared: policy strings at a budget;
calibrated, teacher_forcing: how those that have something to fit are fitted. run: all results. measuring: one policy on
one set of contexts; answering: its answers; joint_eviction: one reading for several evictions; footprint: what it held.
long_answers: contests, answered while the policy works; recovery: held against the dense model. results, report,
pictures: what is written and shown.
"""
