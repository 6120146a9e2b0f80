"""What leaves the window for the global region: a file a method.

pattern_folder: DuoAttention's file format, which head_pattern reads.
"""
