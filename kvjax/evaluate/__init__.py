"""Measuring what a policy costs: tasks, answers from the paged cache, tables and pictures."""
