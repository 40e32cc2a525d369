"""The trainer process: model, optimizer and device, and nothing of the network."""
