"""Estimates of the memory that training, prefill and decoding take on chips that need not be here.

__main__: the command. programs: training's update, prefill and decoding as programs of shapes. ahead: compiling one
program in its own process.
"""
