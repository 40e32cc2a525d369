"""Tokens: from text to shards, and which of them a peer trains on."""
