"""``python -m longtake``."""

import sys

from longtake.cli import main

sys.exit(main())
