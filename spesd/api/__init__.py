"""The local socket: its schema, server and client."""
