"""Serving a checkpoint: the launch command, what the installed stack lacks, and the MoE kernels that will be asked for.

Nothing here imports an engine or touches a GPU: packages are found through their metadata, and their files are read.
"""
