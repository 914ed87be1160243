"""``python -m jax_core.tune``."""

from jax_core.tune.command import main

if __name__ == "__main__":
    raise SystemExit(main())
