"""A stack inside a compiled graph: `torch.compile(model, fullgraph=True)` with flat memory.

While a model is traced, a stack is traced as plain equations, with a marker for each update
(`tracing`, `markers`). AOTAutograd derives backward from them: the joint graph. Before it is split
into forward and backward, a pass (`joint`) changes backward: it rebuilds the streams by undoing the
updates, and runs the functions again. `order` keeps the memory of that flat, and `randomness`
replays random draws. `seams` is the only file that uses private names of torch.
"""
