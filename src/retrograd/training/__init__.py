"""Training a language model on a small machine: text, steps, checkpoints, report. `retrograd train`
is the command.

`text` reads files, `settings` says what a run is, `checkpoints` keeps and finds its states, `loop`
trains, `report` tells.
"""
