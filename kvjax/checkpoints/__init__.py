"""Trained parameters, as training leaves them for use.

folder: weights and their description in a folder. gates: such a folder, or a file of a method's authors, which
torch_file reads. module: parameters of a module. published: gates on the hub. fingerprint: the model that they were
made for. orbax: a pytree as an Orbax checkpoint.
"""
