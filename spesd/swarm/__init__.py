"""The network: identity, streams, records in the DHT and blobs by hash."""
