"""``python -m ring_attn verify``."""

import sys

from ring_attn.command import main

if __name__ == "__main__":
    sys.exit(main())
