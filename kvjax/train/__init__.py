"""Training write gates: `python -m kvjax.train`."""
