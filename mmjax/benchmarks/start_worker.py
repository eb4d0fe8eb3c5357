"""One start of a training in a process of its own: prints the seconds of its activities as JSON. For `bench start`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds
    from mmjax.startup import begin

    begin("train")

import json
import sys

from mmjax.config_files import find, load
from mmjax.errors import leave, run_command
from mmjax.startup import loaded
from mmjax.train import train


def main() -> None:
    """Train as `CONFIG [a.b=value ...]` says."""
    loaded()
    path = find(sys.argv[1])
    session = train(load(path, sys.argv[2:]), path)
    print(json.dumps(session.start_seconds))


if __name__ == "__main__":
    leave(run_command(main))
