"""The life of the daemon: it connects trainer, protocol and network."""
