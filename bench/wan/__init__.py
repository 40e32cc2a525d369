"""The WAN bench: rounds of spesd and of a central server over emulated home internet links (`python -m bench.wan`)."""
