"""Attention of one shard of queries over one shard of keys: each folder is a kernel under ``contract``.

Called by strategies; a kernel calls the masks and this room's own files, never another kernel.
"""
