"""What retrograd, checkpointing and other reversible libraries do under the tools that PyTorch
users use.

    python -m compatibility            # runs every row for every contestant, writes
    docs/compatibility.md (five minutes)

Each row is one use of one real tool: DDP in two processes, `torch.export`, a Hugging Face Trainer.
It gives numbers, gradients mostly, which are compared with those of the same equations in plain
autograd, in one process and without the tool. So there are three verdicts: ran and equal, ran and
wrong, raised. `tests/test_compatibility.py` runs the same rows for retrograd.

`rows` has the rows, by topic; `networks` the model that they train; `verdict` how numbers are
compared; `runner` the processes; `page` the table.
"""
