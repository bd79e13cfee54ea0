"""What the layer costs: `python -m benchmarks` (see `benchmarks/__main__.py`)."""
