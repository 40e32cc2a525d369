"""What a person writes: the manifest of a run and the configuration of one machine."""
