"""Runs the command `inductor-ext` as `python -m inductor_ext`."""

import sys

from inductor_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
