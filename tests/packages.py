"""The packages that tests run inside, imported quietly. What they only import has a stand-in."""

from benchmarks.family_models import load as load
