"""What the layer does to the quality of the context: `python -m benchmarks.quality` (see its `__main__.py`)."""
