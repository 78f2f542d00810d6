"""A language model of reversible layers, trained on a small machine. Begin with README.md."""
