"""A daemon without network and trainer: only the API, over a training that is made up.

Started like `spesd start`, with one word before the flags that says how it behaves:
good, flat (the loss does not fall), forked (its own hashes), slow (never ready), failing (at the start), dying (later),
stubborn (ignores SIGTERM, and has a child), rude (fails when it stops).
"""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spesd.api.schema import (
    Experts,
    HeldOut,
    Limits,
    Losses,
    Peers,
    Rounds,
    RoundStatus,
    State,
    Status,
    Stop,
    Traffic,
    TrainerStatus,
    UnitStatus,
    UnitVersion,
)
from spesd.api.server import ApiServer
from spesd.cli.launch import command

UNITS = ("shared-0", "expert-0", "expert-1")
ROUNDS_PER_SECOND = 40


def fake_command(behaviour, only=None):
    """Like `spesd.cli.launch.command`, for a fake daemon. `only`: state dir of the one that does not behave well."""

    def argv(config):
        chosen = behaviour if only in (None, config.state_dir.name) else "good"
        return [sys.executable, __file__, chosen, *command(config)[4:]]

    return argv


class FakeTraining:
    """Rounds pass with the clock; a unit's hash follows from unit and version."""

    def __init__(self, behaviour, state_dir):
        self.behaviour = behaviour
        self.state_dir = state_dir
        self.start = time.monotonic()
        self.stopping = asyncio.Event()

    def version(self, unit, version):
        salt = str(self.state_dir) if self.behaviour == "forked" else ""
        return UnitVersion(version=version, hash=hashlib.sha256(f"{unit}{version}{salt}".encode()).hexdigest())

    def status(self):
        passed = time.monotonic() - self.start
        number = 10 + int(ROUNDS_PER_SECOND * passed)
        loss = 5.0 if self.behaviour == "flat" else 5.0 - passed / 1000
        units = []
        for unit in UNITS:
            links = [self.version(unit, version) for version in range(max(1, number - 31), number + 1)]
            units.append(UnitStatus(unit=unit, version=number, hash=links[-1].hash, history=links))
        return Status(
            state=State.STARTING if self.behaviour == "slow" else State.TRAINING,
            peer=f"Qm{self.state_dir.name}",
            run="0123456789",
            run_name="fake",
            version="0",
            pid=os.getpid(),
            uptime_s=passed,
            addresses=["/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"],
            round=RoundStatus(number=number, committed=3, total=3),
            trainer=TrainerStatus(
                state="training",
                tokens=int(1000 * passed),
                tokens_per_second=1000.0,
                held_out=HeldOut(round=number, loss=loss),
                first_held_out=HeldOut(round=1, loss=5.0),
            ),
            owned=["expert-0"],
            units=units,
            traffic=Traffic(up_bytes=2_000_000, down_bytes=3_000_000),
            peers_live=4,
        )

    def peers(self):
        return Peers()

    def experts(self):
        return Experts()

    def loss(self):
        return Losses()

    def rounds(self):
        return Rounds()

    def limit(self, change):
        return Limits(**change.model_dump())

    def stop(self):
        if self.behaviour != "stubborn":
            self.stopping.set()
        return Stop(pid=os.getpid())


async def serve(behaviour, state_dir):
    training = FakeTraining(behaviour, state_dir)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, training.stop)
    server = ApiServer(training, state_dir)
    await server.start()
    if behaviour == "dying":
        await asyncio.sleep(0.5)
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    await training.stopping.wait()
    await server.close()


def main(behaviour, state_dir):
    if behaviour == "failing":
        print("spesd: peer.toml:1: threads: 0 is refused", flush=True)
        sys.exit(5)
    if behaviour == "stubborn":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    asyncio.run(serve(behaviour, state_dir))
    sys.exit(1 if behaviour == "rude" else 0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[sys.argv.index("--state-dir") + 1]))
