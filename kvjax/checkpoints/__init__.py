"""What training leaves for use.

folder: weights and their description in a folder. gates: these, or a file of a method's authors, which torch_file
reads. fingerprint: for which model they are. orbax: the same as an Orbax checkpoint.
"""
