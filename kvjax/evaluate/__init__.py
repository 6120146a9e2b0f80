"""Measuring what a policy costs: tasks, accuracy from the paged cache, tables and pictures."""
