"""Run the command line as `python -m embodyrl`."""

import sys

from embodyrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
