"""The bridge between torch and JAX: see ``attention`` (what is computed), ``call`` (a call's way), ``backends`` (a device's
way into JAX) and ``job`` (the processes). None imports one that is named before it. Importing the bridge does not load JAX."""
