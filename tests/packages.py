"""The packages that tests run inside, imported quietly, with stand-ins for what they only import."""

from benchmarks.family_models import load as load
