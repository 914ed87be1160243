"""Libraries that this one plugs into, each a package of its own, imported by name: ``ring_attn.integrations.transformers``."""
