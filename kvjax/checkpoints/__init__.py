"""Exports of trained parameters, as training writes them and policies read them.

folder: weights and their description in a folder. gates: such a folder, or a file of a method's authors. torch_file:
reading of such files without torch. module: parameters of a module. published: gates on the hub. fingerprint: the model
that gates were made for. orbax: a pytree as an Orbax checkpoint.
"""
