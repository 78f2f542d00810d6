"""How retrograd, checkpointing and other reversible libraries work with the tools of PyTorch users.

    python -m compatibility    # runs every row for every contestant (eight minutes)

It writes docs/compatibility.md. Each row is one use of one real tool: DDP in two processes,
`torch.export`, a Hugging Face Trainer. Its results, mostly gradients, are compared with those of
the same equations in plain autograd, in one process and without the tool. There are three verdicts:
equal, wrong, raised. `tests/test_compatibility.py` runs the same rows for retrograd.

One column has retrograd on the device of `tests/device`. There a row is run only if plain autograd
can run it with the same tool.

`rows` has the rows, by topic; `networks` the model that they train; `verdict` the comparison;
`runner` the processes; `page` the table.
"""
