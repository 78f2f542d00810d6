"""`retrograd bench`: plain autograd, checkpointing, the peers that are installed, and retrograd,
measured, stored and drawn.
"""
