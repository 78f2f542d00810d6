"""Small real models, one file each. Each is an ordinary module that can be copied."""
