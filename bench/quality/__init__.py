"""How well a swarm learns, measured against a data centre: `python -m bench.quality`."""
