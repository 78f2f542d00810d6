"""Measurements. Each command writes rows or prints a table; docs/benchmarks.md has the figures.

`python -m benchmarks` measures a training step of every contestant at several sizes: `cases` has
the networks, `steps` measures them, `matrix` stores and draws the rows. Each other file is a
command for one question, such as `python -m benchmarks.depth`. `gpu` is the command for a GPU, with
`gpu_measure` and `gpu_table`.
"""
