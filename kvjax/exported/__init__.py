"""What training leaves for use.

folder: weights and their description in a folder. fingerprint: for which model they are. orbax: the same as an Orbax
checkpoint.
"""
