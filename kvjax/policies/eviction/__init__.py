"""Which stored entries are worth least: a file a method.

method: what a method's file returns. queries: the last queries, for methods that look at what was looked at.
"""
