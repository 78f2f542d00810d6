"""Attacks on the trainer and the command line: kills, damage, odd arguments, interrupts.

    make attack                                       # all, in full: two hours
    python -m speedrun.attacks kills state --share 0.1

Each attack is a function of how many times it is tried. It returns an `Outcome`: what was tried,
and what was lost. Processes are forked from this one, which has imported everything and computed
nothing, so that a trial takes a second and not ten.
"""
