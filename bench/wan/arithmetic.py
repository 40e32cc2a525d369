"""What a round must move, reckoned from the sizes alone, before anything is measured."""

from __future__ import annotations

from typing import NamedTuple

from bench.wan.links import Link

FP32_BYTES = 4


class Sizes(NamedTuple):
    """Values that are synchronised: all shared ones, all experts together; an expert has one owner of `peers`."""

    peers: int
    shared: int
    experts: int

    @property
    def owned(self) -> float:
        """Expert values of one owner."""
        return self.experts / self.peers


class Volume(NamedTuple):
    """Bytes that a peer sends and receives in a round."""

    up: float
    down: float

    def seconds(self, link: Link) -> float:
        """Least time over a link that carries both directions at once."""
        return max(8e-6 * self.up / link.up, 8e-6 * self.down / link.down)


def swarm_volume(sizes: Sizes, shared_bytes: float, expert_bytes: float, refresh_every: int = 1) -> Volume:
    """A round of spesd: (1 - 1/P)(2 S + X) b each way, or X / k where experts are refreshed every k rounds.

    b, the bytes for one value, may differ between shared values and experts.

    Of the shared values a peer sends all that others reduce and gets all that others reduced; of the experts it sends
    its own to everybody and gets those of all others.
    """
    count = (1 - 1 / sizes.peers) * (2 * sizes.shared * shared_bytes + sizes.experts / refresh_every * expert_bytes)
    return Volume(count, count)


def server_volume(sizes: Sizes) -> Volume:
    """A round of the central server: 4 (S + X / P) up and 4 (S + X) down."""
    return Volume(FP32_BYTES * (sizes.shared + sizes.owned), FP32_BYTES * (sizes.shared + sizes.experts))


def server_limit(sizes: Sizes, peer: Link, server: Link) -> float:
    """Least seconds of the central server's round: nobody downloads before the last upload is in."""
    up, down = server_volume(sizes)
    uploads = max(up / peer.up, sizes.peers * up / server.down)
    downloads = max(down / peer.down, sizes.peers * down / server.up)
    return 8e-6 * (uploads + downloads)
