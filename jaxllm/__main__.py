"""`python -m jaxllm` is `jaxllm`."""

from __future__ import annotations

import sys

from jaxllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
