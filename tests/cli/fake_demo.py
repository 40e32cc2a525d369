"""`spesd demo` over fake daemons, as a process of its own: `fake_demo.py BEHAVIOUR SECONDS [STATE_DIR_NAME]`."""

import sys
from functools import partial
from pathlib import Path

from fake_daemon import fake_command

from spesd.cli import demo, main

if __name__ == "__main__":
    behaviour, seconds, *only = sys.argv[1:]
    demo.run_demo = partial(demo.run_demo, argv=fake_command(behaviour, *only))
    manifest = Path(__file__).parents[2] / "peer_configs" / "demo.toml"
    sys.argv = ["spesd", "demo", "--seconds", seconds, "--manifest", str(manifest)]
    main.main()
