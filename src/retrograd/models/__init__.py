"""Small real models, one file each, readable alone: ordinary modules that may be taken away."""
