"""The mixture-of-experts decoder and its units."""
