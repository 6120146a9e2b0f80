"""Estimates of memory: `python -m kvjax.plan`, for training, prefill and decoding on chips that need not be here.

programs: training's update, prefill and decoding as programs of shapes. ahead: one program compiled, in a process of
its own.
"""
