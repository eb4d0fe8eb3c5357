"""``python -m mmjax COMMAND ...``: the console command where the package is not installed."""

from mmjax.cli import run

if __name__ == "__main__":
    run()
