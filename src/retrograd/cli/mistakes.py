"""What a user of the command line can put right."""


class Mistake(Exception):
    """Its text says how. Printed in one line, with an exit code of 2."""
