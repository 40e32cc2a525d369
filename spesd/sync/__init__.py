"""The protocol, pure: no sockets, no clock, no disk, no threads."""
