"""A central parameter server over gRPC, which does what the authors' server does, for comparison.

All clients upload what they train in fp32, the server waits for all of them, averages the shared values and copies
each expert from its owner, and all download everything. `python -m bench.wan.server server|client …` is one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from bench.wan.arithmetic import FP32_BYTES, Sizes

CHUNK_BYTES = 1 << 20
SERVICE = "spesd.bench.Server"
PORT = 9000
WAIT_SECONDS = 300.0
CONNECT_SECONDS = 30.0


class Server:
    """Holds all values; `upload` and `download` are handlers of gRPC, one thread for each client."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._values = np.zeros(sizes.shared + sizes.experts, np.float32)
        self._sum = np.zeros(sizes.shared, np.float32)
        self._lock = threading.Lock()
        self._all_here = threading.Barrier(sizes.peers, action=self._combine)

    def upload(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Take one client's trained values, and return when all clients' are combined."""
        client = int(dict(context.invocation_metadata())["client"])
        values = np.frombuffer(b"".join(chunks), "<f4")
        shared, mine = values[: self._sizes.shared], values[self._sizes.shared :]
        at = self._sizes.shared + client * mine.size
        with self._lock:
            self._sum += shared
            self._values[at : at + mine.size] = mine
        self._all_here.wait(WAIT_SECONDS)
        return b""

    def download(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """All values, in chunks."""
        return _chunks(self._values)

    def _combine(self) -> None:
        self._values[: self._sizes.shared] = self._sum / np.float32(self._sizes.peers)
        self._sum[:] = 0


def serve(sizes: Sizes) -> None:
    """Serve until standard input ends."""
    handler = Server(sizes)
    methods = {
        "Upload": grpc.stream_unary_rpc_method_handler(handler.upload),
        "Download": grpc.unary_stream_rpc_method_handler(handler.download),
    }
    server = grpc.server(ThreadPoolExecutor(2 * sizes.peers))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"0.0.0.0:{PORT}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(0).wait()


def take_part(sizes: Sizes, number: int, host: str) -> None:
    """Answer each line of standard input with a round, and a line of JSON about it."""
    size = sizes.shared + sizes.experts // sizes.peers
    values = np.random.default_rng(number).standard_normal(size, np.float32)
    with grpc.insecure_channel(f"{host}:{PORT}") as channel:
        grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
        upload = channel.stream_unary(f"/{SERVICE}/Upload")
        download = channel.unary_stream(f"/{SERVICE}/Download")
        print("ready", flush=True)
        for _ in sys.stdin:
            began = time.monotonic()
            upload(_chunks(values), metadata=(("client", str(number)),), timeout=WAIT_SECONDS)
            down = sum(len(chunk) for chunk in download(b"", timeout=WAIT_SECONDS))
            report = {"began": began, "ended": time.monotonic(), "up": values.nbytes, "down": down}
            print(json.dumps(report), flush=True)


def _chunks(values: np.ndarray) -> Iterator[bytes]:
    step = CHUNK_BYTES // FP32_BYTES
    for at in range(0, values.size, step):
        yield values[at : at + step].tobytes()


def main(argv: Sequence[str]) -> int:
    """Be the server, or the client with this number."""
    parser = argparse.ArgumentParser(prog="python -m bench.wan.server")
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("sizes", nargs=3, type=int, metavar=("PEERS", "SHARED", "EXPERTS"))
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args(argv)
    sizes = Sizes(*options.sizes)
    if options.role == "server":
        serve(sizes)
    else:
        take_part(sizes, options.number, options.host)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
