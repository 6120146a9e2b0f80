"""Admission methods, one file each: which tokens are retained when they leave the local window.

pattern_folder: DuoAttention's file format, which head_pattern reads.
"""
