"""How fast the attention backends are on this machine, and how near its limits: `python -m kernels.bench`."""
