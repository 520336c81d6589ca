"""`python -m fedprism` is the command line."""

import sys

from fedprism.cli import main

sys.exit(main())
